"""A source of recorded samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from selfcal_lightning.confidence.base import (
    SampleScorer,
    add_scores,
    check_confidence,
)
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import (
    Question,
    QuestionSamples,
    Sample,
)
from selfcal_lightning.strategies.base import WHOLE, AskKind, refuse_parts
from selfcal_lightning.strategies.sources import Waste, needs_query
from selfcal_lightning.tasks.token_costs import total_tokens


class ReplaySource:
    """Gives recorded samples, in their order; ids, answers and ``correct`` are those of the record.

    A sample that is started has been generated whole, so that speculation is counted at its full price here.

    Args:
        pool: The recorded samples.
        scorers: Add further confidences to every sample.
        query_tokens: Tokens of the confidence query, counted with every sample where the strategy or a scorer reads
            P(True).
        target: Samples to keep in flight. With 1, one question follows the other.

    Attributes:
        query_tokens: Tokens that the confidence query costs a sample in this run.
    """

    def __init__(
        self,
        pool: Sequence[QuestionSamples],
        *,
        scorers: Sequence[SampleScorer] = (),
        query_tokens: int = 0,
        target: int = 1,
    ) -> None:
        if target < 1:
            raise InputError(f"Expected `target` to be at least 1, but got {target}.")
        self._pool = {entry.question.id: entry for entry in pool}
        if len(self._pool) < len(pool):
            raise InputError(f"Expected question ids to be unique, but got {len(pool) - len(self._pool)} again.")
        self._scorers, self._suffix_tokens, self._target = scorers, query_tokens, target
        self._scored: dict[str, tuple[Sample, ...]] = {}
        self._started: dict[str, int] = {}
        self._queue: deque[Sample] = deque()
        self.query_tokens = 0

    @property
    def in_flight(self) -> int:
        """Number of samples that the next poll returns."""
        return len(self._queue)

    @property
    def target(self) -> int:
        """Number of samples to keep in flight."""
        return self._target

    def prepare(self, questions: Sequence[Question], *, confidence: str | None) -> None:
        """Score the samples of ``questions``; see ``SampleSource``."""
        if missing := [question.id for question in questions if question.id not in self._pool]:
            raise InputError(
                f"Expected all questions to be in the pool, but {len(missing)} of {len(questions)} are not, the first "
                f"of them {missing[0]!r}. Sample them first (`selfcal generate`), or leave them out."
            )
        self.query_tokens = self._suffix_tokens if needs_query(confidence, self._scorers) else 0
        entries = [self._pool[question.id] for question in questions]
        scored = {
            entry.question.id: tuple(add_scores(sample, self._scorers) for sample in entry.samples) for entry in entries
        }
        if confidence is not None:
            check_confidence((QuestionSamples(e.question, scored[e.question.id], e.split) for e in entries), confidence)
        self._scored |= scored
        self._started |= dict.fromkeys(scored, 0)

    def submit(self, question_id: str, count: int, kind: AskKind = WHOLE) -> int:
        """Queue the next recorded samples of a question, fewer than ``count`` where the record ends."""
        refuse_parts(kind)
        start = self._started[question_id]
        samples = self._scored[question_id][start : start + count]
        self._started[question_id] += len(samples)
        self._queue.extend(samples)
        return len(samples)

    def poll(self) -> list[Sample]:
        """Return what was queued."""
        samples = list(self._queue)
        self._queue.clear()
        return samples

    def cancel(self, question_ids: Sequence[str]) -> dict[str, Waste]:
        """End questions; what was queued for them counts as generated."""
        ended = set(question_ids)
        for name in ended:
            self._scored.pop(name, None)
        dropped = {name: [s for s in self._queue if s.question_id == name] for name in question_ids}
        self._queue = deque(sample for sample in self._queue if sample.question_id not in ended)
        return {
            name: Waste(len(samples), total_tokens(samples, self.query_tokens)) for name, samples in dropped.items()
        }
