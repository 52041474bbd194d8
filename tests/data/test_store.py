import json
import math
import multiprocessing
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.fake_runs import contents, open_store, run
from support.fakes import FakeTask, fake_questions
from support.store_samples import FINGERPRINT, MODEL, annotate, leftovers, make_group, make_store, shards, write

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.pools import re_extract_answers
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store import maintenance
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.manifest import StoreManifest, fingerprint_digest
from selfcal_lightning.data.store.overview import plan_sampling
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import _confidences
from selfcal_lightning.records import SamplingSettings


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    questions = fake_questions(8)
    store = make_store(tmp_path)
    write(store, questions[:5], part="a")
    write(store, questions[5:], part="b", split="validation")
    assert store.question_ids() == set(), "readers see joined shards only"
    assert store.question_ids(include_parts=True) == {q.id for q in questions}
    manifest = store.join()
    assert manifest == store.manifest
    written = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.as_json().items() <= written.items()
    assert (manifest.questions, manifest.rows) == (written["questions"], written["rows"]) == (8, 32)
    assert manifest.rounds[0].fingerprint == FINGERPRINT
    sizes = [(3, {"train": 3}), (2, {"train": 2}), (3, {"validation": 3})]
    assert [(entry.questions, entry.splits) for entry in manifest.shards] == sizes
    found = list(SampleStore(tmp_path).samples())
    by_id = {q.id: make_group(q, split="train" if q in questions[:5] else "validation") for q in questions}
    assert [group.question.id for group in found] == sorted(by_id)
    assert all(group == by_id[group.question.id] for group in found)
    assert {group.question.id for group in store.samples(split="validation")} == {q.id for q in questions[5:]}
    assert list(store.samples(task="other")) == []
    assert not leftovers(store)


