"""Runs a strategy on many questions at once, over one live source of samples."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.inference.base import WHOLE, Ask, AskKind, Solving, Strategy
from selfcal_lightning.inference.sources import SampleSource, Waste
from selfcal_lightning.records import Question, Sample, Verdict, duplicate_ids


def run_strategy(
    strategy: Strategy,
    questions: Sequence[Question],
    source: SampleSource,
    *,
    lookahead: int = 0,
    on_verdict: Callable[[Verdict, Sequence[Sample]], None] | None = None,
) -> list[Verdict]:
    """Run ``strategy`` on every question and return the verdicts in the order of ``questions``.

    Args:
        strategy: The strategy.
        questions: Questions with unique ids.
        source: Where samples come from.
        lookahead: How many samples beyond those asked for may be started for a question while the engine has room and
            no other question is waiting. Shortens the wait when there are few questions, at the cost of samples.
        on_verdict: Called with each verdict and the samples that it is based on.

    Raises:
        MissingConfidenceError: The source does not have the confidence that the strategy reads.

    Example:
        ``examples/your_strategy.py`` runs a strategy of its own on the bundled model.
    """
    verdicts: dict[str, Verdict] = {}
    with Driver(strategy, source, lookahead=lookahead, on_verdict=on_verdict) as driver:
        driver.add(*questions)
        while not driver.is_idle:
            verdicts |= {verdict.question_id: verdict for verdict in driver.work()}
    return [verdicts[question.id] for question in questions]


@dataclass(slots=True)
class _OpenQuestion:
    question: Question
    solving: Solving
    ask: Ask | None = None
    started: int = 0
    order: deque[AskKind] = field(default_factory=deque)
    arrived: dict[AskKind, deque[Sample]] = field(default_factory=dict)
    handed: list[Sample] = field(default_factory=list)
    is_concluded: bool = False  # nothing more is started for it

    def take_in(self, sample: Sample) -> None:
        """Store a sample that arrived with others of its kind."""
        self.arrived.setdefault(self.order.popleft(), deque()).append(sample)

    def missing(self, ask: Ask) -> int:
        return ask.num_samples - len(self.arrived.get(ask.kind, ())) - self.order.count(ask.kind)

    def batch(self) -> list[Sample] | None:
        """Return the samples asked for, or what a concluded question has of them; None while they are awaited."""
        if self.ask is None:
            return None
        here = self.arrived.get(self.ask.kind, deque())
        if len(here) < self.ask.num_samples and not self.is_concluded:
            return None
        return [here.popleft() for _ in range(min(self.ask.num_samples, len(here)))]


class Driver:
    """The loop between a strategy and a source of samples. Questions may be added while it runs."""

    def __init__(
        self,
        strategy: Strategy,
        source: SampleSource,
        *,
        lookahead: int = 0,
        on_verdict: Callable[[Verdict, Sequence[Sample]], None] | None = None,
        on_arrival: Callable[[Sample], None] | None = None,
    ) -> None:
        check_at_least(0, lookahead=lookahead)
        self.strategy, self.source, self.lookahead = strategy, source, lookahead
        self.on_verdict, self.on_arrival = on_verdict, on_arrival
        self._waiting: deque[Question] = deque()
        self._open: dict[str, _OpenQuestion] = {}
        self._reached: list[Verdict] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_idle(self) -> bool:
        """Whether every added question has its verdict and all verdicts were returned."""
        return not (self._waiting or self._open or self._reached)

    def add(self, *questions: Question) -> None:
        """Queue questions; they are started in order, as the engine has room."""
        in_work = [*self._waiting, *(opened.question for opened in self._open.values())]
        if repeated := duplicate_ids([*in_work, *questions]):
            raise InputError(f"Expected question ids to be unique, but got {repeated[0]!r} again.")
        self.source.prepare(questions, confidence=self.strategy.confidence)
        self._waiting.extend(questions)

    def work(self) -> list[Verdict]:
        """Start as many questions as there is room for, wait once for samples, and return new verdicts, if any."""
        self._fill()
        if self._open and not self._reached:
            samples = self.source.poll()
            for sample in samples:
                self._open[sample.question_id].take_in(sample)
                if self.on_arrival is not None:
                    self.on_arrival(sample)
            touched = dict.fromkeys(sample.question_id for sample in samples)
            self._advance([self._open[name] for name in touched])
            self._fill()
        reached, self._reached = self._reached, []
        return reached

    def cancel(self, *question_ids: str) -> dict[str, Waste]:
        """Drop questions without a verdict, ignoring unknown ids; return what open ones had generated."""
        dropped = set(question_ids)
        waiting = [question.id for question in self._waiting if question.id in dropped]
        self._waiting = deque(question for question in self._waiting if question.id not in dropped)
        ended = {name: opened for name in dropped if (opened := self._open.pop(name, None)) is not None}
        waste = self.source.cancel([*ended, *waiting])
        return {name: self._generated(opened, waste[name]) for name, opened in ended.items()}

    def conclude(self, *question_ids: str) -> None:
        """End open questions with what has arrived; their verdicts come with the next ``work``."""
        for opened in [self._open[name] for name in dict.fromkeys(question_ids) if name in self._open]:
            for sample in self.source.conclude(opened.question.id):
                opened.take_in(sample)
            opened.order.clear()
            opened.is_concluded = True
            self._advance([opened])

    def close(self) -> None:
        """Drop all questions; more may be added afterwards."""
        self.cancel(*self._open, *(question.id for question in self._waiting))

    def _fill(self) -> None:
        """Start questions while the engine has room; when none are waiting, look ahead in the open ones."""
        while self.source.in_flight < self.source.target:
            if not self._waiting:
                self._look_ahead()
                return
            question = self._waiting.popleft()
            opened = self._open[question.id] = _OpenQuestion(question, self.strategy.solve(question))
            self._advance([opened])

    def _look_ahead(self) -> None:
        """Start samples ahead of demand, one per question in turn, within the budget."""
        for ahead in range(1, self.lookahead + 1):
            for opened in self._open.values():
                if self.source.in_flight >= self.source.target:
                    return
                if opened.ask is None or not opened.ask.kind.is_whole:
                    continue  # what comes after a part of a response, only the strategy knows
                asked = len(opened.handed) + opened.ask.num_samples
                if opened.started < min(asked + ahead, self.strategy.max_samples):
                    self._start(opened, 1, WHOLE)

    def _start(self, opened: _OpenQuestion, count: int, kind: AskKind) -> None:
        if count > 0 and not opened.is_concluded:
            self.source.submit(opened.question.id, count, kind)
            opened.started += count
            opened.order.extend([kind] * count)

    def _advance(self, questions: Iterable[_OpenQuestion]) -> None:
        """Give strategies the samples that arrived, and close the questions that reached a verdict."""
        ended = [(opened, verdict) for opened in questions if (verdict := self._step(opened)) is not None]
        waste = self.source.cancel([opened.question.id for opened, _ in ended])
        for opened, verdict in ended:
            del self._open[opened.question.id]
            used = total_tokens(opened.handed[: verdict.samples_used], self.source.query_tokens)
            made = self._generated(opened, waste[opened.question.id])
            verdict = replace(verdict, samples_generated=made.samples, tokens_used=used, tokens_generated=made.tokens)
            self._reached.append(verdict)
            if self.on_verdict is not None:
                self.on_verdict(verdict, tuple(opened.handed))

    def _step(self, opened: _OpenQuestion) -> Verdict | None:
        """Run the strategy on the samples that arrived; return its verdict, or None while it waits for more."""
        try:
            if opened.ask is None:
                opened.ask = next(opened.solving)
                self._start(opened, opened.missing(opened.ask), opened.ask.kind)
            while (batch := opened.batch()) is not None:
                opened.handed += batch
                opened.ask = opened.solving.send(batch)
                self._start(opened, opened.missing(opened.ask), opened.ask.kind)
        except StopIteration as stop:
            verdict: Verdict = stop.value
            return verdict
        return None

    def _generated(self, opened: _OpenQuestion, waste: Waste) -> Waste:
        """Return all that was generated for a question: what was delivered, and the waste."""
        made = [*opened.handed, *(sample for samples in opened.arrived.values() for sample in samples)]
        delivered = total_tokens(made, self.source.query_tokens)
        tokens = None if delivered is None or waste.tokens is None else delivered + waste.tokens
        return Waste(len(made) + waste.samples, tokens)
