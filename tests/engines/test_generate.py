import random
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from support.fake_runs import Groups, contents, open_store, run
from support.fakes import FakeChat, FakeEngine, FakeTask, fake_questions
from support.kill_worker import NUM_SAMPLES, QUESTIONS, SAMPLING, SEED, sample_share
from support.processes import start_forked, wait_for
from support.store_samples import stored_groups

from selfcal_lightning.core.signals import Interrupt, PreemptedError, never
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoreCorruptError
from selfcal_lightning.datamodules.questions import QuestionSource, load_questions
from selfcal_lightning.engines.base import EngineStoppedError, Failure, RequestsFailedError
from selfcal_lightning.engines.sampling.sampler import QUEUE_BATCHES, GenerationReport, generate_samples
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.records import Response, Sample, SamplingSettings, sample_seed

WORKER = Path(__file__).resolve().parents[1] / "support" / "kill_worker.py"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Groups:
    """What a run leaves that nothing disturbs."""
    path = tmp_path_factory.mktemp("unbroken")
    sample_share(path)
    return contents(path)


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


@pytest.mark.parametrize("plan", [[(0, 2), (1, 2)], [(2, 3), (0, 1)], [(0, 4), (1, 2), (0, 2)]], ids=str)
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


def test_what_cannot_be_sampled_is_refused(tmp_path: Path) -> None:
    one, other = fake_questions(2)
    with pytest.raises(ValueError, match=f"unique, but got 1 more than once, the first of them '{one.id}"):
        run(tmp_path, [one, other, one])
    with pytest.raises(ValueError, match=r"prompts of at most \d+ tokens.*\(2 such questions of 2\)"):
        run(tmp_path, [one, other], engine=FakeEngine(max_context=30))


def test_stored_questions_must_be_the_same_questions(tmp_path: Path) -> None:
    questions = fake_questions(2)
    run(tmp_path, questions)
    with pytest.raises(ValueError, match=rf"question '{questions[0].id}' to be as it was"):
        run(tmp_path, [replace(questions[0], reference="4")])
    with pytest.raises(ValueError, match=r"to be in split 'validation', but got 'train'"):
        run(tmp_path, questions[:1], split="validation")


def test_fewer_samples_are_taken_from_a_complete_store_only(tmp_path: Path) -> None:
    questions = fake_questions(4)
    run(tmp_path, questions[:2])
    assert run(tmp_path, questions[:2], num_samples=2).generated == 0
    run(tmp_path / "one", questions, num_samples=1)
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


class _RefusingEngine(FakeEngine):
    """Refuses all requests of some questions, and with ``deaf`` plain prompts too."""

    def __init__(self, refused: Collection[str], *, deaf: bool = False) -> None:
        super().__init__()
        self.refused, self.deaf = refused, deaf

    def poll(self) -> list[Response]:
        if bad := [name for name in self._waiting if name.split("/")[2] in self.refused]:
            self.cancel(bad[:1])
            raise RequestsFailedError({bad[0]: Failure("HTTP 400: too long", is_refusal=True)})
        return super().poll()

    def next_token_probabilities(self, prompts: Sequence[Sequence[int]], *args: Any, **options: Any) -> list[Any]:
        return [None] * len(prompts) if self.deaf else super().next_token_probabilities(prompts, *args, **options)


def test_a_poison_prompt_does_not_take_the_run_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = fake_questions(5)
    report = run(tmp_path, questions, engine=_RefusingEngine([questions[1].id]))
    assert (report.refused, report.left_out, report.generated) == (3, 0, 12)
    assert "HTTP 400: too long" in capsys.readouterr().err
    found = contents(tmp_path)
    assert len(found) == 5
    assert {(s.text, s.finish, s.answer, s.correct) for s in found[questions[1].id].samples} == {("", None, None, None)}


def test_an_engine_that_breaks_the_contract_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(engine, "poll", list)
    with pytest.raises(RuntimeError, match="Expected the engine to continue, but got nothing with 6 in flight"):
        run(tmp_path, fake_questions(2), engine=engine)
    assert not engine._waiting, "what was in flight is cancelled"


