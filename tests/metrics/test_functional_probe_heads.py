"""Heads of probes and their losses against torch's own modules, recorded vectors and values by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from selfcal_lightning.capability.probe_heads import ACTIVATIONS, head_outputs, linked, probe_loss

Vectors = Callable[[str], dict[str, Any]]
MODULES = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}


def _reference_torch_sequential(x: Tensor, layers: list[nn.Linear], activation: str) -> Tensor:
    modules: list[nn.Module] = [layers[0]]
    for layer in layers[1:]:
        modules += [MODULES[activation](), layer]
    return nn.Sequential(*modules)(x)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_outputs_are_those_of_torch(activation: str) -> None:
    torch.manual_seed(0)
    layers, x = [nn.Linear(5, 7), nn.Linear(7, 4), nn.Linear(4, 3)], torch.randn(6, 5)
    found = head_outputs(x, [one.weight for one in layers], [one.bias for one in layers], activation=activation)
    torch.testing.assert_close(found, _reference_torch_sequential(x, layers, activation))


def test_dropout_acts_in_training_alone() -> None:
    sizes = {"weights": [torch.ones(64, 2), torch.ones(1, 64)], "biases": [torch.zeros(64), torch.zeros(1)]}
    x = torch.ones(1, 2)
    assert head_outputs(x, **sizes, dropout=0.5).item() == 128.0
    torch.manual_seed(0)
    assert head_outputs(x, **sizes, dropout=0.5, training=True).item() != 128.0


def test_classes_are_linked_as_the_vectors_do(vectors: Vectors) -> None:
    for case in vectors("linear_classifier_probe")["cases"]:
        weight, bias, x = (torch.tensor(case[name]) for name in ("W", "b", "X"))
        shares = linked(head_outputs(x, [weight], [bias]), "classes")
        assert shares.tolist() == pytest.approx(case["confidence"], abs=1e-6)


def test_ranknet_is_that_of_the_vectors(vectors: Vectors) -> None:
    found = 0
    for case in vectors("ranknet_loss")["cases"]:
        scores, target = torch.tensor(case["scores"]).double(), torch.tensor(case["targets"]).double()
        settings = {"temperature": case["temperature"], "tie_weight": case["tie_loss_weight"]}
        loss = probe_loss(scores[:, None], target, "ranknet", link="sigmoid", **settings)
        pairs = len(target) * (len(target) - 1) // 2 if case["reduction"] == "sum" else 1  # no ties in that case
        assert pairs * loss.item() == pytest.approx(case["loss"], abs=1e-6)
        found += 1
    assert found > 0


def test_losses_by_hand() -> None:
    outputs, target = torch.tensor([[0.0], [math.log(3.0)]]), torch.tensor([1.0, 0.5])
    # Shares 1/2 and 3/4: -log(1/2), and -(log(3/4) + log(1/4)) / 2.
    by_hand = (math.log(2.0) - 0.5 * math.log(3.0 / 16.0)) / 2.0
    assert probe_loss(outputs, target, "bce", link="sigmoid").item() == pytest.approx(by_hand)
    assert probe_loss(outputs, target, "mse", link="sigmoid").item() == pytest.approx((0.25 + 0.0625) / 2)
    assert probe_loss(torch.tensor([[1.5]]), torch.tensor([1.0]), "mse", link="clip").item() == 0.25
    assert probe_loss(torch.zeros(1, 3), torch.tensor([0.6]), "cross_entropy", link="classes").item() == pytest.approx(
        math.log(3.0)
    )
