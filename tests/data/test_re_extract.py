import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes import FakeTask, fake_questions
from support.kill_worker import die_at
from support.store_samples import annotate, leftovers, make_group, make_store, write

from selfcal_lightning.cli import run
from selfcal_lightning.commands.pools import re_extract_answers
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoreCorruptError
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
