import random
from collections.abc import Callable, Sequence

import pytest
from support.driver_fakes import CHAT, CountingEngine, HalfSure, Wandering, live, outcome
from support.fakes import FakeEngine, ReplyingEngine, fake_questions
from support.strategy_pools import make_entry

from selfcal_lightning.confidence.base import MissingConfidenceError, check_confidence
from selfcal_lightning.data.tasks.judging import judge
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import EngineStoppedError, Failure, RequestsFailedError
from selfcal_lightning.inference.base import Ask, Solving, Strategy
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.stopping import EarlyStopping, WindowStopping
from selfcal_lightning.inference.voting import BestOfN, SelfConsistency
from selfcal_lightning.records import Message, Question, Response, Sample


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
def test_the_query_is_put_only_where_it_is_read(strategy: Strategy, scorers: tuple[HalfSure, ...], asks: bool) -> None:
    engine = CountingEngine()
    verdicts = run_strategy(strategy, fake_questions(5), live(engine, scorers=scorers))
    assert {request.query for request in engine.requests} == {CHAT.query if asks else None}
    assert [verdict.tokens_generated for verdict in verdicts] == [engine.tokens[v.question_id] for v in verdicts]


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
        check_confidence(pool, "p_true")


def test_clear_errors() -> None:
    questions, engine = fake_questions(3), FakeEngine(max_context=90)
    long = Question("long", "fake", (Message("user", "x" * 90),))
    cases: list[tuple[str, Callable[[], object]]] = [
        (f"got '{questions[0].id}'", lambda: run_strategy(SelfConsistency(), [*questions, questions[0]], live(engine))),
        ("`lookahead` .* -1", lambda: run_strategy(SelfConsistency(), questions, live(engine), lookahead=-1)),
        ("`target` .* 0", lambda: live(engine, target=0)),
        ("'long' to have 1 to 89 tokens, but got 97", lambda: run_strategy(SelfConsistency(), [long], live(engine))),
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


HALF = "Answer: 0.5"
ABOVE = "Answer: 0.5000008"  # it differs from a half; what lies between equals both


@pytest.mark.parametrize(
    ("name", "texts", "answers", "correct"),
    [
        (
            "local_expression", [r"\boxed{x+1}", r"\boxed{\frac{1}{2}}", r"\boxed{1+x}", HALF, "?"],
            ["x+1", r"\frac{1}{2}", "x+1", r"\frac{1}{2}", None], [False, True, False, True, False],
        ),
        ("local_number", [HALF, ABOVE, "Answer: 0.5000004"], ["0.5", "0.5000008", "0.5"], [True, False, True]),
        ("local_number", [ABOVE, HALF, "Answer: 0.5000004"], ["0.5000008", "0.5", "0.5000008"], [False, True, False]),
    ],
)  # fmt: skip
def test_equal_answers_are_named_by_the_first(name: str, texts: list[str], answers: list, correct: list[bool]) -> None:
    responses = [Response("r", text, (), "stop", 0.0) for text in texts]
    samples = judge(Question("q", name, (), reference="0.5"), responses, get_task(name), round=0)
    assert [sample.answer for sample in samples] == answers
    assert [sample.correct for sample in samples] == correct


def test_failures_in_a_row_stop_the_run() -> None:
    """A server that is out of order once gave every question the verdict that nothing can be read."""
    engine = ReplyingEngine(lambda _: Failure("HTTP 503"), slots=1)
    with pytest.raises(EngineStoppedError, match=r"but 7 requests in a row failed .*HTTP 503"):
        run_strategy(SelfConsistency(max_samples=3), fake_questions(50), live(engine, max_failures=7))
    assert not engine._waiting
