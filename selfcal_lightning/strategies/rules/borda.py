"""Borda voting: samples vote by the rank of their confidence, not by its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Solving
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import (
    Floats,
    Integers,
    as_budgets,
    outcome_of_budgets,
    vote_leader,
    votes_of,
)
from selfcal_lightning.strategies.votes import (
    add_up,
    check_budget,
    check_confidence_name,
    vote_at_once,
    vote_confidence,
)

MAX_POWER = 100.0


@dataclass(frozen=True)
class BordaVoting:
    """Vote over all samples of the budget with the weights ``w_i = (N - rank_i + 1) ** p``.

    rank_i is the rank of sample i by confidence, 1 for the highest, ties to the first seen; N the number of votes.
    Unreadable samples, and those without the confidence, are no votes and have no rank. With p = 0 it is the majority,
    with a large p best-of-N. Only the order of the confidences matters, so they may lie on any scale. The verdict's
    confidence is the winner's share of the weight.

    Attributes:
        power: p, in [0, 100].
        max_samples: Samples to draw.
        confidence: Name of the confidence that ranks the samples.

    Example:
        >>> BordaVoting(power=1.0)
        BordaVoting(power=1.0, max_samples=16, confidence='p_true')

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
    """

    name: ClassVar[str] = "borda"
    grid_parameter: ClassVar[str] = "max_samples"

    power: float = 0.5
    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        is_number = isinstance(self.power, int | float) and not isinstance(self.power, bool)
        if not is_number or not 0.0 <= self.power <= MAX_POWER:
            raise InputError(f"Expected `power` to be a number in [0, {MAX_POWER:g}], but got {self.power!r}.")
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Ask for the whole budget at once, rank and vote."""
        return vote_at_once(question, self.max_samples, self.weigh)

    def weigh(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the Borda votes of each answer in the order first seen."""
        cast = [(s.answer, value) for s in samples if (value := vote_confidence(s, self.confidence)) is not None]
        by_rank = sorted(range(len(cast)), key=lambda index: -cast[index][1])  # stable: ties keep their order
        points = {index: len(cast) - place for place, index in enumerate(by_rank)}
        return add_up((str(answer), float(points[index]) ** self.power) for index, (answer, _) in enumerate(cast))

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets = as_budgets(grid)
        votes = votes_of(pool, weighted=True, width=int(budgets.max(initial=0)))
        num_questions, width = votes.code.shape
        scores = np.where(votes.is_vote, votes.weight, np.nan).T
        # Python's power, as in `solve`: NumPy's may differ in the last bit and turn a tie.
        weight_of_points = np.array([float(points) ** self.power for points in range(width + 1)])
        points = np.zeros((width, num_questions), dtype=np.int64)
        leaders = np.full((width + 1, num_questions), UNREADABLE, dtype=np.int32)
        wanted = set(np.minimum(budgets, width).tolist())
        for number in range(width):
            _admit(scores, points, number)
            if number + 1 in wanted:
                leaders[number + 1] = vote_leader(votes, weight_of_points[points[: number + 1]].T)
        return outcome_of_budgets(leaders[np.minimum(budgets, width)], budgets, pool.length)


def _admit(scores: Floats, points: Integers, number: int) -> None:
    """Give sample ``number`` its points, and one more to each earlier vote that ranks above it [W, Q]; nan is no vote.

    A vote's points are N - rank + 1 = 1 + the number of votes that rank below it; it ranks above its later equals.
    """
    earlier, new = scores[:number], scores[number]
    points[:number] += earlier >= new
    points[number] = 1 + np.count_nonzero(earlier < new, axis=0)
