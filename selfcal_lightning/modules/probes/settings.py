"""Settings of a trained probe: which go together, and the layers and the optimiser that they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from selfcal_lightning.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.functional.probe_heads import ACTIVATIONS, Link, LossName

HeadName = Literal["linear", "mlp", "classifier"]
ProbeOptimizer = Literal["adamw", "sgd", "lbfgs"]
Schedule = Literal["cosine", "linear", "constant"]


def chosen_loss(head: HeadName, loss: LossName | None) -> LossName:
    """Return the loss, where none is given the usual one of a head.

    Raises:
        InputError: There is no such head or loss, or they do not go together.

    Example:
        >>> chosen_loss("mlp", None), chosen_loss("classifier", None)
        ('bce', 'cross_entropy')
    """
    if head not in get_args(HeadName):
        raise unknown_name("head", head, get_args(HeadName))
    if loss is None:
        return "cross_entropy" if head == "classifier" else "bce"
    if loss not in get_args(LossName):
        raise unknown_name("loss", loss, get_args(LossName))
    if (head == "classifier") != (loss == "cross_entropy"):
        raise InputError(
            f"Expected the loss cross_entropy with the head classifier and with no other, but got {loss!r} with "
            f"{head!r}."
        )
    return loss


def chosen_link(loss: LossName, link: Literal["sigmoid", "clip"] | None) -> Link:
    """Return how outputs become shares.

    Raises:
        InputError: The link does not go with the loss.

    Example:
        >>> chosen_link("bce", None), chosen_link("mse", "clip"), chosen_link("cross_entropy", None)
        ('sigmoid', 'clip', 'classes')
    """
    if loss == "cross_entropy":
        if link is not None:
            raise InputError(f"Expected no `link` with the head classifier, but got {link!r}.")
        return "classes"
    if link not in (None, "sigmoid", "clip"):
        raise unknown_name("link", link, ("sigmoid", "clip"))
    if link == "clip" and loss != "mse":
        raise InputError(f"Expected the link 'clip' with the loss 'mse' only, but got {loss!r}, which takes log-odds.")
    return link or "sigmoid"


def check_probe_settings(
    *, hidden_size: int, num_layers: int, num_classes: int, dropout: float, activation: str, temperature: float,
    tie_weight: float, lr: float, momentum: float, weight_decay: float, warmup_steps: int, seed: int,
    optimizer: str, schedule: str,
) -> None:  # fmt: skip
    """Raise InputError where one of them is out of range."""
    check_at_least(1, hidden_size=hidden_size, num_layers=num_layers)
    check_at_least(2, num_classes=num_classes)
    check_at_least(0, warmup_steps=warmup_steps, seed=seed)
    for name, value in {"dropout": dropout, "momentum": momentum}.items():
        if not 0.0 <= value < 1.0:
            raise InputError(f"Expected `{name}` to lie in [0, 1), but got {value}.")
    for name, value in {"lr": lr, "temperature": temperature}.items():
        if not 0.0 < value < math.inf:
            raise InputError(f"Expected `{name}` to be a positive number, but got {value}.")
    for name, value in {"weight_decay": weight_decay, "tie_weight": tie_weight}.items():
        if not 0.0 <= value < math.inf:
            raise InputError(f"Expected `{name}` to be a number of at least 0, but got {value}.")
    choices: dict[str, tuple[str, Sequence[str]]] = {
        "activation": (activation, list(ACTIVATIONS)),
        "optimizer": (optimizer, get_args(ProbeOptimizer)),
        "schedule": (schedule, get_args(Schedule)),
    }
    for name, (chosen, known) in choices.items():
        if chosen not in known:
            raise unknown_name(name, chosen, known)
    if optimizer == "lbfgs" and (schedule != "constant" or dropout):
        raise InputError(
            "Expected `schedule` constant and no `dropout` with the optimizer lbfgs, whose line search needs one "
            f"function, but got {schedule!r} and {dropout}."
        )


def build_layers(sizes: Sequence[int], *, seed: int) -> nn.ModuleList:
    """Return linear layers between sizes, Xavier's weights drawn with the seed alone, no bias at first."""
    layers = nn.ModuleList(nn.Linear(width, out) for width, out in pairwise(sizes))
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    return layers


def build_probe_optimizer(
    name: ProbeOptimizer, layers: nn.ModuleList, *, lr: float, momentum: float, weight_decay: float
) -> Optimizer:
    """Return the optimiser; weights decay and biases do not. With "lbfgs" the decay is part of the loss."""
    weights, biases = [one.weight for one in layers], [one.bias for one in layers]
    if name == "lbfgs":
        return torch.optim.LBFGS([*weights, *biases], lr=lr, max_iter=20, line_search_fn="strong_wolfe")
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": biases, "weight_decay": 0.0}]
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)
    return torch.optim.AdamW(groups, lr=lr)
