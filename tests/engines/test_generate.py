import random
import signal
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.fake_runs import Groups, contents, run
from support.fakes import FakeChat, FakeEngine, FakeTask, fake_questions
from support.kill_worker import NUM_SAMPLES, QUESTIONS, SAMPLING, SEED, sample_share
from support.processes import start_forked, wait_for

from selfcal_lightning.core.progress import Progress
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoreCorruptError
from selfcal_lightning.engines.sampling import sampler
from selfcal_lightning.engines.sampling.sampler import QUEUE_BATCHES
from selfcal_lightning.records import sample_seed

WORKER = Path(__file__).resolve().parents[1] / "support" / "kill_worker.py"


def test_rows_are_the_engines_responses_read_and_judged(tmp_path: Path) -> None:
    engine, chat = FakeEngine(), FakeChat()
    questions = fake_questions(6, reference="03")
    report = run(tmp_path, questions, engine=engine)
    found = contents(tmp_path)
    samples = [sample for group in found.values() for sample in group.samples]
    assert (report.questions, report.reused, report.generated, report.refused) == (6, 0, 18, 0)
    assert report.unreadable == sum(sample.answer is None for sample in samples) > 0
    assert [request.seed for request in engine.requests if request.id.endswith(questions[2].id)] == [
        sample_seed(SEED, 0, questions[2].id, index) for index in range(3)
    ]
    for question in questions:
        group = found[question.id]
        assert group.question == question
        assert group.prompt_ids == chat.prompt_ids(question.messages)
        for sample in group.samples:
            assert chat.decode(sample.token_ids or ()) == sample.text
            assert sample.correct is (sample.answer == "3")
            assert sample.yes_mass is not None
            assert (sample.answer is None) == (sample.text == "I do not know.")


def test_answers_are_verified_once_and_without_a_reference_not_at_all(tmp_path: Path) -> None:
    task = FakeTask()
    run(tmp_path, fake_questions(1), num_samples=50, tasks=lambda name: task)
    assert task.verified <= 4
    run(tmp_path / "unknown", fake_questions(3, reference=None))
    assert {one.correct for group in contents(tmp_path / "unknown").values() for one in group.samples} == {None}


def test_truncated_responses_are_counted(tmp_path: Path) -> None:
    report = run(tmp_path, fake_questions(4), sampling=replace(SAMPLING, max_new_tokens=20))
    finishes = [sample.finish for group in contents(tmp_path).values() for sample in group.samples]
    assert report.truncated == finishes.count("length") > 0
    read = [s for g in contents(tmp_path).values() for s in g.samples if s.finish == "length" and s.answer is not None]
    assert report.cut_read == len(read)
    assert f"(an answer was read in {len(read) / report.truncated:.1%} of these)" in str(report)


def test_the_queue_never_runs_dry(tmp_path: Path) -> None:
    engine = FakeEngine(slots=128)
    run(tmp_path, fake_questions(120), engine=engine, num_samples=32, questions_per_shard=8)
    assert len(engine.requests) == 120 * 32
    assert engine.drained == 0
    assert engine.largest_queue <= 2 * QUEUE_BATCHES * engine.slots


def test_a_second_run_reuses_everything(tmp_path: Path) -> None:
    run(tmp_path, QUESTIONS[:10])
    engine = FakeEngine()
    report = run(tmp_path, QUESTIONS[:14], engine=engine)
    assert (report.reused, report.generated) == (10, 12)
    assert len(engine.requests) == 12
    assert run(tmp_path, QUESTIONS[:14]).generated == 0


@pytest.mark.parametrize(
    "plan", [[(0, 2), (1, 2)], [(2, 3), (0, 1)], [(0, 4), (1, 2), (0, 2)]], ids=["2", "3 then 1", "4 then 2"]
)
def test_any_number_of_processes_samples_alike(tmp_path: Path, plan: list[tuple[int, int]], unbroken: Groups) -> None:
    for number, total in plan:
        sample_share(tmp_path, shard=(number, total))
    assert contents(tmp_path) == unbroken
    assert SampleStore(tmp_path).manifest.duplicate_questions == 0


def start(path: Path, *, step: int = 0, shard: tuple[int, int] = (0, 1)) -> BaseProcess:
    number, total = shard
    return start_forked([str(WORKER), str(path), str(number), str(total), str(step)], path.with_suffix(".log"))


