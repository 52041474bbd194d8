"""The driver: order, counts, a full batch, cancelling, failures; and live runs equal replayed ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from support.driver_fakes import CHAT, CountingEngine, HalfSure, Wandering, live, outcome
from support.fakes import FakeEngine, fake_questions
from support.strategy_pools import make_entry

from selfcal_lightning.confidence.base import MissingConfidenceError
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.judging import Judge, judge
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import EngineStoppedError, Failure, RequestsFailedError
from selfcal_lightning.inference.base import Ask, Solving, Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.sources import ReplaySource
from selfcal_lightning.inference.stopping import EarlyStopping, WindowStopping
from selfcal_lightning.inference.voting import BestOfN, SelfConsistency
from selfcal_lightning.records import Message, Question, QuestionSamples, Response, Sample


@pytest.mark.parametrize("target", [None, 1, 40])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_samples_come_in_order_and_everything_is_counted(target: int | None, lookahead: int) -> None:
    engine, questions = CountingEngine(), fake_questions(30)
    verdicts = run_strategy(Wandering(), questions, live(engine, target=target), lookahead=lookahead)
    assert [verdict.question_id for verdict in verdicts] == [question.id for question in questions]
    for verdict in verdicts:
        assert verdict.samples_used == random.Random(verdict.question_id).randint(0, 9)
        assert verdict.samples_generated == engine.made[verdict.question_id]
        assert verdict.tokens_generated == engine.tokens[verdict.question_id]
    extra = sum(verdict.samples_generated - verdict.samples_used for verdict in verdicts)
    # Looking ahead waits until no question is left to open, and then takes what room there is.
    assert extra == 0 if lookahead == 0 or target == 1 else extra > 0
    assert not engine._waiting
    alone = [run_strategy(Wandering(), [question], live(FakeEngine(slots=1)))[0] for question in questions]
    assert list(map(outcome, verdicts)) == list(map(outcome, alone))
    assert [verdict.tokens_used for verdict in verdicts] == [verdict.tokens_used for verdict in alone]


def test_the_batch_is_full_until_no_question_is_left() -> None:
    engine, questions = CountingEngine(slots=8), fake_questions(60)
    run_strategy(EarlyStopping(threshold=0.9, max_samples=6), questions, live(engine))
    while_opening = [level for level, opened in engine.levels if opened < len(questions)]
    assert len(while_opening) > 10
    assert min(while_opening) >= 8, "a slot stood idle while questions waited"
    assert max(level for level, _ in engine.levels) <= 8 + 8 // 4, "more than the target was queued"


def test_what_is_still_in_flight_is_cancelled_with_the_verdict() -> None:
    """Sixteen are looked ahead for, the first readable one ends it: the engine is told at once."""
    engine = CountingEngine(slots=16)
    (verdict,) = run_strategy(
        EarlyStopping(threshold=0.0, max_samples=16), fake_questions(1), live(engine), lookahead=15
    )
    assert len(engine.requests) == 16
    assert verdict.samples_used < verdict.samples_generated <= 16
    assert not engine._waiting
    assert len(engine.levels) < 16, "it did not wait for the others"
    assert verdict.tokens_used < verdict.tokens_generated == engine.tokens[verdict.question_id]


def test_speculation_stays_within_the_budget_and_changes_no_verdict() -> None:
    engine, questions = CountingEngine(slots=64), fake_questions(5)
    strategy = EarlyStopping(threshold=0.8, max_samples=7)
    ahead = run_strategy(strategy, questions, live(engine), lookahead=100)
    plain = run_strategy(strategy, questions, live(FakeEngine()))
    assert max(int(request.id.split("/")[1]) for request in engine.requests) == 6
    assert list(map(outcome, ahead)) == list(map(outcome, plain))
    assert all(verdict.samples_generated == verdict.samples_used for verdict in plain)


def test_verdicts_are_told_as_they_come_with_their_samples() -> None:
    seen: dict[str, Sequence[Sample]] = {}
    verdicts = run_strategy(
        Wandering(), fake_questions(12), live(FakeEngine()),
        on_verdict=lambda verdict, samples: seen.update({verdict.question_id: samples}),
    )  # fmt: skip
    assert {verdict.question_id: verdict.samples_used for verdict in verdicts} == {k: len(v) for k, v in seen.items()}


@pytest.mark.parametrize(
    ("strategy", "scorers", "asks"),
    [
        (SelfConsistency(max_samples=3), (), False),
        (WindowStopping(window=2, max_samples=4), (), False),
        (BestOfN(confidence="sequence_logprob", max_samples=2), (), False),
        (EarlyStopping(max_samples=2), (), True),
        (SelfConsistency(max_samples=3), (HalfSure(),), True),
        (EarlyStopping(confidence="half", max_samples=2), (HalfSure(),), True),
    ],
)
def test_the_query_is_put_only_where_its_answer_is_read(
    strategy: Strategy, scorers: tuple[HalfSure, ...], asks: bool
) -> None:
    engine = CountingEngine()
    verdicts = run_strategy(strategy, fake_questions(5), live(engine, scorers=scorers))
    assert {request.query for request in engine.requests} == {CHAT.query if asks else None}
    assert [verdict.tokens_generated for verdict in verdicts] == [engine.tokens[v.question_id] for v in verdicts]


def test_scorers_add_to_what_the_strategy_sees() -> None:
    threshold = 0.45
    half = EarlyStopping(confidence="half", threshold=threshold)
    whole = EarlyStopping(threshold=2 * threshold)
    questions = fake_questions(12)
    by_half = run_strategy(half, questions, live(FakeEngine(), scorers=[HalfSure()]))
    by_whole = run_strategy(whole, questions, live(FakeEngine()))
    assert [verdict.samples_used for verdict in by_half] == [verdict.samples_used for verdict in by_whole]
    assert [v.confidence for v in by_half] == [pytest.approx(v.confidence / 2) for v in by_whole if v.confidence]


def test_a_failed_sample_is_unreadable_and_counted() -> None:
    questions = fake_questions(5)

    class Poisoned(CountingEngine):
        def poll(self) -> list[Response]:
            bad = [name for name in self._waiting if name.startswith("0/1/")]
            if bad and len(bad) == len(self._waiting):
                super().cancel(bad)
                raise RequestsFailedError(dict.fromkeys(bad, Failure("it crashed", is_refusal=True)))
            held = {name: self._waiting.pop(name) for name in bad}
            responses = super().poll()
            self._waiting |= held
            return responses

    said: list[str] = []
    source = live(Poisoned(), on_failed=said.append)
    seen: dict[str, Sequence[Sample]] = {}
    verdicts = run_strategy(
        SelfConsistency(max_samples=3), questions, source, on_verdict=lambda v, s: seen.update({v.question_id: s})
    )
    assert source.failed == 5
    assert "it crashed" in said[0]
    for verdict in verdicts:
        first, failed, last = seen[verdict.question_id]
        assert (failed.index, failed.answer, failed.finish, failed.token_ids) == (1, None, None, ())
        assert verdict.samples_used == verdict.samples_generated == 3
        assert verdict.tokens_used == len(first.token_ids or ()) + len(last.token_ids or ())


def test_one_source_serves_one_strategy_after_the_other() -> None:
    engine, questions = CountingEngine(), fake_questions(6)
    source = live(engine)
    first = run_strategy(EarlyStopping(max_samples=5), questions, source, lookahead=2)
    plain = run_strategy(SelfConsistency(max_samples=5), questions, source)
    assert {request.query for request in engine.requests[-6:]} == {None}
    again = run_strategy(EarlyStopping(max_samples=5), questions, source)
    assert list(map(outcome, again)) == list(map(outcome, first))
    assert all(verdict.samples_used == 5 for verdict in plain)


def test_confidences_that_are_not_there_are_named() -> None:
    questions = fake_questions(2)
    with pytest.raises(MissingConfidenceError, match=r"live sample has \(p_true, .*\), but it reads self_certainty"):
        run_strategy(EarlyStopping(confidence="self_certainty"), questions, live(FakeEngine()))

    class Third(HalfSure):
        name, requires = "third", ("half",)

    with pytest.raises(MissingConfidenceError, match=r"scorer 'third' .*, but it reads half"):
        run_strategy(SelfConsistency(), questions, live(FakeEngine(), scorers=[Third(), HalfSure()]))
    run_strategy(
        EarlyStopping(confidence="third", max_samples=2), questions, live(FakeEngine(), scorers=[HalfSure(), Third()])
    )
    pool = [make_entry(["a"], [None], name="bare")]
    with pytest.raises(MissingConfidenceError, match=r"'bare' to have the confidence 'p_true'.*selfcal score"):
        run_strategy(EarlyStopping(), [pool[0].question], ReplaySource(pool))


def test_clear_errors() -> None:
    questions, engine = fake_questions(3), FakeEngine(max_context=90)
    long = Question("long", "fake", (Message("user", "x" * 90),))
    lone = ReplaySource([QuestionSamples(questions[0], (), "test")])
    cases: list[tuple[str, Callable[[], object]]] = [
        (f"got '{questions[0].id}'", lambda: run_strategy(SelfConsistency(), [*questions, questions[0]], live(engine))),
        ("`lookahead` .* -1", lambda: run_strategy(SelfConsistency(), questions, live(engine), lookahead=-1)),
        ("`target` .* 0", lambda: live(engine, target=0)),
        ("`target` .* 0", lambda: ReplaySource([], target=0)),
        ("'long' to have 1 to 89 tokens, but got 97", lambda: run_strategy(SelfConsistency(), [long], live(engine))),
        ("2 of 3 questions are not in the pool", lambda: run_strategy(SelfConsistency(), questions, lone)),
        ("unique", lambda: ReplaySource([make_entry(["a"], [0.5])] * 2)),
    ]
    for message, call in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert engine.requests == [], "nothing is sampled before all prompts are known to fit"


def test_an_error_leaves_nothing_in_flight() -> None:
    class Stuck(FakeEngine):
        def poll(self) -> list[Response]:
            return []

    engine = Stuck()
    with pytest.raises(RuntimeError, match="Expected the engine to continue, but got nothing with 5 in flight"):
        run_strategy(EarlyStopping(), fake_questions(9), live(engine))
    assert not engine._waiting

    class Broken(Wandering):
        def solve(self, question: Question) -> Solving:
            yield Ask(3)
            raise ArithmeticError(question.id)

    engine = FakeEngine()
    with pytest.raises(ArithmeticError):
        run_strategy(Broken(), fake_questions(9), live(engine))
    assert not engine._waiting


class Close:
    """Numbers within one of each other are equal: not transitive, so that the order of judging shows."""

    name, answer_type = "close", "number"

    def __init__(self) -> None:
        self.verified: list[str | None] = []

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        return text or None

    def verify(self, answer: str | None, reference: str) -> bool:
        self.verified.append(answer)
        return answer is not None and abs(int(answer) - int(reference)) <= 1

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        named: list[str | None] = []
        for answer in answers:
            seen = dict.fromkeys(name for name in named if name is not None)
            equals = (name for name in seen if answer is not None and abs(int(name) - int(answer)) <= 1)
            named.append(None if answer is None else next(equals, answer))
        return named


@pytest.mark.parametrize("seed", range(20))
def test_judging_one_by_one_names_classes_as_judging_all_at_once(seed: int) -> None:
    draw = random.Random(seed)
    texts = [draw.choice(["", *"0123456"]) for _ in range(12)]
    responses = [Response("r", text, (1,), "stop", 0.0) for text in texts]
    task = Close()
    question = Question("q", "close", (), reference="3")
    samples = judge(question, [*responses, None], task, round=2)
    assert [sample.answer for sample in samples[:-1]] == task.group([text or None for text in texts])
    assert len(task.verified) == len(set(task.verified)), "every class is verified once"
    assert [sample.correct for sample in samples[:-1]] == [
        sample.answer is not None and abs(int(sample.answer) - 3) <= 1 for sample in samples[:-1]
    ]
    assert samples[-1] == Sample("q", 12, 2, "", (), None, None, None)
    assert {sample.correct for sample in judge(replace(question, reference=None), responses, task, round=0)} == {None}


def test_expressions_are_named_by_the_first_seen_in_index_order() -> None:
    task: Task = get_task("local_expression")
    reader = Judge(Question("q", "local_expression", (), reference="0.5"), task)
    texts = [r"\boxed{x+1}", r"\boxed{\frac{1}{2}}", r"\boxed{1+x}", "Answer: 0.5", "?"]
    samples = [reader.read(Response("r", text, (), "stop", 0.0)) for text in texts]
    assert [sample.answer for sample in samples[:4]] == ["x+1", r"\frac{1}{2}", "x+1", r"\frac{1}{2}"]
    assert [sample.correct for sample in samples[:4]] == [False, True, False, True]


def test_failures_in_a_row_stop_the_run() -> None:
    """A server that is out of order once gave every question the verdict that nothing can be read."""

    class Dead(CountingEngine):
        def poll(self) -> list[Response]:
            name = next(iter(self._waiting))
            super().cancel([name])
            raise RequestsFailedError({name: Failure("HTTP 503")})

    engine = Dead()
    with pytest.raises(EngineStoppedError, match=r"but 7 requests in a row failed .*HTTP 503"):
        run_strategy(SelfConsistency(max_samples=3), fake_questions(50), live(engine, max_failures=7))
    assert not engine._waiting
