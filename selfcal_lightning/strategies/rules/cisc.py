"""CISC: a vote weighted by the softmax of the confidences within the question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Solving
from selfcal_lightning.strategies.vectorised.arrays import CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import (
    Floats,
    Integers,
    as_budgets,
    leaders_at,
    outcome_of_budgets,
    power_of_two,
    votes_of,
)
from selfcal_lightning.strategies.votes import (
    add_up,
    check_budget,
    check_confidence_name,
    vote_at_once,
    vote_confidence,
)

# Far below what separates any two confidences, and far above what overflows.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class CISC:
    """Vote over all samples of the budget with the weights ``w_i = exp(c_i / T) / sum_j exp(c_j / T)``.

    c_i is the confidence in sample i, any real number, and T the temperature: a small one is best-of-N, a large one the
    plain majority. The sum runs over the votes of the question: unreadable samples, and those without the confidence,
    are left out. The verdict's confidence is the winner's share of the weight.

    Attributes:
        temperature: T, in units of the confidence. The paper tunes it for each model and confidence on questions that
            it does not report on; so should you.
        max_samples: Samples to draw.
        confidence: Name of the confidence.

    Example:
        >>> CISC(temperature=0.5)
        CISC(temperature=0.5, max_samples=16, confidence='p_true')

    Reference:
        Taubenfeld et al., Confidence Improves Self-Consistency in LLMs, arXiv 2502.06233, section 3.
    """

    name: ClassVar[str] = "cisc"
    grid_parameter: ClassVar[str] = "max_samples"

    temperature: float = 0.5
    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        is_number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not is_number or not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise InputError(
                f"Expected `temperature` to be a number of at least {MIN_TEMPERATURE:g}, but got {self.temperature!r}."
            )
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Ask for the whole budget at once and vote."""
        return vote_at_once(question, self.max_samples, self._weigh)

    def _weigh(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the weight of each answer in the order first seen, in units that leave no weight too small to add."""
        cast = [(s.answer, value) for s in samples if (value := vote_confidence(s, self.confidence)) is not None]
        if not cast:
            return {}
        mantissa, exponent = _split_exp(np.array([value for _, value in cast]), self.temperature)
        weights = mantissa * power_of_two(exponent - exponent.max())
        return add_up((str(answer), weight) for (answer, _), weight in zip(cast, weights.tolist(), strict=True))

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets = as_budgets(grid)
        votes = votes_of(pool, weighted=True, width=int(budgets.max(initial=0)))
        mantissa, exponent = _split_exp(votes.weight, self.temperature)
        weighted = replace(votes, weight=np.where(votes.is_vote, mantissa, 0.0), exponent=exponent)
        return outcome_of_budgets(leaders_at(weighted, budgets), budgets, pool.length)


def _split_exp(confidence: Floats, temperature: float) -> tuple[Floats, Integers]:
    """Return m in [1, 2) and e with ``exp(confidence / temperature) = m * 2 ** e``.

    The largest exponent of a question is then taken off without rounding, so that it does not matter which samples the
    question has: a vote over the first n samples and one over all of them see the same mantissas.
    """
    power = confidence / (temperature * math.log(2.0))
    exponent = np.floor(power)
    return np.exp2(power - exponent), exponent.astype(np.int64)
