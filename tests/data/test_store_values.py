import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from support.fakes import FakeTask, fake_questions
from support.kill_worker import die_at
from support.store_samples import annotate, leftovers, make_group, make_store, write

from selfcal_lightning.cli import run
from selfcal_lightning.commands.pools import re_extract_answers
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.store import annotations, manifest
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, StoreCorruptError
from selfcal_lightning.data.tasks.base import reader_version
from selfcal_lightning.data.tasks.judging import judge_anew
from selfcal_lightning.data.tasks.registry import TASKS
from selfcal_lightning.records import Question, QuestionSamples, Sample


class Mended(FakeTask):
    """Reads the number before the line break, as `make_group` writes it, where ``only`` is in the text."""

    only = ""

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        found = re.search(r"é (\d+)\n", text)
        return found.group(1) if found and self.only in text and finished else None


def samples_of(store: SampleStore, *, round: int = 0) -> dict[str, tuple[Sample, ...]]:
    return {group.question.id: group.samples for group in SampleStore(store.path).samples(round=round)}


def stored(path: Path) -> SampleStore:
    """Seven questions in two parts and two rounds; one is in both parts and differs."""
    questions = fake_questions(7)
    store = make_store(path)
    write(store, questions[:5], part="a", per_shard=2)
    write(store, questions[4:], part="b", mark="other ")
    store.repair()
    write(make_store(path, round=1), questions[:2], part="a", round=1)
    store.join()
    return store


def test_answers_change_and_nothing_else_does(tmp_path: Path) -> None:
    store = stored(tmp_path)
    annotate(tmp_path, "sure", np.arange(28) / 100, estimator="self_certainty")
    before = [samples_of(store, round=round) for round in (0, 1)]
    sure = store.index(confidences=["sure"]).confidences["sure"].tolist()
    done = re_extract_answers(store, tasks=Mended)
    for round in (0, 1):
        after = samples_of(store, round=round)
        assert after.keys() == before[round].keys()
        for name, samples in after.items():
            assert [s.answer for s in samples] == ["0", None, "2", None], "an odd sample was cut"
            assert [s.correct for s in samples] == [False] * 4
            kept = [replace(s, answer=None, correct=None) for s in samples]
            assert kept == [replace(s, answer=None, correct=None) for s in before[round][name]]
    assert SampleStore(tmp_path).index(confidences=["sure"]).confidences["sure"].tolist() == sure
    assert (done.responses, done.answers_changed) == (36, 9), "one of the four to each of nine questions"
    assert done.verdicts_changed == 27
    assert done.readers == {"fake": reader_version(Mended())}
    manifest = SampleStore(tmp_path).manifest
    assert manifest.rereads == (done,)
    assert (manifest.questions, manifest.rows, manifest.duplicate_questions) == (9, 36, 0)
    assert sorted(tmp_path.rglob("*.parquet")) == sorted(
        [tmp_path / entry.file for entry in manifest.shards] + [*tmp_path.glob("annotations/*/*.parquet")]
    ), "the old shards are gone"


def test_what_does_not_change_is_not_written_again(tmp_path: Path) -> None:
    store = stored(tmp_path)
    re_extract_answers(store, tasks=Mended)
    shards = SampleStore(tmp_path).manifest.shards
    again = re_extract_answers(store, tasks=Mended)
    assert (again.answers_changed, again.verdicts_changed) == (0, 0)
    assert SampleStore(tmp_path).manifest.shards == shards
    assert len(SampleStore(tmp_path).manifest.rereads) == 2

    class One(Mended):
        only = fake_questions(1)[0].id

    re_extract_answers(store, tasks=One)
    kept = {entry.sha256 for entry in shards} & {entry.sha256 for entry in SampleStore(tmp_path).manifest.shards}
    assert not kept, "every shard had an answer that is gone now"
    assert sum(s.answer is not None for samples in samples_of(store).values() for s in samples) == 2


def test_a_store_is_continued_after_it_was_re_extracted(tmp_path: Path) -> None:
    store = stored(tmp_path)
    re_extract_answers(store, tasks=Mended)
    assert len(make_store(tmp_path).question_ids(include_parts=True)) == 7
    write(make_store(tmp_path), fake_questions(1, prefix="more"), part="a")
    store.join()
    assert store.repair().moved == ()
    assert len(samples_of(store)) == 8
    assert store.drop_rounds(1) == 1
    assert samples_of(store, round=0).keys() == store.question_ids()


