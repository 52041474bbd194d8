from pathlib import Path

import numpy as np
import pytest
from support.fake_runs import contents, open_store, run
from support.fakes import FakeTask, fake_questions
from support.store_samples import annotate

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.pools import re_extract_answers
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.overview import plan_sampling
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.records import SamplingSettings

QUESTIONS = fake_questions(12)


def rows(path: Path) -> list:
    """Return everything that readers see of a store."""
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