class _DyingEngine(FakeEngine):
    """Answers ``alive`` requests; from then on every request fails, until it is ``mended``, as over a dead server."""

    def __init__(self, alive: int, *, mended_after: int | None = None) -> None:
        super().__init__()
        self.alive, self.mended_after = alive, mended_after
        self.num_failed = 0

    def poll(self) -> list[Response]:
        if self.alive > 0 or (self.mended_after is not None and self.num_failed >= self.mended_after):
            responses = super().poll()
            self.alive -= len(responses)
            return responses
        name = next(iter(self._waiting))
        self.cancel([name])
        self.num_failed += 1
        raise RequestsFailedError({name: Failure("HTTP 503: out of order")})


def test_an_outage_leaves_questions_out_and_the_next_run_samples_them(tmp_path: Path, unbroken: Groups) -> None:
    """Failed requests were once stored as empty responses, for ever."""
    report = run(tmp_path, QUESTIONS, engine=_DyingEngine(30, mended_after=5))
    assert 1 <= report.left_out <= 5
    assert report.generated == NUM_SAMPLES * (len(QUESTIONS) - report.left_out)
    with pytest.raises(RuntimeError, match=rf"{len(QUESTIONS)} questions to be answered, but {report.left_out} had"):
        report.check_complete()
    found = contents(tmp_path)
    assert len(found) == len(QUESTIONS) - report.left_out
    assert all(sample.finish is not None for group in found.values() for sample in group.samples)
    again = run(tmp_path, QUESTIONS)
    assert (again.reused, again.left_out) == (len(QUESTIONS) - report.left_out, 0)
    assert contents(tmp_path) == unbroken


def test_failures_in_a_row_stop_the_run_and_what_is_complete_is_kept(tmp_path: Path, unbroken: Groups) -> None:
    engine = _DyingEngine(30)
    with pytest.raises(EngineStoppedError, match=r"but 8 requests in a row failed .* kept: .*HTTP 503: out of order$"):
        run(tmp_path, QUESTIONS, engine=engine, max_failures=8)
    assert engine.num_failed == 8
    assert not engine._waiting
    found = contents(tmp_path)
    assert 0 < len(found) < len(QUESTIONS)
    assert {name: unbroken[name] for name in found} == found
    run(tmp_path, QUESTIONS)
    assert contents(tmp_path) == unbroken


def test_an_engine_that_cannot_go_on_takes_nothing_complete_with_it(tmp_path: Path) -> None:
    class Crashing(FakeEngine):
        def poll(self) -> list[Response]:
            if len(self.requests) - len(self._waiting) > 20:
                raise EngineStoppedError("crashed")
            return super().poll()

    with pytest.raises(EngineStoppedError, match="crashed"):
        run(tmp_path, QUESTIONS, engine=Crashing())
    assert len(contents(tmp_path)) > 1


def test_a_file_with_a_question_left_out_is_not_stored_shard_by_shard(tmp_path: Path) -> None:
    engine = _DyingEngine(10, mended_after=1)
    report = run(tmp_path, QUESTIONS, engine=engine, questions_per_shard=4, shard_by_shard=True)
    assert report.left_out == 4
    assert len(contents(tmp_path)) == len(QUESTIONS) - 4


def test_an_engine_that_refuses_whatever_it_is_asked_stops_the_run_and_stores_nothing(tmp_path: Path) -> None:
    """A server that was started anew with another model refuses every prompt; one poison prompt is refused alone."""
    everything = _RefusingEngine({question.id for question in QUESTIONS})
    with pytest.raises(EngineStoppedError, match="4 requests in a row failed"):
        run(tmp_path, QUESTIONS, engine=everything, max_failures=4)
    assert contents(tmp_path) == {}
    with pytest.raises(EngineStoppedError, match="refused all 3 questions and a plain one"):  # too few for the limit
        run(tmp_path, QUESTIONS[:3], engine=_RefusingEngine(everything.refused, deaf=True))
    assert contents(tmp_path) == {}
    assert run(tmp_path, [QUESTIONS[5]], engine=_RefusingEngine({QUESTIONS[5].id})).refused == NUM_SAMPLES
    report = run(tmp_path, QUESTIONS, engine=_RefusingEngine({QUESTIONS[7].id}), max_failures=4)
    assert (report.refused, report.left_out) == (NUM_SAMPLES, 0)
    assert len(contents(tmp_path)) == len(QUESTIONS)


