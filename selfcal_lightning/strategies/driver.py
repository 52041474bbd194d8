"""The driver of strategies: many questions at once over one source of samples, live or recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, Sample, Verdict, duplicate_ids
from selfcal_lightning.strategies.base import Ask, Solving, Strategy, total_tokens
from selfcal_lightning.strategies.sources import SampleSource, Waste


def run_strategy(
    strategy: Strategy,
    questions: Sequence[Question],
    source: SampleSource,
    *,
    lookahead: int = 0,
    on_verdict: Callable[[Verdict, Sequence[Sample]], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Verdict]:
    """Run ``strategy`` on every question and return the verdicts in the order of ``questions``.

    A question is opened whenever fewer samples than ``source.target`` are in flight, so that the engine's batch stays
    full while each question waits for its own samples. A strategy gets samples in index order and exactly as many as
    it asked for, fewer only where the source has no more. When its verdict is there, all that is still in flight for
    the question is cancelled.

    The verdict's costs: ``samples_used`` is the strategy's own count, and ``tokens_used`` the tokens of these samples;
    ``samples_generated`` and ``tokens_generated`` add what was begun and not used. A sample that was queued and not
    begun is not counted. Tokens are those of responses and, where the source puts it, of the confidence query; None
    where the length of a response is unknown.

    Args:
        strategy: What decides.
        questions: What to answer; ids must be unique.
        source: Where samples come from.
        lookahead: Samples beyond those asked for that may be started for a question while no other question can be
            opened and the engine has room. They shorten the wait when there are few questions and cost samples.
        on_verdict: Called with each verdict as it is reached and the samples that were delivered for it.
        progress: Called with the number of samples that arrived, after each wait.

    Raises:
        MissingConfidenceError: Where the source cannot give the confidence that the strategy reads.
        ValueError: Where an id occurs twice, or a question cannot be asked.

    Example:
        >>> from selfcal_lightning.records import QuestionSamples
        >>> from selfcal_lightning.strategies.base import make_verdict
        >>> from selfcal_lightning.strategies.sources import ReplaySource
        >>> class First:
        ...     name, max_samples, confidence = "first", 1, None
        ...
        ...     def solve(self, question):
        ...         (sample,) = yield Ask(1)
        ...         return make_verdict(question, [sample], sample.answer, confidence=None, stopped_early=False)
        >>> question = Question("q", "local_number", (), reference="4")
        >>> samples = tuple(Sample("q", i, 0, "4", (1, 2), "stop", "4", True) for i in range(3))
        >>> (verdict,) = run_strategy(First(), [question], ReplaySource([QuestionSamples(question, samples, "test")]))
        >>> verdict.answer, verdict.correct, verdict.samples_generated, verdict.tokens_generated
        ('4', True, 1, 2)
    """
    if repeated := duplicate_ids(questions):
        raise InputError(f"Expected question ids to be unique, but got {repeated[0]!r} again.")
    if lookahead < 0:
        raise InputError(f"Expected `lookahead` to be at least 0, but got {lookahead}.")
    source.prepare(questions, confidence=strategy.confidence)
    driver = _Driver(strategy, source, lookahead, on_verdict, progress)
    return driver.run(questions)


@dataclass(slots=True)
class _OpenQuestion:
    """A question in work.

    Attributes:
        question: The question.
        solving: The strategy at work on it.
        awaited: Samples that it asked for and has not got.
        started: Samples started.
        arrived: Samples that came and were not handed over.
        handed: Samples that the strategy has seen.
        exhausted: Whether the source has no more.
    """

    question: Question
    solving: Solving
    awaited: int = 0
    started: int = 0
    arrived: deque[Sample] = field(default_factory=deque)
    handed: list[Sample] = field(default_factory=list)
    exhausted: bool = False

    @property
    def can_go_on(self) -> bool:
        """Whether what the strategy asked for is there, or all that there will be."""
        all_here = len(self.handed) + len(self.arrived) == self.started
        return len(self.arrived) >= self.awaited or (self.exhausted and all_here)


class _Driver:
    """The loop between the strategies and the source."""

    def __init__(
        self,
        strategy: Strategy,
        source: SampleSource,
        lookahead: int,
        on_verdict: Callable[[Verdict, Sequence[Sample]], None] | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.strategy, self.source, self.lookahead = strategy, source, lookahead
        self.on_verdict, self.progress = on_verdict, progress
        self._open: dict[str, _OpenQuestion] = {}
        self._verdicts: dict[str, Verdict] = {}

    def run(self, questions: Sequence[Question]) -> list[Verdict]:
        """Open, feed and end questions until all have a verdict."""
        waiting = iter(questions)
        try:
            self._fill(waiting)
            while self._open:
                samples = self.source.poll()
                if self.progress is not None:
                    self.progress(len(samples))
                for sample in samples:
                    self._open[sample.question_id].arrived.append(sample)
                touched = dict.fromkeys(sample.question_id for sample in samples)
                self._advance([self._open[name] for name in touched])
                self._fill(waiting)
        finally:
            self.source.cancel(list(self._open))
        return [self._verdicts[question.id] for question in questions]

    def _fill(self, waiting: Iterator[Question]) -> None:
        """Open questions while the engine has room; when none can be, look ahead in the open ones."""
        while self.source.in_flight < self.source.target:
            question = next(waiting, None)
            if question is None:
                self._look_ahead()
                return
            opened = self._open[question.id] = _OpenQuestion(question, self.strategy.solve(question))
            self._advance([opened])

    def _look_ahead(self) -> None:
        """Start samples that were not asked for yet, one a question in turn, within the budget."""
        for ahead in range(1, self.lookahead + 1):
            for opened in self._open.values():
                if self.source.in_flight >= self.source.target:
                    return
                asked = len(opened.handed) + opened.awaited
                if opened.started < min(asked + ahead, self.strategy.max_samples):
                    self._start(opened, 1)

    def _start(self, opened: _OpenQuestion, count: int) -> None:
        if count > 0 and not opened.exhausted:
            started = self.source.submit(opened.question.id, count)
            opened.started += started
            opened.exhausted = started < count

    def _advance(self, questions: Iterable[_OpenQuestion]) -> None:
        """Hand over what has been asked for and arrived, as far as that goes, and close what has a verdict."""
        ended = [(opened, verdict) for opened in questions if (verdict := self._step(opened)) is not None]
        waste = self.source.cancel([opened.question.id for opened, _ in ended])
        for opened, verdict in ended:
            del self._open[opened.question.id]
            verdict = self._with_costs(verdict, opened, waste[opened.question.id])
            self._verdicts[opened.question.id] = verdict
            if self.on_verdict is not None:
                self.on_verdict(verdict, tuple(opened.handed))

    def _step(self, opened: _OpenQuestion) -> Verdict | None:
        """Run the strategy on what has arrived until it waits for more (None) or ends."""
        try:
            ask = next(opened.solving) if not opened.awaited else self._hand_over(opened)
            while ask is not None:
                opened.awaited = ask.num_samples
                self._start(opened, len(opened.handed) + ask.num_samples - opened.started)
                ask = self._hand_over(opened)
        except StopIteration as stop:
            return stop.value
        return None

    def _hand_over(self, opened: _OpenQuestion) -> Ask | None:
        """Give the strategy what it asked for and return its next Ask; None where it has to wait."""
        if not opened.can_go_on:
            return None
        batch = [opened.arrived.popleft() for _ in range(min(opened.awaited, len(opened.arrived)))]
        opened.handed += batch
        return opened.solving.send(batch)

    def _with_costs(self, verdict: Verdict, opened: _OpenQuestion, waste: Waste) -> Verdict:
        """Return the verdict with what it cost: samples used, and all that was generated."""
        price = self.source.query_tokens
        made = (*opened.handed, *opened.arrived)
        delivered = total_tokens(made, price)
        unknown = delivered is None or waste.tokens is None
        return replace(
            verdict,
            samples_generated=len(made) + waste.samples,
            tokens_used=total_tokens(opened.handed[: verdict.samples_used], price),
            tokens_generated=None if unknown else delivered + waste.tokens,
        )