def test_a_damaged_shard_a_failing_reader_or_a_writer_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    store = stored(tmp_path)
    before = samples_of(store)
    with pytest.raises(ValueError, match="'fake'"):
        re_extract_answers(store)
    last = tmp_path / store.manifest.shards[-1].file
    content = last.read_bytes()
    last.write_bytes(content[:-1] + b"x")
    with pytest.raises(StoreCorruptError):
        re_extract_answers(store, tasks=Mended)
    last.write_bytes(content)
    assert samples_of(store) == before
    assert not list(tmp_path.glob("parts/reread*"))
    with store.writer("b"), pytest.raises(RuntimeError, match="to have one writer, but got a second one"):
        re_extract_answers(store, tasks=Mended)
    re_extract_answers(store, tasks=Mended)


@pytest.mark.slow
def test_a_kill_leaves_the_old_answers_or_the_new(tmp_path: Path) -> None:
    store = stored(tmp_path / "before")
    old = samples_of(store)
    shutil.copytree(store.path, tmp_path / "after")
    re_extract_answers(SampleStore(tmp_path / "after"), tasks=Mended)
    new, seen, step = samples_of(SampleStore(tmp_path / "after")), set(), 1
    while True:
        broken = SampleStore(shutil.copytree(store.path, tmp_path / str(step)))
        child = os.fork()
        if not child:
            die_at(step)
            re_extract_answers(broken, tasks=Mended)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        for look in (lambda: None, broken.join):
            look()
            found = samples_of(broken)
            assert found in (old, new), step
            seen.add(found == new)
        make_store(broken.path)
        re_extract_answers(broken, tasks=Mended)
        assert samples_of(broken) == new
        assert {file.name for file in broken.path.glob("parts/*/*.parquet")} >= {
            Path(entry.file).name for entry in broken.manifest.shards
        }
        assert len(list(broken.path.glob("parts/*/*.parquet"))) == len(broken.manifest.shards)
        assert not leftovers(broken)
        if not status:
            break
        assert status == signal.SIGKILL
        step += 1
    assert seen == {False, True}
    assert step > 10


def test_answers_that_came_with_a_file_are_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "fake", FakeTask())
    line = '{"id": "a", "task": "fake", "split": "s", "question": "?", "reference": null, "responses": [{"text": "x"}]}'
    (tmp_path / "pool.jsonl").write_text(line + "\n")
    import_pool(tmp_path / "pool.jsonl", tmp_path / "store")
    with pytest.raises(ValueError, match=r"made elsewhere.*Import the file again"):
        re_extract_answers(SampleStore(tmp_path / "store"), tasks=Mended)


def test_a_request_that_failed_stays_one() -> None:
    failed = Sample("q", 0, 0, "", (), None, None, None)
    group = QuestionSamples(Question("q", "fake", (), "3"), (failed,), "train")
    assert judge_anew(group, Mended()) == group