@pytest.mark.slow
def test_killed_before_any_write_step(tmp_path: Path, unbroken: Groups) -> None:
    """Every run dies one write step later: in shards, between shard and part manifest, in part manifests."""
    for step in [*range(1, 15), 0]:
        assert wait_for([start(tmp_path, step=step)]) == (-signal.SIGKILL if step else 0)
        if (tmp_path / "rounds" / "round-000.json").exists():
            store = SampleStore(tmp_path)
            assert len(store.stored_questions(include_parts=True)) % 2 == 0, "whole shards only"
            store.join()
    assert contents(tmp_path) == unbroken
    store = SampleStore(tmp_path)
    listed = {entry.file for entry in store.manifest.shards}
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")} == listed, "no orphan is left"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments(tmp_path: Path, seed: int, unbroken: Groups) -> None:
    """Two processes, killed and started again with one, three or two; then one run to the end."""
    stream = random.Random(seed)
    for total in (2, 1, 3, 2):
        processes = [start(tmp_path, shard=(number, total)) for number in range(total)]
        deadline = time.monotonic() + 300
        target = stream.randint(1, 5)
        before = len(list(tmp_path.rglob("*.parquet")))
        while len(list(tmp_path.rglob("*.parquet"))) < before + target and time.monotonic() < deadline:
            if not any(process.is_alive() for process in processes):
                break
            time.sleep(0.005)
        time.sleep(stream.random() / 20)
        for process in processes:
            process.kill()
            process.join()
    sample_share(tmp_path)
    assert contents(tmp_path) == unbroken


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ((), {}, "`questions` to hold at least one"),
        ((0, 1, 0), {}, r"unique, but got 1 more than once, the first of them 'q0"),
        ((0, 1), {"shard": (2, 2)}, "Expected `shard`"),
        ((0, 1), {"engine": FakeEngine(max_context=30)}, r"prompts of at most \d+ tokens.*\(2 such questions of 2\)"),
    ],
)
def test_what_cannot_be_sampled_is_refused(tmp_path: Path, ids: Any, options: dict[str, Any], message: str) -> None:
    questions = fake_questions(2)
    with pytest.raises(ValueError, match=message.replace("q0", questions[0].id)):
        run(tmp_path, [questions[i] for i in ids], **options)


def test_stored_questions_must_be_the_same_questions(tmp_path: Path) -> None:
    questions = fake_questions(4)
    run(tmp_path, questions[:2])
    with pytest.raises(ValueError, match=rf"question '{questions[0].id}' to be as it was"):
        run(tmp_path, [replace(questions[0], reference="4")])
    with pytest.raises(ValueError, match=r"to be in split 'validation', but got 'train'"):
        run(tmp_path, questions[:1], split="validation")


def test_fewer_samples_are_taken_from_a_complete_store_only(tmp_path: Path) -> None:
    questions = fake_questions(4)
    run(tmp_path, questions[:2])
    assert run(tmp_path, questions[:2], num_samples=2).generated == 0
    run(tmp_path / "one", questions, num_samples=1)
    with pytest.raises(ValueError, match="Expected `num_samples` to be None or at least 1"):
        run(tmp_path / "none", questions, num_samples=0)
    with pytest.raises(ValueError, match=r"Expected `num_samples` to be 3, since 2 questions are missing"):
        run(tmp_path, questions, num_samples=2)


def test_a_truncated_shard_stops_runs_until_it_is_repaired(tmp_path: Path, unbroken: Groups) -> None:
    sample_share(tmp_path)
    bad = sorted(tmp_path.rglob("*.parquet"))[3]
    bad.write_bytes(bad.read_bytes()[:100])
    with pytest.raises(StoreCorruptError, match=f"Expected {bad} to be a readable Parquet file.*--repair true"):
        sample_share(tmp_path)
    assert SampleStore(tmp_path).repair().questions == 2
    assert sample_share(tmp_path).generated == 2 * NUM_SAMPLES
    assert contents(tmp_path) == unbroken


def test_progress_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcal_lightning.core.progress.LINE_SECONDS", 0.0)
    with Progress(200, label="Sampling train") as bar:
        bar.update(50, unreadable=5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    for part in ("Sampling train: 50 of 200 responses", "a second", "10.0% unreadable", "left"):
        assert part in lines[0]
    with Progress(0, label="nothing"), Progress(5, label="quiet", enabled=False) as bar:
        bar.update(5)
    assert capsys.readouterr().err == ""


def test_a_prefix_that_does_not_fit_is_refused_before_anything_is_sampled() -> None:
    questions, chat = fake_questions(2), FakeChat()
    most = max(len(chat.prompt_ids(question.messages)) for question in questions) + 1
    assert len(sampler._encode_prompts(questions, chat, most, {"other": ()})) == 2
    with pytest.raises(ValueError, match=rf"prompts with prefixes of at most {most - 1} tokens.*{questions[1].id}"):
        sampler._encode_prompts(questions, chat, most, {questions[1].id: (1, 2)})
