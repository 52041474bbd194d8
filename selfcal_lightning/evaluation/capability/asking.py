"""What is lost where the questions of least predicted capability are not asked, and how right the others are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.functional.question_means import estimate_of, resample_weights

ORACLE = "by the responses' own verdicts (oracle)"
LEFT_OUT = (0.1, 0.2, 0.5)


@dataclass(frozen=True)
class AskingRow:
    """What leaving questions out by one estimate comes to.

    Attributes:
        name: The estimate.
        left_out: Shares of the questions that are left out, those of least capability [S].
        lost: Share of all right responses that goes with them [S].
        pass_at_1: Share of right responses to the questions that are asked [S].
    """

    name: str
    left_out: tuple[float, ...]
    lost: tuple[Estimate, ...]
    pass_at_1: tuple[Estimate, ...]


def compare_asking(
    test: TestQuestions, *, left_out: Sequence[float] = LEFT_OUT, num_resamples: int = 1000, seed: int = 0
) -> list[AskingRow]:
    """Return what each estimate loses when the questions it gives least are not asked, and the oracle.

    Any score does, a probability or not: the order alone decides. The intervals resample questions and keep which ones
    were left out.

    Args:
        test: Questions with estimates.
        left_out: Shares of the questions to leave out.
        num_resamples: Resamples of the questions.
        seed: Of the resamples.

    Raises:
        InputError: A share lies outside [0, 1).
    """
    if not left_out or min(left_out) < 0.0 or max(left_out) >= 1.0:
        raise InputError(f"Expected `left_out` to lie in [0, 1), but got {list(left_out)}.")
    weights = resample_weights(len(test.truth), num_resamples=num_resamples, seed=seed)
    shares = test.truth.expected_accuracy
    rows = []
    for name, values in {**test.estimates, ORACLE: shares}.items():
        kept = [asked_questions(values, share) for share in left_out]
        rows.append(
            AskingRow(
                name,
                tuple(left_out),
                tuple(estimate_of(lost_column(shares, mask, weights)) for mask in kept),
                tuple(estimate_of(_divided((shares * mask) @ weights, mask @ weights)) for mask in kept),
            )
        )
    return rows


def asked_questions(values: Floats, left_out: float) -> np.ndarray:
    """Return which questions are asked where a share of them, those of least value, is not [Q].

    Of equal values the first questions are left out.

    Example:
        >>> asked_questions(np.array([0.5, 0.1, 0.9, 0.2]), 0.5).tolist()
        [True, False, True, False]
    """
    asked = np.ones(len(values), dtype=bool)
    asked[np.argsort(values, kind="stable")[: int(left_out * len(values) + 1e-9)]] = False
    return asked


def lost_column(shares: Floats, asked: np.ndarray, weights: Floats) -> Floats:
    """Return the share of right responses lost on the questions and their resamples [1 + R]; NaN without right ones.

    Args:
        shares: Share of right responses of each question [Q].
        asked: Which are asked [Q].
        weights: Those of the questions [Q, 1 + R].
    """
    return _divided((shares * ~asked) @ weights, shares @ weights)


def _divided(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole > 0.0)