def test_repair_drops_questions_that_failed(tmp_path: Path, unbroken: Groups) -> None:
    """Stores written before hold empty responses of an outage; those of foreign pools have no token ids at all."""
    store = open_store(tmp_path)
    failed = {question.id for question in QUESTIONS[3:6]}
    with store.writer("rank-0-of-1", questions_per_shard=4) as writer:
        for number, question in enumerate(QUESTIONS):
            group = unbroken[question.id]
            if question.id in failed:
                empty = [Sample(question.id, i, 0, "", (), None, None, None) for i in range(NUM_SAMPLES)]
                kept = group.samples[:1] if number == 3 else ()  # the outage began in the middle of one
                group = replace(group, samples=(*kept, *empty[len(kept) :]))
            if number == 7:
                told = replace(group.samples[0], text="", token_ids=None, finish=None)
                group = replace(group, samples=(told, *group.samples[1:]))
            writer.append(group)
    assert run(tmp_path, QUESTIONS).generated == 0
    report = SampleStore(tmp_path).repair()
    assert (report.failed, report.moved, report.duplicates) == (3, (), 0)
    assert SampleStore(tmp_path).question_ids() == {question.id for question in QUESTIONS} - failed
    assert run(tmp_path, QUESTIONS).generated == 3 * NUM_SAMPLES
    found = contents(tmp_path)
    assert {name: found[name] for name in failed} == {name: unbroken[name] for name in failed}
    assert len(found) == len(QUESTIONS)
    assert SampleStore(tmp_path).repair().failed == 0


def sample(model: str, path: Path, interrupt: Interrupt = never, *, shard_by_shard: bool = True) -> GenerationReport:
    engine = TransformersEngine(model, max_batch=8)  # a new one, as after a kill
    questions = load_questions([QuestionSource("word_problems", split="train", limit=7)], role="train")
    report = generate_samples(
        questions, path, split="train", engine=engine, chat=engine.chat, sampling=SamplingSettings(max_new_tokens=60),
        seed=0, num_samples=4, questions_per_shard=3, shard_by_shard=shard_by_shard, progress=False,
        interrupt=interrupt,
    )  # fmt: skip
    SampleStore(path).join()
    return report


class After:
    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self) -> None:
        self.left -= 1
        if not self.left:
            raise PreemptedError("SIGTERM asked this run to stop")


@pytest.mark.slow
def test_every_place_to_stop_gives_the_same_samples(tiny_model: str, tmp_path: Path) -> None:
    sample(tiny_model, tmp_path / "whole")
    whole, stops = stored_groups(tmp_path / "whole"), 0
    for looks in range(1, 100, 5):
        store = tmp_path / f"stopped-{looks}"
        try:
            sample(tiny_model, store, After(looks))
        except PreemptedError:
            stops += 1
        else:
            break
        committed = len(SampleStore(store).question_ids(include_parts=True))
        assert committed in {0, 3, 6}, "whole files only"
        assert sample(tiny_model, store).reused == committed
        assert stored_groups(store) == whole
    assert stops > 3
    assert [len(whole), sum(len(group.samples) for group in whole.values())] == [7, 28]


@pytest.mark.slow
def test_otherwise_what_is_complete_is_kept(tiny_model: str, tmp_path: Path) -> None:
    seen = set()
    for looks in (2, 4, 6, 8):
        store = tmp_path / str(looks)
        with pytest.raises(PreemptedError):
            sample(tiny_model, store, After(looks), shard_by_shard=False)
        seen.add(len(SampleStore(store).question_ids(include_parts=True)))
    assert seen - {0, 3, 6}, f"single questions are kept: {seen}"
