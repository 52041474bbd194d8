"""Ridge regression whose penalty is chosen by leaving each question out in turn, all in closed form.

One decomposition of the smaller of the two Gram matrices, [N, N] or [D, D], serves every penalty, so that thousands of
features of few questions cost no more than the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, as_array, as_scores

PENALTIES = tuple(float(value) for value in np.geomspace(1e-4, 1e4, 33))
_LEAST_EIGENVALUE = 1e-12  # of the largest one; what is below is rounding


@dataclass(frozen=True)
class RidgeFit:
    """A linear function with the penalty under which it predicts a question best that it was not fitted on.

    Attributes:
        weights: One a feature [D].
        intercept: The constant.
        penalty: The penalty chosen, a question; see ``probes.fit_ridge``.
        left_out: Prediction of each question from a fit on all others, under that penalty [N].
        error: Mean squared difference of these from the targets.
    """

    weights: Floats
    intercept: float
    penalty: float
    left_out: Floats
    error: float


def fit_ridge_leaving_one_out(features: Array, targets: Array, *, penalties: Sequence[float] = PENALTIES) -> RidgeFit:
    """Fit ``probes.fit_ridge`` under the penalty of least leave-one-out error.

    With the hat matrix ``H = 1/N + Z (Z'Z + penalty N I)^-1 Z'`` of the centred features Z, the prediction of question
    i from all others is ``y_i - (y_i - (H y)_i) / (1 - H_ii)``, without N fits.
    """
    x, y = _checked(features, targets, penalties)
    size = len(y)
    centre, mean = x.mean(axis=0), float(y.mean())
    x, rest = x - centre, y - mean
    is_wide = x.shape[1] > size
    values, vectors = np.linalg.eigh(x @ x.T if is_wide else x.T @ x)
    real = values > _LEAST_EIGENVALUE * max(float(values[-1]), 1e-300)
    values, vectors = values[real], vectors[:, real]
    # Directions of the questions, orthonormal [N, R], whichever matrix was taken apart.
    directions = vectors if is_wide else x @ vectors / np.sqrt(values)
    heights, parts = directions**2, directions.T @ rest
    tried: list[tuple[float, float, Floats]] = []
    for penalty in sorted(penalties, reverse=True):
        shrinkage = values / (values + penalty * size)
        leverage = 1.0 / size + heights @ shrinkage
        residual = (rest - directions @ (shrinkage * parts)) / np.maximum(1.0 - leverage, 1e-12)
        tried.append((float(np.mean(residual**2)), penalty, y - residual))
    error, penalty, left_out = min(tried, key=lambda each: each[0])
    solved = parts / (values + penalty * size)
    weights = x.T @ (directions @ solved) if is_wide else vectors @ (np.sqrt(values) * solved)
    return RidgeFit(weights, mean - float(centre @ weights), penalty, left_out, error)


def _checked(features: Array, targets: Array, penalties: Sequence[float]) -> tuple[Floats, Floats]:
    x, y = np.asarray(as_array(features), dtype=np.float64), as_scores(targets, "targets")
    if x.ndim != 2 or len(x) != len(y) or len(y) < 3:
        raise InputError(
            f"Expected `features` [N, D] and `targets` [N] of at least 3 questions, but got shapes {x.shape} and "
            f"{y.shape}."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("Expected `features` and `targets` to be finite, but got infinity or NaN.")
    if not penalties or not all(penalty > 0.0 for penalty in penalties):
        raise InputError(f"Expected `penalties` to be above 0, at least one, but got {list(penalties)}.")
    return x, y
