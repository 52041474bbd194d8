"""Means over questions with paired bootstrap intervals: columns of one value a question, resampled together."""

from __future__ import annotations

import numpy as np

from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.bootstrap import resample_counts
from selfcal_lightning.functional.estimates import Estimate


def resample_weights(num_questions: int, *, num_resamples: int = 1000, seed: int = 0) -> Floats:
    """Return the weight of each question in the plain mean and in the means of resamples [Q, 1 + R].

    ``values [P, Q] @ weights`` are then the means of P columns, which share their resamples. With one question there
    is nothing to resample, so that R is 0.

    Args:
        num_questions: Q.
        num_resamples: R; 0 where no interval is wanted.
        seed: Of the draw.

    Example:
        >>> means = np.array([[0.0, 1.0], [1.0, 2.0]]) @ resample_weights(2, num_resamples=50)
        >>> means.shape, bool((means[1] - means[0] == 1.0).all())
        ((2, 51), True)
    """
    count = 0 if num_questions < 2 else max(num_resamples, 0)
    weights = np.empty((num_questions, 1 + count), order="F")
    weights[:, 0] = 1.0 / num_questions
    filled = 1
    for counts in resample_counts(num_questions, num_resamples=count, seed=seed) if count else ():
        np.divide(counts.T, num_questions, out=weights[:, filled : filled + len(counts)])
        filled += len(counts)
    return weights


def estimate_of(column: Floats) -> Estimate:
    """Return the estimate of a column [1 + R] whose first entry is the value; without resamples it has no interval.

    Example:
        >>> estimate_of(np.array([0.5]))
        Estimate(value=0.5, low=None, high=None, num_undefined=0)
    """
    return Estimate.from_resamples(float(column[0]), column[1:])


def estimate_or_never(column: Floats, *, never: float) -> Estimate:
    """Return the estimate of a column [1 + R] in which NaN says that something is never reached.

    A resample without a value counts as the worst one, so that an end of the interval that lies among them is None.

    Args:
        column: The value, then those of the resamples.
        never: What stands for NaN: inf for a cost, -inf for a saving.

    Example:
        >>> estimate_or_never(np.array([2.0, 1.0, 3.0, np.nan]), never=np.inf)
        Estimate(value=2.0, low=1.0, high=None, num_undefined=1)
    """
    value, resamples = column[0], column[1:]
    if np.isnan(value):
        return Estimate(None, None, None, int(np.isnan(resamples).sum()))
    if not len(resamples):
        return Estimate(float(value), None, None)
    filled = np.where(np.isnan(resamples), never, resamples)
    # Ends are resamples themselves: between a number and infinity nothing can be interpolated.
    low = float(np.quantile(filled, 0.025, method="lower"))
    high = float(np.quantile(filled, 0.975, method="higher"))
    ends = [end if np.isfinite(end) else None for end in (low, high)]
    return Estimate(float(value), ends[0], ends[1], int(np.isnan(resamples).sum()))
