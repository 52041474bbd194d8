"""Standardised voting: samples vote by how far their confidence stands out among those of the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.functional.standardised_weights import masked_standardised_weights
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Solving
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import as_budgets, outcome_of_budgets, vote_leader, votes_of
from selfcal_lightning.strategies.votes import (
    add_up,
    check_budget,
    check_confidence_name,
    vote_at_once,
    vote_confidence,
)


@dataclass(frozen=True)
class StandardisedVoting:
    """Vote over all samples of the budget with the weights ``w_i = exp((c_i - mean) / std)``.

    c_i is the confidence in sample i, any real number; mean and standard deviation are over the votes of the question
    within the budget, so that no sample beyond it has a say. Unreadable samples, and those without the confidence, are
    no votes. The verdict's confidence is the winner's share of the weight.

    With ``token_steadiness`` these are the weights of SASC by the spread of a response's entropies, with
    ``mean_logprob`` those by its certainty.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence.

    Example:
        >>> StandardisedVoting(max_samples=8)
        StandardisedVoting(max_samples=8, confidence='mean_logprob')

    Reference:
        The voting weights of SASC, `run_evaluation.py` of Multi-step Test-time Training with Data Selection.
    """

    name: ClassVar[str] = "standardised"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str = "mean_logprob"

    def __post_init__(self) -> None:
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Ask for the whole budget at once, standardise and vote."""
        return vote_at_once(question, self.max_samples, self.weigh)

    def weigh(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the weight of each answer in the order first seen."""
        cast = [(s.answer, value) for s in samples if (value := vote_confidence(s, self.confidence)) is not None]
        weights = masked_standardised_weights(np.array([[value] for _, value in cast]).reshape(-1, 1))[:, 0]
        return add_up((str(answer), weight) for (answer, _), weight in zip(cast, weights.tolist(), strict=True))

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets = as_budgets(grid)
        votes = votes_of(pool, weighted=True, width=int(budgets.max(initial=0)))
        num_questions, width = votes.code.shape
        scores = np.where(votes.is_vote, votes.weight, np.nan).T
        leaders = np.full((width + 1, num_questions), UNREADABLE, dtype=np.int32)
        for number in set(np.minimum(budgets, width).tolist()):
            leaders[number] = vote_leader(votes, masked_standardised_weights(scores[:number]).T)
        return outcome_of_budgets(leaders[np.minimum(budgets, width)], budgets, pool.length)
