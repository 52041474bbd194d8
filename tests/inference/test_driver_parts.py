from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from support.driver_fakes import CHAT, live
from support.fakes import FakeEngine, fake_questions

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.steps import StepEnd
from selfcal_lightning.data.tasks.judging import sample_tokens
from selfcal_lightning.inference.base import WHOLE, Ask, AskKind, Solving, make_verdict
from selfcal_lightning.inference.driver import Driver, run_strategy
from selfcal_lightning.inference.sources import Waste, replay
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.records import Question, QuestionSamples, Sample, Verdict, sample_seed

FULL_STOP = ord(".")


@dataclass(frozen=True)
class FullStops:
    tokens: tuple[int, ...] = (FULL_STOP,)

    def first_end(self, token_ids: Sequence[int], *, after: int) -> StepEnd | None:
        stood = [place + 1 for place, token in enumerate(token_ids) if token == FULL_STOP]
        return next((StepEnd(end, is_settled=True) for end in stood if end > after), None)


class Counter:
    """A source that makes samples up: number i of a question after ``delay`` polls, of 10 tokens each."""

    query_tokens = 0

    def __init__(self, *, target: int = 2, delay: int = 0) -> None:
        self.target, self.delay = target, delay
        self.prepared: list[str] = []
        self.kinds: list[tuple[str, AskKind]] = []
        self.cancelled: list[str] = []
        self._queue: list[tuple[int, Sample]] = []
        self._started: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def prepare(self, questions: Sequence[Question], *, confidence: str | None) -> None:
        self.prepared += [question.id for question in questions]

    def submit(self, question_id: str, count: int, kind: AskKind = WHOLE) -> None:
        for _ in range(count):
            index = self._started.get(question_id, 0)
            self._started[question_id] = index + 1
            self.kinds.append((question_id, kind))
            prefix = kind.prefix or ()
            ids = (*prefix, *range(10))
            made = Sample(question_id, index, 0, "3", ids, "stop", "3", True, prefix_tokens=len(prefix))
            self._queue.append((self.delay, made))

    def poll(self) -> list[Sample]:
        ready = [sample for left, sample in self._queue if left <= 0]
        self._queue = [(left - 1, sample) for left, sample in self._queue if left > 0]
        return ready

    def cancel(self, question_ids: Sequence[str]) -> dict[str, Waste]:
        self.cancelled += question_ids
        self._queue = [item for item in self._queue if item[1].question_id not in question_ids]
        return dict.fromkeys(question_ids, Waste())


def work_off(driver: Driver) -> list[Verdict]:
    verdicts = []
    while not driver.is_idle:
        verdicts += driver.work()
    return verdicts


# ---- questions while it runs


def test_questions_may_come_while_others_are_in_work() -> None:
    first, second, third = fake_questions(3)
    source = Counter(target=4, delay=1)
    with Driver(SelfConsistency(max_samples=3), source) as driver:
        assert driver.is_idle
        assert driver.work() == [], "nothing to wait for"
        driver.add(first)
        assert driver.work() == []
        driver.add(second, third)
        assert source.prepared == [first.id, second.id, third.id]
        verdicts = work_off(driver)
    assert [verdict.question_id for verdict in verdicts] == [first.id, second.id, third.id]
    assert all((verdict.answer, verdict.samples_used) == ("3", 3) for verdict in verdicts)
    assert driver.is_idle


def test_a_question_that_has_its_verdict_may_come_again() -> None:
    (question,) = fake_questions(1)
    with Driver(SelfConsistency(max_samples=2), live(FakeEngine())) as driver:
        driver.add(question)
        with pytest.raises(InputError, match="ids to be unique"):
            driver.add(question)
        before = work_off(driver)
        driver.add(question)
        assert work_off(driver) == before, "the seeds are the same"


def test_what_cannot_be_asked_is_refused_and_the_rest_goes_on() -> None:
    question, long = fake_questions(2)
    with Driver(SelfConsistency(max_samples=2), live(FakeEngine(max_context=120))) as driver:
        driver.add(question)
        with pytest.raises(InputError, match="to have 1 to"):
            driver.add(replace(long, messages=(replace(long.messages[0], content="x" * 200),)))
        assert [verdict.question_id for verdict in work_off(driver)] == [question.id]


def test_questions_are_given_up_by_name_and_at_the_end() -> None:
    questions = fake_questions(3)
    source = Counter(target=1, delay=5)
    with Driver(SelfConsistency(max_samples=2), source) as driver:
        driver.add(*questions)
        driver.work()
        driver.cancel(questions[0].id, questions[2].id, "unknown")
        assert source.cancelled == [questions[0].id, questions[2].id], "an unknown question is not the source's"
        assert not driver.is_idle
        driver.work()
    assert source.cancelled == [questions[0].id, questions[2].id, questions[1].id]
    assert source.in_flight == 0
    assert driver.is_idle


def test_an_unknown_length_is_no_length_of_zero() -> None:
    class Unmeasured(Counter):
        def poll(self) -> list[Sample]:
            return [replace(made, token_ids=None, num_tokens=None) if made.index else made for made in super().poll()]

    (question,) = fake_questions(1)
    for number, tokens in ((1, 10), (2, None)):
        (verdict,) = run_strategy(SelfConsistency(max_samples=number), [question], Unmeasured())
        assert (verdict.tokens_used, verdict.tokens_generated) == (tokens, tokens)


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
    (question,) = fake_questions(1)
    source = Counter(target=6, delay=1)
    given: list[Sample] = []
    (verdict,) = run_strategy(
        Branching(), [question], source, lookahead=4, on_verdict=lambda _, samples: given.extend(samples)
    )
    kinds = [kind for _, kind in source.kinds]
    assert kinds[:5] == [WHOLE] * 5, "one was asked for, four were started ahead"
    assert [sample.prefix_tokens for sample in given] == [0, 6, 6, 6, 0]
    assert verdict.samples_used == 5
    assert verdict.samples_generated == 8, "three of those started ahead were of no use"
    assert verdict.tokens_generated == 80


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


@pytest.mark.parametrize("ask", [Ask(1, prefix=(7, 8)), Ask(1, to_step_end=True)], ids=["prefix", "step"])
def test_a_recorded_pool_refuses_parts(ask: Ask) -> None:
    class Asking(Branching):
        def solve(self, question: Question) -> Solving:
            samples = yield ask
            return make_verdict(question, samples, None, confidence=None, stopped_early=False)

    (question,) = fake_questions(1)
    entry = QuestionSamples(question, (Sample(question.id, 0, 0, "3", (1, 2), "stop", "3", True),), "test")
    with pytest.raises(InputError, match=r"(continue a prefix|end with a step), which recorded samples cannot"):
        replay(Asking(), entry)
