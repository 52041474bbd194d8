"""Heads of probes: from the standardised features of a question to a share in [0, 1]."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.capability.probe import Link
from selfcal_lightning.training import losses
from selfcal_lightning.training.losses import at_least_float32

LossName = Literal["bce", "mse", "ranknet", "cross_entropy"]


def nearest_class(target: Tensor, num_classes: int) -> Tensor:
    """Return the class, from 0, whose share ``class / (num_classes - 1)`` is nearest to each target [...]."""
    return torch.round(at_least_float32(target) * (num_classes - 1)).long()


def head_outputs(features: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    values = features
    for place, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        values = F.linear(F.relu(values) if place else values, weight, bias)
    return values


def linked(outputs: Tensor, link: Link) -> Tensor:
    """Return the shares in [0, 1] that the outputs of a head stand for."""
    if link == "classes":  # the expected share under K classes for the shares 0, 1/(K - 1), ..., 1
        probabilities = at_least_float32(outputs).softmax(-1)
        return probabilities @ torch.linspace(0.0, 1.0, outputs.shape[-1]).to(probabilities)
    column = outputs[:, 0]
    return column.sigmoid() if link == "sigmoid" else column.clamp(0.0, 1.0)


def probe_loss(outputs: Tensor, target: Tensor, name: LossName | None) -> Tensor:
    """Compute the mean loss of a batch of questions, or for "ranknet" of their pairs."""
    if name == "cross_entropy":
        return F.cross_entropy(at_least_float32(outputs), nearest_class(target, outputs.shape[1]))
    if name == "bce":
        return losses.soft_cross_entropy(outputs[:, 0], target).mean()
    if name == "mse":
        return losses.squared_calibration_loss(linked(outputs, "sigmoid"), target).mean()
    return losses.ranknet_loss(outputs[:, 0], target)
