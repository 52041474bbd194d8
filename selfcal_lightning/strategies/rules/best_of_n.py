"""Best-of-N: the answer of the single most confident sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.records import Question
from selfcal_lightning.strategies.base import Ask, Solving, make_verdict
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import as_budgets, outcome_of_budgets, votes_of
from selfcal_lightning.strategies.votes import check_budget, check_confidence_name, vote_confidence


@dataclass(frozen=True)
class BestOfN:
    """Take the answer of the first sample of maximal confidence among all samples of the budget.

    Unreadable samples, and those without the confidence, cannot be chosen. The verdict's confidence is that of the
    chosen sample.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence that is compared.

    Example:
        >>> BestOfN(max_samples=4)
        BestOfN(max_samples=4, confidence='p_true')

    Reference:
        Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168; with the model's own confidence:
        Huang et al., arXiv 2503.00031.
    """

    name: ClassVar[str] = "best_of_n"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Ask for the whole budget at once and take the best."""
        samples = yield Ask(self.max_samples)
        answer, best = None, None
        for sample in samples:
            value = vote_confidence(sample, self.confidence)
            if value is not None and (best is None or value > best):
                answer, best = sample.answer, value
        return make_verdict(question, samples, answer, confidence=best, stopped_early=False)

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets = as_budgets(grid)
        votes = votes_of(pool, weighted=True, width=int(budgets.max(initial=0)))
        num_questions, width = votes.code.shape
        scores = np.where(votes.is_vote, votes.weight, -np.inf)
        # Column n holds what the first n samples say; before any vote the score is -inf and the best sample is none.
        best = np.maximum.accumulate(np.column_stack([np.full(num_questions, -np.inf), scores]), axis=1)
        is_new = best[:, 1:] > best[:, :-1]
        chosen = np.maximum.accumulate(np.where(is_new, np.arange(1, width + 1), 0), axis=1)
        chosen = np.column_stack([np.zeros(num_questions, dtype=np.int64), chosen])
        codes = np.column_stack([np.full(num_questions, UNREADABLE), votes.code])
        at_budget = chosen[:, np.minimum(budgets, width)]
        return outcome_of_budgets(np.take_along_axis(codes, at_budget, axis=1).T, budgets, pool.length)
