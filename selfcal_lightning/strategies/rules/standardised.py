"""Standardised voting: samples vote by how far their confidence stands out among those of the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.functional.standardised_weights import masked_standardised_weights
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Ask, Solving, leader, make_verdict
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import as_budgets, outcome_of_budgets, vote_leader, votes_of
from selfcal_lightning.strategies.votes import check_budget, check_confidence_name, share_of, vote_confidence


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
        samples = yield Ask(self.max_samples)
        votes = self.weigh(samples)
        answer = leader(votes)
        return make_verdict(question, samples, answer, confidence=share_of(votes, answer), stopped_early=False)

    def weigh(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the weight of each answer in the order first seen."""
        values = [vote_confidence(sample, self.confidence) for sample in samples]
        scores = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
        votes: dict[str, float] = {}
        weights = masked_standardised_weights(scores[:, None])[:, 0]
        for sample, value, weight in zip(samples, values, weights.tolist(), strict=True):
            if value is not None:
                votes[str(sample.answer)] = votes.get(str(sample.answer), 0.0) + weight
        return votes

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
