"""Self-consistency: the answer of the most samples, or of the largest confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from selfcal_lightning.records import Question
from selfcal_lightning.strategies.base import Solving
from selfcal_lightning.strategies.vectorised.arrays import CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import as_budgets, leaders_at, outcome_of_budgets, votes_of
from selfcal_lightning.strategies.votes import check_budget, check_optional_confidence_name, vote_at_once, weigh_votes


@dataclass(frozen=True)
class SelfConsistency:
    """Vote over all samples of the budget: argmax over answers a of ``sum_{i: y_i = a} w_i``.

    The weight w_i is 1, or the sample's confidence c_i where one is named. Unreadable samples, and those without the
    confidence, are no votes. Where all weights are 0 the first seen answer wins. The verdict's confidence is the
    winner's share of the weight.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence that weighs the votes; None counts them.

    Example:
        >>> SelfConsistency(max_samples=8, confidence="p_true").name
        'self_consistency'

    Reference:
        Wang et al., Self-Consistency Improves Chain of Thought Reasoning, arXiv 2203.11171; weighted by calibrated
        confidence: Huang et al., arXiv 2503.00031.
    """

    name: ClassVar[str] = "self_consistency"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str | None = None

    def __post_init__(self) -> None:
        check_budget(self.max_samples)
        check_optional_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Ask for the whole budget at once and vote."""
        return vote_at_once(question, self.max_samples, partial(weigh_votes, confidence=self.confidence))

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets = as_budgets(grid)
        votes = votes_of(pool, weighted=self.confidence is not None, width=int(budgets.max(initial=0)))
        return outcome_of_budgets(leaders_at(votes, budgets), budgets, pool.length)
