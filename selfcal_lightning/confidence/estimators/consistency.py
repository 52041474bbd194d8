"""Response consistency: how many of k samples agree with a response."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.records import QuestionSamples, Sample, sample_seed


class ResponseConsistency:
    """The share of k samples of the question that give a response's answer, in [0, 1].

    ``c(y) = #{i in S: y_i = y} / k`` with S a set of k samples, drawn without replacement from those that there are.
    An unreadable sample agrees with nothing, but counts among the k; an unreadable response has no confidence. Answers
    are compared as the store names them, equal expressions being one answer.

    Args:
        num_samples: k; None takes all. A question with fewer samples takes those that it has.
        seed: Seed of the draw; every question has its own, derived from it.

    Raises:
        ValueError: If ``num_samples`` is neither None nor positive.

    Reference:
        arXiv 2602.13540 (response consistency as an estimator of capability); Wang et al., Self-Consistency,
        arXiv 2203.11171.
    """

    name: ClassVar[str] = "response_consistency"
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "pool"

    def __init__(self, *, num_samples: int | None = None, seed: int = 0) -> None:
        if num_samples is not None:
            check_positive(num_samples, "num_samples")
        self._num_samples, self._seed = num_samples, seed

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the share of every sample, [question][sample]; None where it cannot be read."""
        return [self._shares(entry) for entry in pool]

    def _shares(self, entry: QuestionSamples) -> list[float | None]:
        drawn = self._draw(entry)
        counts = Counter(sample.answer for sample in drawn)
        return [None if sample.answer is None else counts[sample.answer] / len(drawn) for sample in entry.samples]

    def _draw(self, entry: QuestionSamples) -> Sequence[Sample]:
        if self._num_samples is None or self._num_samples >= len(entry.samples):
            return entry.samples
        seed = sample_seed(self._seed, entry.samples[0].round, entry.question.id, 0)
        return random.Random(seed).sample(entry.samples, self._num_samples)
