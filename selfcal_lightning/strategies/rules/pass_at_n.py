"""Pass@N, the oracle: right as soon as any sample is right. No real system can run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from selfcal_lightning.records import Question
from selfcal_lightning.strategies.base import Ask, Solving, make_verdict
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import as_budgets, first_crossing, outcome_of_budgets, votes_of
from selfcal_lightning.strategies.votes import check_budget


@dataclass(frozen=True)
class PassAtN:
    """Give the first *correct* answer among all samples of the budget; the first readable one where none is correct.

    An oracle: it looks at the reference, so it bounds from above what any choice among these samples can reach, and
    cannot be used to answer a question. Where nothing was verified it is the first answer. It has no confidence.

    Attributes:
        max_samples: Samples to draw.

    Example:
        >>> PassAtN(max_samples=4)
        PassAtN(max_samples=4)

    Reference:
        Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374.
    """

    name: ClassVar[str] = "pass_at_n"
    grid_parameter: ClassVar[str] = "max_samples"
    confidence: ClassVar[None] = None

    max_samples: int = 16

    def __post_init__(self) -> None:
        check_budget(self.max_samples)

    def solve(self, question: Question) -> Solving:
        """Ask for the whole budget at once and look for a correct answer."""
        samples = yield Ask(self.max_samples)
        readable = [sample for sample in samples if sample.answer is not None]
        right = [sample for sample in readable if sample.correct]
        answer = next((sample.answer for sample in right + readable), None)
        return make_verdict(question, samples, answer, confidence=None, stopped_early=False)

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets = as_budgets(grid)
        votes = votes_of(pool, weighted=False, width=int(budgets.max(initial=0)))
        width = votes.code.shape[1]
        is_right = votes.is_vote & pool.correct[:, :width]
        first_right = first_crossing(is_right.astype(np.float64), [1.0])[0]
        first_readable = first_crossing(votes.is_vote.astype(np.float64), [1.0])[0]
        codes = np.column_stack([votes.code, np.full(len(pool.length), UNREADABLE)])
        rows = np.arange(len(codes))
        right, readable = codes[rows, first_right], codes[rows, first_readable]
        reach = np.minimum(budgets, width)[:, None]
        otherwise = np.where(first_readable < reach, readable, UNREADABLE)
        return outcome_of_budgets(np.where(first_right < reach, right, otherwise), budgets, pool.length)
