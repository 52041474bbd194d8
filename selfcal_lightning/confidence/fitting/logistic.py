"""Logistic regression of soft targets with mild L2 regularisation: a convex problem with one answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.functional.base import Floats


@dataclass(frozen=True)
class LogisticFit:
    """Coefficients of ``p = sigmoid(intercept + x . weights)``.

    Attributes:
        weights: One a column [F].
        intercept: The constant.
    """

    weights: Floats
    intercept: float


def fit_logistic(columns: Floats, targets: Floats, *, l2: float = 1.0) -> LogisticFit:
    r"""Fit probabilities to targets by maximum likelihood.

    ``min sum_i CE(t_i, sigmoid(b + x_i . w)) + l2 / 2 |w|^2`` with ``CE(t, p) = -t log p - (1 - t) log(1 - p)``: a soft
    target t is a response that counts t times as right and 1 - t times as wrong. The intercept is not regularised.

    Args:
        columns: Features [N, F], of about unit scale.
        targets: Targets [N] in [0, 1].
        l2: Strength; 1 is as scikit-learn's ``C=1``.

    Raises:
        ValueError: The sizes differ, a target lies outside [0, 1], or all targets are 0 or all are 1.
        RuntimeError: The optimiser did not arrive.

    Example:
        >>> fit = fit_logistic(np.array([[-1.0], [1.0]]), np.array([0.25, 0.75]), l2=0.0)
        >>> round(float(fit.weights[0]), 6), abs(round(fit.intercept, 6))  # log-odds of .75 are log 3
        (1.098612, 0.0)
    """
    from scipy.optimize import minimize

    if columns.ndim != 2 or targets.shape != (len(columns),) or not len(targets):
        raise InputError(f"Expected a target for every row of `columns`, but got {targets.shape} and {columns.shape}.")
    if not ((targets >= 0.0) & (targets <= 1.0)).all():
        raise InputError("Expected `targets` to lie in [0, 1], but got one outside.")
    if not 0.0 < float(targets.mean()) < 1.0:
        raise InputError(
            f"Expected `targets` to hold right and wrong responses, but got {len(targets)} that are all "
            f"{targets[0]:g}. Fit on more or other questions."
        )
    design = np.column_stack([columns, np.ones(len(columns))])
    ridge = np.append(np.full(columns.shape[1], l2), 0.0)

    def objective(theta: Floats) -> float:
        z = design @ theta
        return float(np.logaddexp(0.0, z).sum() - targets @ z + 0.5 * ridge @ theta**2)

    def gradient(theta: Floats) -> Floats:
        return np.asarray(design.T @ (sigmoid(design @ theta) - targets) + ridge * theta)

    def hessian(theta: Floats) -> Floats:
        p = sigmoid(design @ theta)
        return np.asarray((design * (p * (1.0 - p))[:, None]).T @ design + np.diag(ridge))

    start = np.zeros(design.shape[1])
    tolerance = 1e-9 * len(targets)
    found = minimize(objective, start, jac=gradient, hess=hessian, method="trust-exact", options={"gtol": tolerance})
    # Rounding may stop the last step just short of a tolerance as tight as this one; a hundred times it is still tight.
    if not found.success and np.abs(gradient(found.x)).max() > 100.0 * tolerance:
        raise RunError(f"Expected the logistic fit to converge, but got: {found.message}")
    return LogisticFit(found.x[:-1], float(found.x[-1]))


def sigmoid(z: Floats) -> Floats:
    """Compute ``1 / (1 + exp(-z))`` without overflow.

    Example:
        >>> sigmoid(np.array([0.0, 1000.0, -1000.0])).tolist()
        [0.5, 1.0, 0.0]
    """
    e = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0.0, 1.0, e) / (1.0 + e))
