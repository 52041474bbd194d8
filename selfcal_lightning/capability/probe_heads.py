"""Heads of probes: from the standardised features of a question to a share in [0, 1], trained and used by one code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.metrics.arrays import Array, Floats, as_array, as_scores
from selfcal_lightning.training.losses import (
    at_least_float32,
    ranknet_loss,
    soft_cross_entropy,
    squared_calibration_loss,
)


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


Activation = Literal["relu", "gelu", "silu", "tanh"]
Link = Literal["clip", "sigmoid", "classes"]
LossName = Literal["bce", "mse", "ranknet", "cross_entropy"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def head_outputs(
    features: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    *,
    activation: str = "relu",
    dropout: float = 0.0,
    training: bool = False,
) -> Tensor:
    """Compute the outputs of linear layers with an activation between each two.

    Args:
        features: Standardised features [N, D].
        weights: Weight of each layer [out, in], the first one [..., D].
        biases: Bias of each layer [out].
        activation: Between two layers; one of ``ACTIVATIONS``.
        dropout: Share of the hidden values that are dropped in training.
        training: Whether they are.

    Returns:
        Outputs of the last layer [N, K].

    Raises:
        ValueError: There is no layer, no such activation, or the shapes do not fit.

    Example:
        >>> head_outputs(torch.tensor([[1.0, 2.0]]), [torch.tensor([[3.0, 4.0]])], [torch.tensor([0.5])])
        tensor([[11.5000]])
    """
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, list(ACTIVATIONS))
    if not weights or features.dim() != 2 or features.shape[1] != weights[0].shape[1]:
        raise InputError(
            f"Expected `features` [N, D] and `weights` of at least one layer, the first [..., D], but got "
            f"{tuple(features.shape)} and {[tuple(weight.shape) for weight in weights]}."
        )
    values = features
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if place:
            values = F.dropout(ACTIVATIONS[activation](values), dropout, training=training)
        values = F.linear(values, weight, bias)
    return values


def linked(outputs: Tensor, link: Link) -> Tensor:
    """Return the shares in [0, 1] that the outputs of a head stand for.

    Args:
        outputs: Of the last layer: one column [N, 1] for "clip" and "sigmoid", one for each class [N, K] for "classes".
        link: "clip" cuts a number to [0, 1], "sigmoid" takes it for log-odds, "classes" is the expected share of
            ``class_confidence``.

    Returns:
        Shares [N].

    Raises:
        ValueError: There is no such link, or the number of columns does not fit it.

    Example:
        >>> linked(torch.tensor([[0.0], [2.0]]), "sigmoid"), linked(torch.tensor([[0.25], [2.0]]), "clip")
        (tensor([0.5000, 0.8808]), tensor([0.2500, 1.0000]))
    """
    if link == "classes":
        return class_confidence(outputs)
    if link not in ("clip", "sigmoid"):
        raise unknown_name("link", link, ("clip", "sigmoid", "classes"))
    if outputs.dim() != 2 or outputs.shape[1] != 1:
        raise InputError(f"Expected `outputs` [N, 1] for the link {link!r}, but got {tuple(outputs.shape)}.")
    column = outputs[:, 0]
    return column.sigmoid() if link == "sigmoid" else column.clamp(0.0, 1.0)


def probe_loss(
    outputs: Tensor, target: Tensor, name: LossName, *, link: Link, temperature: float = 1.0, tie_weight: float = 0.0
) -> Tensor:
    """Compute the loss of a batch of questions, the mean over these, or for "ranknet" over their pairs.

    Args:
        outputs: Of the last layer [B, 1], or [B, K] of K classes.
        target: Shares [B], in [0, 1].
        name: "bce", the cross-entropy of the link's share; "mse", its squared error, and with the link "clip" that of
            the number before it is cut, so that a gradient is left; "ranknet", of the order of pairs; "cross_entropy",
            of the class nearest to the target.
        link: How outputs become shares.
        temperature: Of "ranknet".
        tie_weight: Of its pairs of equal targets.

    Returns:
        A scalar.

    Raises:
        ValueError: There is no such loss, or the outputs do not fit it.

    Example:
        >>> probe_loss(torch.tensor([[0.0]]), torch.tensor([0.25]), "bce", link="sigmoid")  # log 2
        tensor(0.6931)
        >>> probe_loss(torch.tensor([[1.5]]), torch.tensor([1.0]), "mse", link="clip")
        tensor(0.2500)
    """
    if name == "cross_entropy":
        return class_loss(outputs, target).mean()
    column = outputs[:, 0]
    if name == "bce":
        return soft_cross_entropy(column, target).mean()
    if name == "mse":
        return squared_calibration_loss(column if link == "clip" else linked(outputs, link), target).mean()
    if name == "ranknet":
        return ranknet_loss(column, target, temperature=temperature, tie_weight=tie_weight)
    raise unknown_name("loss", name, ("bce", "mse", "ranknet", "cross_entropy"))