def test_index_columns(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    questions = fake_questions(5)
    write(store, questions)
    store.join()
    index = store.index(split="train")
    names = sorted(q.id for q in questions)
    assert index.question_id.tolist() == [name for name in names for _ in range(4)]
    assert index.question_index.tolist() == [rank for rank in range(5) for _ in range(4)]
    assert index.sample_index.tolist() == [0, 1, 2, 3] * 5
    assert index.answer[:4].tolist() == ["0", None, "2", "0"]
    np.testing.assert_array_equal(index.correct[:4], [1, math.nan, 0, 1])
    np.testing.assert_array_equal(index.p_true[:4], [0.3 / 0.3, 0.3 / 0.4, math.nan, 0.3 / (0.3 + 0.1 * 3)])
    np.testing.assert_array_equal(index.confidences["length"][:4], [math.nan, 1 / 8, 2 / 8, 3 / 8])
    assert index.num_tokens[:4].tolist() == [0, 1, 2, 3]
    assert set(index.num_prompt_tokens.tolist()) == {7}
    assert index.finish[:2].tolist() == ["stop", "length"]
    assert index.answer[0] is index.answer[4], "equal texts are one object"
    some = index.select(np.array([17, 2]))
    assert some.question_index.tolist() == [4, 0]
    rows = store.read_rows(some.locate(range(2)))
    found = [(row.question.id, row.sample.index, row.sample.token_ids) for row in rows]
    assert found == [(names[4], 1, (0,)), (names[0], 2, (0, 1))]
    assert len(store.index(split="nothing")) == 0
    assert list(store.samples(split="nothing")) == []


def test_reading_survives_pickling_and_later_shards(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    questions = fake_questions(6)
    write(store, questions[:3], part="b")
    store.join()
    index = store.index()
    expected = store.read_rows(index.locate([5]))
    write(store, questions[3:], part="a")
    store.join()
    assert pickle.loads(pickle.dumps(store)).read_rows(index.locate([5])) == expected  # noqa: S301
    assert len(store.index()) == 24


def test_a_model_may_move_and_nothing_else_change(tmp_path: Path) -> None:
    make_store(tmp_path)
    moved = replace(FINGERPRINT, model=replace(MODEL, model="/elsewhere/m", revision="main"))
    assert fingerprint_digest(moved.as_json()) == fingerprint_digest(FINGERPRINT.as_json())
    SampleStore.create_or_open(tmp_path, moved, num_samples=4, engine={"engine": "vllm"})
    weights = "model.weights_sha256: 'w' in the store, {} asked for"
    other = {"weights_sha256": "v"}
    for changes, message in (
        (other, weights.format("'v'")),
        (other | {"model": "n"}, "model.model: 'm' in the store, 'n' asked for; model.weights_sha256: 'w'"),
        ({"weights_sha256": None}, weights.format(None)),
    ):
        changed = replace(FINGERPRINT, model=replace(MODEL, **changes))
        with pytest.raises(ValueError, match=message):
            SampleStore.create_or_open(tmp_path, changed, num_samples=4, engine={})
    other = replace(FINGERPRINT, sampling=replace(FINGERPRINT.sampling, temperature=1.0), seed=3)
    both = r"sampling.temperature: 0.8 in the store, 1.0 asked for; seed: 0 in the store, 3 asked for\. .*`store_dir`"
    with pytest.raises(ValueError, match=both):
        SampleStore.create_or_open(tmp_path, other, num_samples=4, engine={})


def test_rounds_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    questions = fake_questions(3)
    write(store, questions)
    adapted = replace(FINGERPRINT, model=replace(MODEL, adapter_sha256="x"))
    later = SampleStore.create_or_open(tmp_path, adapted, num_samples=4, engine={}, round=1)
    write(later, questions[:2], round=1)
    later.join()
    assert len(later.index(round=0)) == 12
    assert len(later.index(round=1)) == 8
    assert later.question_ids(round=1) == {q.id for q in questions[:2]}
    assert len(list(later.samples(round=1))) == 2


def test_a_writer_takes_whole_questions_only(tmp_path: Path) -> None:
    store, (question,) = make_store(tmp_path), fake_questions(1)
    group = make_group(question)
    later = tuple(replace(sample, round=1) for sample in group.samples)
    assert "plan" not in FINGERPRINT.as_json(), "as in stores of before there were plans"
    wrong = {"Expected 4 samples": group.samples[:3], "samples 0, 1, 2": group.samples[::-1], "and round 0": later}
    with store.writer("a") as writer:
        for message, samples in wrong.items():
            with pytest.raises(ValueError, match=message):
                writer.append(replace(group, samples=samples))
    assert store.question_ids(include_parts=True) == set()
    write(store, [question])
    with store.writer("a") as writer, pytest.raises(ValueError, match="question ids to be unique"):
        writer.append(group)


def test_opening_writes_nothing_and_a_second_join_neither(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Expected a sample store"):
        SampleStore(tmp_path / "none").index()
    assert not (tmp_path / "none").exists()
    store = make_store(tmp_path)
    assert store.join().shards == ()
    write(store, fake_questions(4))
    store.join()
    before = (tmp_path / "manifest.json").stat().st_mtime_ns
    SampleStore(tmp_path).join()
    assert (tmp_path / "manifest.json").stat().st_mtime_ns == before


def test_an_overtaken_joiner_writes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another part commits, and its process joins, between this joiner's reading of the parts and its writing."""
    store, questions = make_store(tmp_path), fake_questions(4)
    write(store, questions[:2], part="a")
    merge, calls = maintenance.merge_parts, []

    def slow_merge(root: Path, entries: list, **options: object) -> StoreManifest:
        manifest = merge(root, entries, **options)
        calls.append(len(entries))
        if len(calls) == 1:
            write(store, questions[2:], part="b")
            SampleStore(tmp_path).join()
        return manifest

    monkeypatch.setattr(maintenance, "merge_parts", slow_merge)
    store.join()
    assert calls == [1, 2, 2]
    assert store.question_ids() == {q.id for q in questions}


def _create_and_join(path: Path, part: int) -> None:
    for number, question in enumerate(fake_questions(20, prefix=f"p{part}")):
        store = make_store(path)
        write(store, [question], part=f"part-{part}")
        if number % 6 == 5:
            store.join()
    store.join()


@pytest.mark.slow
def test_many_processes_create_write_and_join_at_once(tmp_path: Path) -> None:
    """Each opens the store, which clears abandoned files, while others write: none loses its file."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_create_and_join, args=(tmp_path, part)) for part in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(SampleStore(tmp_path).question_ids()) == 80
    assert not leftovers(SampleStore(tmp_path))


def test_equal_duplicates_are_read_once_and_different_ones_an_error_until_repaired(tmp_path: Path) -> None:
    equal, other, questions = make_store(tmp_path / "equal"), make_store(tmp_path / "other"), fake_questions(4)
    for store, marked in ((equal, {}), (other, {"mark": "other "})):
        write(store, questions, part="a")
        write(store, questions[:2], part="b", **marked)
    manifest = equal.join()
    assert (manifest.questions, manifest.duplicate_questions) == (4, 2)
    assert len(equal.index()) == 16
    assert equal.question_ids() == equal.question_ids(include_parts=True) == {q.id for q in questions}
    with pytest.raises(ValueError, match=r"got 2 with different samples in two parts.*parts/b/.*--repair true"):
        other.join()
    assert not (other.path / "manifest.json").exists()
    report = other.repair()
    assert (report.duplicates, report.questions, report.moved) == (2, 0, ())
    assert all(group == make_group(group.question) for group in other.samples())
    assert len(shards(other, "b")) == 1, "nothing readable is deleted"
    assert other.join().duplicate_questions == 2


def test_confidences_are_laid_out_once_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a row, which took days at millions of them."""
    made: list[int] = []
    full = np.full
    monkeypatch.setattr(np, "full", lambda *given, **options: (made.append(1), full(*given, **options))[1])
    chunks = [[json.dumps({"a": 0.5 + n, "b": 1.5}), None] for n in range(10)]
    found = _confidences(pa.chunked_array(chunks, pa.string()))
    assert len(made) == 2
    np.testing.assert_array_equal(found["a"], np.ravel([[0.5 + n, np.nan] for n in range(10)]))
    np.testing.assert_array_equal(found["b"], np.ravel([[1.5, np.nan]] * 10))


# ---- stores that are extended by more samples

QUESTIONS = fake_questions(12)


def rows(path: Path) -> list:
    index = (store := SampleStore(path)).index()
    return store.read_rows(index.locate(range(len(index))))


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("at_once")
    run(path, QUESTIONS, num_samples=7)
    contents(path)
    return path


def test_it_equals_one_that_was_drawn_at_once(at_once: Path, tmp_path: Path) -> None:
    for number in (2, 5, 7):
        report = run(tmp_path, QUESTIONS, num_samples=number, extend=True, questions_per_shard=5)
        contents(tmp_path)
    assert (report.reused, report.generated) == (0, 12 * 2), "what is there is not drawn again"
    assert rows(tmp_path) == rows(at_once)
    store = SampleStore(tmp_path)
    assert (store.manifest.questions, store.manifest.rounds[0].samples_of("train")) == (12, 7)
    assert store.manifest.rows == 12 * 7, "no response is counted twice"
    again = run(tmp_path, QUESTIONS, num_samples=7)
    assert (again.reused, again.generated) == (12, 0)
    index = SampleStore(tmp_path, num_samples=5).index()
    assert len(index) == 12 * 5, "readers may take the first ones"


def test_a_killed_one_goes_on_with_other_shares(at_once: Path, tmp_path: Path) -> None:
    run(tmp_path, QUESTIONS, num_samples=3)
    run(tmp_path, QUESTIONS, num_samples=7, extend=True, shard=(0, 2))
    sizes = {len(group.samples) for group in contents(tmp_path).values()}
    assert sizes == {3, 7}, "questions of the other share have what they had"
    planned = plan_sampling(str(tmp_path), {q.id for q in QUESTIONS}, num_samples=7, most_tokens=9)
    assert planned.stored == sum(len(group.samples) for group in contents(tmp_path).values())
    run(tmp_path, QUESTIONS, num_samples=7, extend=True)
    contents(tmp_path)
    assert rows(tmp_path) == rows(at_once)


def test_other_splits_keep_their_number(tmp_path: Path) -> None:
    test = fake_questions(4, prefix="t")
    run(tmp_path, QUESTIONS[:4], num_samples=2)
    run(tmp_path, test, num_samples=6, split="test", extend=True)
    found = {group.split: len(group.samples) for group in contents(tmp_path).values()}
    assert found == {"train": 2, "test": 6}
    with pytest.raises(InputError, match=r"to be at most 2.* Set `extend` of `selfcal generate` to draw the others"):
        run(tmp_path, QUESTIONS[:4], num_samples=6)
    with pytest.raises(InputError, match="to be 6, since 1 questions are missing"):
        run(tmp_path, fake_questions(5, prefix="t"), num_samples=2, split="test")
    open_store(tmp_path / "any", num_samples=None)
    with pytest.raises(InputError, match="where a plan or an import decided"):
        run(tmp_path / "any", QUESTIONS[:2], num_samples=3, extend=True)


def test_values_of_the_rows_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values: dict[tuple[str, int], float] = {}

    def score(name: str) -> None:
        store = SampleStore(tmp_path)
        index, shards = store.index(), store.manifest.shards
        new = ~Annotation(tmp_path, name).scored(index, shards)
        fresh = index.select(np.flatnonzero(new))
        for at, key in enumerate(zip(fresh.question_id, fresh.sample_index.tolist(), strict=True)):
            values[key] = len(values) + at / 1000
        column = np.array([values[key] for key in zip(fresh.question_id, fresh.sample_index.tolist(), strict=True)])
        Annotation(tmp_path, name).write_part(name + str(len(index)), "p", fresh, column, shards)
        Annotation(tmp_path, name).publish(name + str(len(index)), ["p"], origin={"by": "hand"}, details={})

    for number in (2, 3, 5):
        run(tmp_path, QUESTIONS, num_samples=number, extend=True)
        contents(tmp_path)
        score("mine")
    assert len(values) == 12 * 5, "no response was scored twice"
    index = SampleStore(tmp_path).index(confidences=["mine"])
    keys = zip(index.question_id, index.sample_index.tolist(), strict=True)
    found = dict(zip(keys, index.confidences["mine"], strict=True))
    assert found == values
    assert "hidden" not in caplog.text


def test_values_in_another_order_find_their_rows(tmp_path: Path) -> None:
    """As `selfcal predict` writes them: all rows again, the longest first."""
    for number in (2, 4):
        run(tmp_path, QUESTIONS, num_samples=number, extend=True, questions_per_shard=5)
        contents(tmp_path)
    store, values = SampleStore(tmp_path), np.arange(12 * 4) / 100
    index, order = store.index(), np.random.default_rng(0).permutation(12 * 4)
    annotate(tmp_path, "mine", values[order], index=index.select(order))
    assert store.index(confidences=["mine"]).confidences["mine"].tolist() == values.tolist()


def test_it_is_re_extracted_and_repaired(tmp_path: Path) -> None:
    class Doubling(FakeTask):
        def extract(self, text: str, *, finished: bool = True) -> str | None:
            found = super().extract(text, finished=finished)
            return None if found is None else str(2 * int(found))

    run(tmp_path, QUESTIONS, num_samples=2)
    run(tmp_path, QUESTIONS, num_samples=4, extend=True)
    before = contents(tmp_path)
    done = re_extract_answers(SampleStore(tmp_path), tasks=Doubling)
    readable = sum(sample.answer is not None for group in before.values() for sample in group.samples)
    assert (done.responses, done.answers_changed) == (12 * 4, readable), "no response is counted twice"
    after = contents(tmp_path)
    for name, group in before.items():
        expected = [None if s.answer is None else str(2 * int(s.answer)) for s in group.samples]
        assert [sample.answer for sample in after[name].samples] == expected
    assert SampleStore(tmp_path).repair().duplicates == 0
    run(tmp_path, QUESTIONS, num_samples=6, extend=True, tasks=Doubling)
    assert {len(group.samples) for group in contents(tmp_path).values()} == {6}


def test_answers_are_named_by_the_first_of_all_samples(tmp_path: Path) -> None:
    class Named(FakeTask):
        """Gives each response an answer of its own that equals those of the same number."""

        def extract(self, text: str, *, finished: bool = True) -> str | None:
            found = super().extract(text, finished=finished)
            return None if found is None else "0" * (len(text) % 2) + found

    run(tmp_path / "a", QUESTIONS, num_samples=6, tasks=Named)
    run(tmp_path / "b", QUESTIONS, num_samples=3, tasks=Named)
    run(tmp_path / "b", QUESTIONS, num_samples=6, extend=True, tasks=Named)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_the_verb_draws_what_is_missing(tmp_path: Path, shallow_model: str, capsys: pytest.CaptureFixture) -> None:
    def generate(folder: str, number: int, **options: object) -> None:
        run_generate(
            shallow_model, str(tmp_path / folder), "word_problems", split="test_id", limit=3, num_samples=number,
            sampling=SamplingSettings(max_new_tokens=16), **options,
        )  # fmt: skip

    generate("topped", 2)
    with pytest.raises(InputError, match="Set `extend`"):
        generate("topped", 4)
    generate("topped", 4, extend=True)
    assert "nothing is sampled" not in capsys.readouterr().err
    generate("topped", 4, extend=True)
    assert "nothing is sampled" in capsys.readouterr().err
