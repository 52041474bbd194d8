from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fake_runs import Groups, contents, open_store, run
from support.fakes import FakeEngine, fake_questions
from support.kill_worker import NUM_SAMPLES, QUESTIONS

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import EngineStoppedError, Failure, RequestsFailedError
from selfcal_lightning.records import Response, Sample


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