def test_scores_that_compare_answers_go_when_one_changed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    store = make_store(tmp_path)
    question = Question("one", "word_problems", (), "3")
    read_wrong: Callable[[Sample], Sample] = lambda s: replace(s, text=f"The answer is {s.index}.", answer="9")  # noqa: E731
    group = make_group(question)
    with store.writer("a") as writer:
        writer.append(replace(group, samples=tuple(read_wrong(sample) for sample in group.samples)))
    store.join()
    run_score("response_consistency", str(tmp_path))
    # What compares the tokens of responses does not depend on how their answers are read.
    annotate(tmp_path, "steady", 1.0, estimator="sasc_std")
    assert annotation_names(tmp_path) == ["response_consistency", "steady"]
    assert run(["re-extract", "--store_dir", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert f"Re-extracted 4 responses of {tmp_path}: 4 have another answer, 2 another verdict." in said
    assert "Removed, since they compare answers: response_consistency. `selfcal score` writes them again." in said
    assert annotation_names(tmp_path) == ["steady"]
    (samples,) = samples_of(store).values()
    assert [(s.answer, s.correct) for s in samples] == [("0", False), ("1", False), ("2", False), ("3", True)]
    run_score("response_consistency", str(tmp_path))
    assert run(["re-extract", "--store_dir", str(tmp_path)]) == 0
    assert annotation_names(tmp_path) == ["response_consistency", "steady"]


# ---- values that are kept beside the samples

ORIGIN = {"model": {"sha256": "a"}, "targets": ("q", "v")}


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    """Three training and two validation questions with four samples each, in two parts."""
    store, questions = make_store(tmp_path / "store"), fake_questions(5)
    write(store, questions[:3], part="a")
    write(store, questions[3:], part="b", split="validation")
    store.join()
    return store


def publish(
    store: SampleStore, index: SampleIndex, values: Any, *, run: str = "run", parts: int = 1, **settings: Any
) -> annotations.Annotation:
    annotation = annotations.Annotation(store.path, "later")
    names = [f"rank-{rank}-of-{parts}" for rank in range(parts)]
    for rank, name in enumerate(names):
        mine = np.arange(len(index)) % parts == rank
        annotation.write_part(run, name, index.select(mine), np.asarray(values)[mine], store.manifest.shards)
    annotation.publish(run, names, **{"origin": ORIGIN, "details": {"by": run}, **settings})
    return annotation


def read(store: SampleStore, **where: Any) -> list[float]:
    return SampleStore(store.path).index(confidences=["later"], **where).confidences["later"].tolist()


@pytest.mark.parametrize("parts", [1, 3])
def test_values_come_back_at_their_rows(store: SampleStore, parts: int) -> None:
    index = store.index()
    values = np.arange(20) / 20
    annotation = publish(store, index, values, parts=parts)
    assert read(store) == values.tolist()
    assert read(store, split="validation") == values[index.split == "validation"].tolist()
    assert annotation.record.rows == 20
    assert [part.details["by"] for part in annotation.record.parts] == ["run"] * parts
    assert annotations.annotation_names(store.path) == ["later"]
    samples = [s for group in store.samples(confidences=["later"]) for s in group.samples]
    assert [sample.confidences["later"] for sample in samples] == values.tolist()
    assert samples[2].confidences["length"] == 2 / 8
    assert "later" not in next(store.samples()).samples[0].confidences
    few = SampleStore(store.path, num_samples=2).index(confidences=["later"])
    assert few.confidences["later"].tolist() == values[index.sample_index < 2].tolist()


def test_rows_without_a_value_are_counted(store: SampleStore, caplog: pytest.LogCaptureFixture) -> None:
    index = store.index(split="validation")
    publish(store, index, [0.5, np.nan, *[0.25] * 6])
    found = store.index(confidences=["later"])
    assert found.num_missing("later") == 13
    assert "13 of 20 responses" in caplog.text
    confidences = [s.confidences for group in store.samples(split="validation", confidences=["later"])
                   for s in group.samples]  # fmt: skip
    assert [c.get("later") for c in confidences[:3]] == [0.5, None, 0.25]


def test_a_later_run_of_the_same_origin_adds_and_comes_first(store: SampleStore) -> None:
    train, validation = store.index(split="train"), store.index(split="validation")
    publish(store, train, np.full(12, 0.1), run="one")
    publish(store, validation, np.full(8, 0.2), run="two")
    assert sorted(read(store)) == [0.1] * 12 + [0.2] * 8
    first = train.select(train.sample_index == 0)
    annotation = publish(store, first, np.full(3, 0.9), run="three")
    assert sorted(read(store)) == [0.1] * 9 + [0.2] * 8 + [0.9] * 3
    assert annotation.record.rows == 20
    # Parts that a later run covers are gone, from the record and from the disk.
    publish(store, train, np.full(12, 0.3), run="four")
    assert sorted(read(store)) == [0.2] * 8 + [0.3] * 12
    left = [part.file for part in annotation.record.parts]
    assert left == ["two-rank-0-of-1.parquet", "four-rank-0-of-1.parquet"]
    assert sorted(left) == sorted(file.name for file in annotation.folder.glob("*.parquet"))


def test_another_origin_is_refused_or_takes_the_place_of_all(store: SampleStore) -> None:
    publish(store, store.index(), np.full(20, 0.1))
    other = {**ORIGIN, "model": {"sha256": "b"}}
    message = r"model\.sha256: 'a' in the store, 'b' now\. Set `overwrite`"
    with pytest.raises(ValueError, match=message):
        annotations.Annotation(store.path, "later").check_origin(other)
    with pytest.raises(ValueError, match=message):
        publish(store, store.index(), np.full(20, 0.7), run="other", origin=other)
    assert read(store) == [0.1] * 20
    validation = store.index(split="validation")
    publish(store, validation, np.full(8, 0.7), run="other", origin=other, overwrite=True)
    assert read(store, split="validation") == [0.7] * 8
    assert np.isnan(read(store, split="train")).all()


def test_nothing_shows_before_it_is_published(store: SampleStore) -> None:
    index, annotation = store.index(), annotations.Annotation(store.path, "later")
    annotation.write_part("run", "rank-0-of-2", index, np.full(20, 0.1), store.manifest.shards)
    with pytest.raises(ValueError, match=r"got 'later'; it has \[\]"):
        store.index(confidences=["later"])
    with pytest.raises(RuntimeError, match=r"got none of \['run-rank-1-of-2.parquet'\]"):
        annotation.publish("run", ["rank-0-of-2", "rank-1-of-2"], origin=ORIGIN, details={})
    assert annotation.record is None


def test_rows_that_were_sampled_again_lose_their_values(store: SampleStore) -> None:
    index = store.index()
    publish(store, index, np.full(20, 0.1))
    shard = store.path / "parts" / "a" / "round-000-shard-000000.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    store = SampleStore(store.path)
    store.repair()
    write(store, fake_questions(5)[:3], part="a", mark="again ")
    store.join()
    assert np.isnan(read(store, split="train")).all()
    assert read(store, split="validation") == [0.1] * 8


def test_damage_and_mistakes_are_named(store: SampleStore) -> None:
    index = store.index()
    annotation = publish(store, index, np.full(20, 0.1))
    (file,) = annotation.folder.glob("*.parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(StoreCorruptError, match="the `selfcal score` or `selfcal predict` that wrote it again"):
        read(store)
    file.unlink()
    with pytest.raises(StoreCorruptError, match="no such file"):
        read(store)
    os.mkfifo(file)  # reading one would never end
    with pytest.raises(StoreCorruptError, match="not a regular file"):
        read(store)
    for name in ("../escape", "", "a/b"):
        with pytest.raises(ValueError, match="Expected `name` to be letters"):
            annotations.Annotation(store.path, name)
    own = annotations.Annotation(store.path, "length")
    own.write_part("run", "part", index, np.full(20, 0.1), store.manifest.shards)
    own.publish("run", ["part"], origin=ORIGIN, details={})
    with pytest.raises(ValueError, match="'length' to be an annotation only"):
        store.index(confidences=["length"])


PROBE = {"estimator": "probe", "states": {"levels": [0, 1]}}


def test_values_of_questions_are_added_found_and_of_one_origin(tmp_path: Path) -> None:
    annotation = annotations.QuestionAnnotation(tmp_path, "probe")
    assert annotation.record is None
    annotation.write({("a", "1"): 0.25, ("b", "1"): None}, origin=PROBE)
    annotation.write({("b", "1"): 0.5, ("c", "1"): 0.75}, origin=PROBE)
    keys = [("c", "1"), ("a", "1"), ("b", "1"), ("a", "2"), ("d", "1")]
    found = annotations.question_values(tmp_path, "probe", keys)
    assert found == [0.75, 0.25, 0.5, None, None], "another content has none"
    assert annotations.question_annotation_names(tmp_path) == ["probe"]
    other = {**PROBE, "states": {"levels": [2]}}
    with pytest.raises(InputError, match=r"states.levels: \[0, 1\] in the store, \[2\] now"):
        annotation.write({("b", "1"): 0.5}, origin=other)
    annotation.write({("b", "1"): 0.5}, origin=other, overwrite=True)
    assert annotations.question_values(tmp_path, "probe", [("a", "1"), ("b", "1")]) == [None, 0.5]
    (file,) = tmp_path.rglob("question_values.json")
    content = json.loads(file.read_text())
    content["values"][0][2] = 0.75
    file.write_text(json.dumps(content))
    with pytest.raises(StoreCorruptError, match="run `selfcal score-questions` again"):
        annotations.question_values(tmp_path, "probe", [("b", "1")])
    with pytest.raises(InputError, match=r"Expected 'other' to be a value of the questions .* but got \['probe'\]"):
        annotations.question_values(tmp_path, "other", [])
    with pytest.raises(InputError, match="`name` to be letters"):
        annotations.QuestionAnnotation(tmp_path, "../probe")


def test_writers_at_one_time_keep_each_others_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(name: str) -> None:
        annotations.QuestionAnnotation(tmp_path, "probe").write({(name, "1"): 0.5}, origin=PROBE)

    second, write_record = Thread(target=add, args=("b",)), manifest.write_record

    def write_late(path: Path, content: dict[str, Any]) -> None:
        if second.ident is None:  # the first writer has read what is there, and not yet written
            second.start()
            second.join(0.5)
        write_record(path, content)

    monkeypatch.setattr(manifest, "write_record", write_late)
    add("a")
    second.join()
    assert annotations.question_values(tmp_path, "probe", [("a", "1"), ("b", "1")]) == [0.5, 0.5]
