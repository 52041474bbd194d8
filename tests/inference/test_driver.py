import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from support.driver_fakes import CHAT, CountingEngine, HalfSure, Wandering, live, outcome
from support.fakes import FakeEngine, ReplyingEngine, fake_questions

from selfcal_lightning.confidence.base import MissingConfidenceError, confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.steps import StepEnd
from selfcal_lightning.data.tasks.judging import judge, sample_tokens
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import EngineStoppedError, Failure, RequestsFailedError
from selfcal_lightning.inference.base import Ask, Solving, Strategy, make_verdict
from selfcal_lightning.inference.driver import Driver, run_strategy
from selfcal_lightning.inference.stopping import EarlyStopping, WindowStopping
from selfcal_lightning.inference.voting import BestOfN, SelfConsistency
from selfcal_lightning.records import Message, Question, Response, Sample, Verdict, sample_seed


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
    """The whole budget is looked ahead for, the first readable one ends it: the engine is told at once."""
    engine = CountingEngine(slots=16)
    (verdict,) = run_strategy(
        EarlyStopping(threshold=0.0, max_samples=16), fake_questions(1), live(engine), lookahead=100
    )
    assert len(engine.requests) == 16, "no more than the budget"
    assert verdict.samples_used < verdict.samples_generated <= 16
    assert not engine._waiting
    assert len(engine.levels) < 16, "it did not wait for the others"
    assert verdict.tokens_used < verdict.tokens_generated == engine.tokens[verdict.question_id]


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


def test_nothing_is_sampled_before_all_prompts_are_known_to_fit() -> None:
    questions, engine = fake_questions(3), FakeEngine(max_context=90)
    long = Question("long", "fake", (Message("user", "x" * 90),))
    for asked, message in (([*questions, questions[0]], f"got '{questions[0].id}'"), ([*questions, long], "'long' to")):
        with pytest.raises(ValueError, match=message):
            run_strategy(SelfConsistency(), asked, live(engine))
    assert engine.requests == []


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


FULL_STOP = ord(".")


@dataclass(frozen=True)
class FullStops:
    tokens: tuple[int, ...] = (FULL_STOP,)

    def first_end(self, token_ids: Sequence[int], *, after: int) -> StepEnd | None:
        stood = [place + 1 for place, token in enumerate(token_ids) if token == FULL_STOP]
        return next((StepEnd(end, is_settled=True) for end in stood if end > after), None)


def work_off(driver: Driver) -> list[Verdict]:
    verdicts = []
    while not driver.is_idle:
        verdicts += driver.work()
    return verdicts


# ---- questions while it runs


def test_questions_may_come_while_others_are_in_work() -> None:
    questions = fake_questions(3)
    with Driver(SelfConsistency(max_samples=3), live(FakeEngine(slots=2))) as driver:
        assert driver.is_idle
        assert driver.work() == [], "nothing to wait for"
        driver.add(questions[0])
        verdicts = driver.work()
        driver.add(*questions[1:])
        verdicts += work_off(driver)
    expected = run_strategy(SelfConsistency(max_samples=3), questions, live(FakeEngine()))
    assert sorted(map(outcome, verdicts)) == sorted(map(outcome, expected))


def test_a_refused_question_leaves_the_rest_and_one_with_its_verdict_may_come_again() -> None:
    (question,) = fake_questions(1)
    with Driver(SelfConsistency(max_samples=2), live(FakeEngine(max_context=120))) as driver:
        driver.add(question)
        with pytest.raises(InputError, match="ids to be unique"):
            driver.add(question)
        with pytest.raises(InputError, match="to have 1 to"):
            driver.add(Question("long", "fake", (Message("user", "x" * 200),)))
        before = work_off(driver)
        assert [verdict.question_id for verdict in before] == [question.id]
        driver.add(question)
        assert work_off(driver) == before, "the seeds are the same"


def test_questions_are_given_up_by_name_and_at_the_end() -> None:
    engine, questions = CountingEngine(slots=32), fake_questions(3)
    with Driver(SelfConsistency(max_samples=9), live(engine)) as driver:
        driver.add(*questions)
        driver.work()
        driver.cancel(questions[0].id, questions[2].id, "unknown")
        assert {name.split("/")[-1] for name in engine._waiting} == {questions[1].id}
        assert not driver.is_idle
    assert not engine._waiting
    assert driver.is_idle


