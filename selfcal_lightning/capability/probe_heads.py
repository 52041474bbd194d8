"""Heads of probes: from the standardised features of a question to a share in [0, 1], trained and used by one code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.training.losses import (
    at_least_float32,
    ranknet_loss,
    soft_cross_entropy,
    squared_calibration_loss,
)


def class_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy of K classes that stand for the shares 0, 1/(K - 1), ..., 1, in nats."""
    return F.cross_entropy(at_least_float32(logits), nearest_class(target, logits.shape[1]), reduction="none")


def nearest_class(target: Tensor, num_classes: int) -> Tensor:
    """Return the class, from 0, whose share ``class / (num_classes - 1)`` is nearest to each target [...]."""
    return torch.round(at_least_float32(target) * (num_classes - 1)).long()


def class_confidence(logits: Tensor) -> Tensor:
    """Return the expected share under K classes that stand for the shares 0, 1/(K - 1), ..., 1, in [0, 1].

    ``sum_i softmax_i i / (K - 1)``
    """
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
    return ranknet_loss(column, target, temperature=temperature, tie_weight=tie_weight)
