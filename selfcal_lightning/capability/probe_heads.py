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
    """Compute the cross-entropy of K classes that stand for the shares 0, 1/(K - 1), ..., 1, in nats."""
    if logits.dim() != 2 or logits.shape[1] < 2 or target.shape != logits.shape[:1]:
        raise InputError(
            "Expected `logits` [B, K] of at least two classes and `target` [B], "
            f"but got {tuple(logits.shape)} and {tuple(target.shape)}."
        )
    return F.cross_entropy(at_least_float32(logits), nearest_class(target, logits.shape[1]), reduction="none")


def nearest_class(target: Tensor, num_classes: int) -> Tensor:
    """Return the class, from 0, whose share ``class / (num_classes - 1)`` is nearest to each target [...]."""
    return torch.round(at_least_float32(target) * (num_classes - 1)).long()


def class_confidence(logits: Tensor) -> Tensor:
    """Return the expected share under K classes that stand for the shares 0, 1/(K - 1), ..., 1, in [0, 1].

    ``sum_i softmax_i i / (K - 1)``
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
    """Compute the outputs of linear layers with an activation between each two."""
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
    """Return the shares in [0, 1] that the outputs of a head stand for."""
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
    """Compute the loss of a batch of questions, the mean over these, or for "ranknet" over their pairs."""
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
