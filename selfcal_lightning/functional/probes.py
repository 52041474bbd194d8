"""Linear probes of hidden states: the closed form of a ridge regression, and classes that stand for shares."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_array, as_scores
from selfcal_lightning.functional.losses import at_least_float32


def fit_ridge(features: Array, targets: Array, *, penalty: float) -> tuple[Floats, float]:
    """Fit a linear function by least squares with a quadratic penalty on its weights, in closed form.

    ``w = (X'X + penalty N I)^-1 X'y`` over centred columns; the intercept is not penalised, and makes the means agree.

    Args:
        features: X [N, D].
        targets: y [N], any real numbers. A prediction is not kept within [0, 1].
        penalty: At least 0, a question.

    Returns:
        Weights [D] and the intercept.

    Raises:
        ValueError: If the shapes do not fit, a value is not finite, or the penalty is negative.

    Example:
        >>> weights, intercept = fit_ridge([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0], penalty=0.0)
        >>> weights.round(6).tolist(), round(intercept, 6)
        ([2.0], 1.0)

    Reference:
        Hoerl and Kennard, Ridge Regression, 1970.
    """
    x, y = np.asarray(as_array(features), dtype=np.float64), as_scores(targets, "targets")
    if x.ndim != 2 or len(x) != len(y) or not len(y):
        raise InputError(f"Expected `features` [N, D] and `targets` [N], but got shapes {x.shape} and {y.shape}.")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise InputError("Expected `features` and `targets` to be finite, but got infinity or NaN.")
    if penalty < 0.0:
        raise InputError(f"Expected `penalty` to be at least 0, but got {penalty}.")
    centre, mean = x.mean(axis=0), float(y.mean())
    x = x - centre
    # Least squares over added rows of sqrt(penalty N) I: also solved where X'X alone is singular.
    rows = np.concatenate([x, np.sqrt(penalty * len(x)) * np.eye(x.shape[1])])
    weights = np.linalg.lstsq(rows, np.append(y - mean, np.zeros(x.shape[1])), rcond=None)[0]
    return weights, mean - float(centre @ weights)


def class_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy of K classes that stand for the shares 0, 1/(K - 1), ..., 1, in nats.

    Args:
        logits: Logits of the classes [B, K].
        target: Shares [B], in [0, 1]; each belongs to the nearest class.

    Returns:
        One loss per example [B].

    Raises:
        ValueError: If the shapes do not fit or there are fewer than two classes.

    Example:
        >>> class_loss(torch.tensor([[0.0, 0.0, 50.0]]), torch.tensor([0.5]))  # the middle class
        tensor([50.])
    """
    if logits.dim() != 2 or logits.shape[1] < 2 or target.shape != logits.shape[:1]:
        raise InputError(
            "Expected `logits` [B, K] of at least two classes and `target` [B], "
            f"but got {tuple(logits.shape)} and {tuple(target.shape)}."
        )
    return F.cross_entropy(at_least_float32(logits), nearest_class(target, logits.shape[1]), reduction="none")


def nearest_class(target: Tensor, num_classes: int) -> Tensor:
    """Return the class, from 0, whose share ``class / (num_classes - 1)`` is nearest to each target [...].

    Example:
        >>> nearest_class(torch.tensor([0.0, 0.3, 1.0]), 11)  # the published code cuts .3 down to .2
        tensor([ 0,  3, 10])
    """
    return torch.round(at_least_float32(target) * (num_classes - 1)).long()


def class_confidence(logits: Tensor) -> Tensor:
    """Return the expected share under K classes that stand for the shares 0, 1/(K - 1), ..., 1, in [0, 1].

    ``sum_i softmax_i i / (K - 1)``

    Args:
        logits: Logits of the classes [..., K].

    Returns:
        Shares [...].

    Example:
        >>> class_confidence(torch.tensor([0.0, 0.0, 0.0]))
        tensor(0.5000)
    """
    if logits.dim() < 1 or logits.shape[-1] < 2:
        raise InputError(f"Expected `logits` [..., K] of at least two classes, but got {tuple(logits.shape)}.")
    probabilities = at_least_float32(logits).softmax(-1)
    return probabilities @ torch.linspace(0.0, 1.0, logits.shape[-1]).to(probabilities)
