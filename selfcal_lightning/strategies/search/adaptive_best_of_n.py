"""Best-of-N whose N follows from how likely a right answer is, as a reward model tells from the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.functional.instance_adaptive import required_samples
from selfcal_lightning.records import Question
from selfcal_lightning.strategies.base import Ask, Solving, make_verdict
from selfcal_lightning.strategies.search.scoring import By, PathScorer, check_search, tokens_of


@dataclass(frozen=True)
class AdaptiveBestOfN:
    """Draw as many samples as one right answer among them takes with the wanted chance, and take the best by score.

    ``N = min(ln(1 - target) / ln(1 - p), max_samples)`` with p the score of the question alone. The verdict's
    confidence is the score of the chosen response. Unreadable ones cannot be chosen.

    Attributes:
        scorer: The reward model.
        max_samples: Most samples.
        target: Wanted chance of a right answer among them, in (0, 1).
        by: Whether p is the "mean" or the "low" quantile. That of outcomes is 0 unless p is near 1, which asks for
            most samples always.

    Reference:
        Park et al., Know What You Don't Know, arXiv 2506.09338.
    """

    name: ClassVar[str] = "adaptive_best_of_n"
    confidence: ClassVar[None] = None
    reads_steps: ClassVar[bool] = False

    scorer: PathScorer
    max_samples: int = 16
    target: float = 0.99
    by: By = "mean"

    def __post_init__(self) -> None:
        check_search(target=self.target, by=self.by, max_samples=self.max_samples)

    def solve(self, question: Question) -> Solving:
        """Score the question, ask for what it takes, and choose."""
        (prior,) = self.scorer.score_paths(question, [()])
        chance = prior.mean if self.by == "mean" else prior.low
        wanted = int(min(required_samples([chance], target=self.target)[0], self.max_samples))
        samples = yield Ask(wanted)
        readable = [sample for sample in samples if sample.answer is not None]
        if not readable:
            return make_verdict(question, samples, None, confidence=None, stopped_early=wanted < self.max_samples)
        scores = [score.mean for score in self.scorer.score_paths(question, [tokens_of(one) for one in readable])]
        best = int(np.argmax(scores))
        return make_verdict(
            question,
            samples,
            readable[best].answer,
            confidence=scores[best],
            stopped_early=wanted < self.max_samples,
        )
