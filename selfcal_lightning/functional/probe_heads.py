"""Heads of probes: from the standardised features of a question to a share in [0, 1], trained and used by one code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.functional.losses import ranknet_loss, soft_cross_entropy, squared_calibration_loss
from selfcal_lightning.functional.probes import class_confidence, class_loss

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
