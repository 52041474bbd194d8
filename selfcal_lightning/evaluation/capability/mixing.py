"""How much of an even share to mix into a plan: against wrong predictions, at one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.capability.budgets import sharing_ways, solved_by
from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.evaluation.capability.pass_at_k import powers_of_two
from selfcal_lightning.functional.allocation import interpolated_allocation
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.functional.question_means import estimate_of, resample_weights

EVEN_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class MixingRow:
    """What a way to share samples solves when an even share is mixed into it.

    Attributes:
        way: How samples are shared.
        budget: Mean samples a question.
        even_shares: Weights of the even share [A]; at 1 nothing else is left.
        gain: Expected share of questions solved, less what the even share alone solves, on the same resamples [A].
    """

    way: str
    budget: int
    even_shares: tuple[float, ...]
    gain: tuple[Estimate, ...]


def compare_mixing(
    test: TestQuestions,
    calibration: TestQuestions | None = None,
    *,
    budget: int | None = None,
    even_shares: Sequence[float] = EVEN_SHARES,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[MixingRow]:
    """Return what plans solve as more and more of an even share is mixed in, ``a * even + (1 - a) * plan``.

    Args:
        test: Questions with estimates.
        calibration: As in ``compare_budgets``.
        budget: Mean samples a question; None takes the largest power of two up to half of what every question has.
        even_shares: Values of a, in [0, 1].
        num_resamples: Resamples of the questions.
        seed: Of the resamples.

    Raises:
        InputError: The budget is above the number of responses that a question is judged by.
    """
    most = int(test.truth.num_samples.min())
    chosen = powers_of_two(max(most // 2, 1))[-1] if budget is None else budget
    if not 1 <= chosen <= most:
        raise InputError(
            f"Expected `budget` to lie between 1 and {most}, the fewest responses that a question is judged by, but "
            f"got {chosen}."
        )
    weights = resample_weights(len(test.truth), num_resamples=num_resamples, seed=seed)
    even = np.full(len(test.truth), chosen, dtype=np.int64)
    alone = solved_by(test, even) @ weights
    rows = []
    for way, share in sharing_ways(test, calibration, most).items():
        plan = share(chosen * len(test.truth))
        mixed = [solved_by(test, interpolated_allocation(even, plan, weight)) @ weights for weight in even_shares]
        gains = tuple(estimate_of(column - alone) for column in mixed)
        rows.append(MixingRow(way, chosen, tuple(even_shares), gains))
    return rows