def test_an_unknown_length_is_no_length_of_zero() -> None:
    (question,), engine = fake_questions(1), CountingEngine()
    source = live(engine)
    poll = source.poll
    source.poll = lambda: [replace(s, token_ids=None, num_tokens=None) if s.index else s for s in poll()]
    (known,) = run_strategy(SelfConsistency(max_samples=1), [question], source)
    assert known.tokens_used == known.tokens_generated == engine.tokens[question.id]
    (unknown,) = run_strategy(SelfConsistency(max_samples=2), [question], source)
    assert (unknown.tokens_used, unknown.tokens_generated) == (None, None)


# ---- prefixes and steps


@dataclass(frozen=True)
class Branching:
    """Samples one response, then continues its first tokens."""

    length: int = 6
    max_samples: int = 8
    confidence: str | None = None
    name: str = "branching"

    def solve(self, question: Question) -> Solving:
        (first,) = yield Ask(1)
        branches = yield Ask(3, prefix=first.token_ids[: self.length])
        more = yield Ask(1)
        samples = [first, *branches, *more]
        return make_verdict(question, samples, first.answer, confidence=None, stopped_early=False)


def test_live_sources_continue_a_prefix() -> None:
    questions = fake_questions(5)
    engine = FakeEngine()
    given: dict[str, tuple[Sample, ...]] = {}
    verdicts = run_strategy(
        Branching(), questions, live(engine), on_verdict=lambda v, s: given.update({v.question_id: tuple(s)})
    )
    asked = {request.id: request for request in engine.requests}
    for verdict in verdicts:
        first, *branches, last = given[verdict.question_id]
        assert [sample.index for sample in (first, *branches, last)] == [0, 1, 2, 3, 4]
        for sample in branches:
            request = asked[f"0/{sample.index}/{verdict.question_id}"]
            assert request.prefix_ids == first.token_ids[:6]
            assert request.seed == sample_seed(0, 0, verdict.question_id, sample.index)
            assert (sample.prefix_tokens, sample.token_ids[:6]) == (6, first.token_ids[:6])
            assert sample.text == CHAT.decode(sample.token_ids), "the whole response is read"
            assert sample.drawn_tokens == len(sample.token_ids) - 6
            assert confidence_of(sample, "mean_logprob") == pytest.approx(sample.logprob / sample.drawn_tokens)
        assert (first.prefix_tokens, last.prefix_tokens) == (0, 0)
        drawn = sum(sample.drawn_tokens for sample in given[verdict.question_id])
        assert verdict.tokens_used == verdict.tokens_generated == drawn, "a prefix is paid for once"
    assert sample_tokens(branches[0], 7) == branches[0].drawn_tokens + 7


def test_what_was_started_ahead_is_not_taken_for_a_continuation() -> None:
    (question,), engine = fake_questions(1), CountingEngine(slots=6)
    given: list[Sample] = []
    (verdict,) = run_strategy(
        Branching(), [question], live(engine), lookahead=4, on_verdict=lambda _, samples: given.extend(samples)
    )
    assert [request.prefix_ids for request in engine.requests[:5]] == [()] * 5, "one was asked for, four came ahead"
    assert [sample.prefix_tokens for sample in given] == [0, 6, 6, 6, 0]
    assert verdict.samples_used == 5 < verdict.samples_generated == engine.made[question.id] <= 8
    assert verdict.tokens_generated == engine.tokens[question.id]


def test_samples_end_with_a_step_where_that_is_asked() -> None:
    class Stepping(Branching):
        def solve(self, question: Question) -> Solving:
            samples = yield Ask(2, to_step_end=True)
            further = yield Ask(1, prefix=samples[0].token_ids, to_step_end=True)
            return make_verdict(question, [*samples, *further], None, confidence=None, stopped_early=False)

    questions = fake_questions(4)
    given: list[Sample] = []
    run_strategy(Stepping(), questions, live(FakeEngine(), stops=FullStops()), on_verdict=lambda _, s: given.extend(s))
    steps = [sample for sample in given if sample.finish == "step"]
    assert steps
    assert all(sample.text.endswith(".") and sample.answer is None for sample in steps), "a part answers nothing"
    with pytest.raises(InputError, match="`stops`"):
        run_strategy(Stepping(), questions, live(FakeEngine()))
