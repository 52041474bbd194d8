"""Losses against values written out by hand and torch's own modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import mean_pinball_loss
from torch import Tensor

from selfcal_lightning.training.losses import (
    calibration_loss,
    pinball_loss,
    ranknet_loss,
    soft_cross_entropy,
    squared_calibration_loss,
)

Vectors = Callable[[str], dict[str, Any]]


def _reference_torch_smooth_l1(confidence: Tensor, target: Tensor) -> Tensor:
    return torch.nn.SmoothL1Loss(beta=0.25, reduction="none")(confidence, target)


def _reference_naive_mean_nll(logits: Tensor, token_ids: Tensor, mask: Tensor) -> list[float]:
    means = []
    for row in range(len(mask)):
        losses = [
            -torch.log_softmax(logits[row, t].double(), dim=-1)[token_ids[row, t]].item()
            for t in range(mask.shape[1])
            if mask[row, t]
        ]
        means.append(sum(losses) / len(losses) if losses else 0.0)
    return means


def _reference_naive_ranknet(scores: list[float], targets: list[float], temperature: float, tie_weight: float) -> float:
    """Return the mean over ordered pairs plus the weighted mean over ties, by two loops."""
    ordered, tied = [], []
    for i, j in itertools.combinations(range(len(scores)), 2):
        d = (scores[i] - scores[j]) / temperature
        if targets[i] == targets[j]:
            tied.append((math.log1p(math.exp(d)) + math.log1p(math.exp(-d))) / 2.0 - math.log(2.0))
        else:
            ordered.append(math.log1p(math.exp(-d if targets[i] > targets[j] else d)))
    means = [sum(losses) / len(losses) if losses else 0.0 for losses in (ordered, tied)]
    return means[0] + tie_weight * means[1]


def _reference_sklearn_pinball(scores: Tensor, target: Tensor, level: float) -> float:
    return float(mean_pinball_loss(target, scores, alpha=level))


def test_calibration_loss_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("smooth_l1_confidence_loss")["cases"]:
        confidence, target = (torch.tensor(case[name]).double().reshape(-1) for name in ("p_yes", "target"))
        losses = calibration_loss(confidence, target)
        assert losses.shape == confidence.shape
        assert losses.mean().item() == pytest.approx(case["loss"], abs=1e-6)


def test_calibration_loss_by_hand() -> None:
    # d = .1: .5 * .01 / .25 = .02; d = -.25: .25 - .125 = .125; d = .5: .5 - .125 = .375.
    confidence, target = torch.tensor([0.6, 0.25, 1.0]), torch.tensor([0.5, 0.5, 0.5])
    torch.testing.assert_close(calibration_loss(confidence, target), torch.tensor([0.02, 0.125, 0.375]))
    torch.testing.assert_close(squared_calibration_loss(confidence, target), torch.tensor([0.01, 0.0625, 0.25]))
    torch.testing.assert_close(
        calibration_loss(confidence, target), _reference_torch_smooth_l1(confidence, target), rtol=0.0, atol=0.0
    )


def test_gradient_is_linear_inside_and_constant_outside() -> None:
    confidence = torch.tensor([0.6, 0.9, 0.1], requires_grad=True)
    calibration_loss(confidence, torch.full((3,), 0.5)).sum().backward()
    torch.testing.assert_close(confidence.grad, torch.tensor([0.4, 1.0, -1.0]))


def test_half_precision_is_widened() -> None:
    confidence = torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True)
    loss = calibration_loss(confidence, torch.tensor([0.75]))
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert confidence.grad.dtype == torch.bfloat16


def test_pinball_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("wql_loss")["cases"]:
        scores, target = torch.tensor(case["scores"]).double(), torch.tensor(case["targets"]).double()
        losses = pinball_loss(scores, target, case["quantiles"])
        torch.testing.assert_close(losses, torch.tensor(case["per_element"]).double(), atol=1e-6, rtol=0.0)
        assert losses.mean().item() == pytest.approx(case["wql"], abs=1e-6)


def test_pinball_equals_sklearn() -> None:
    torch.manual_seed(0)
    scores, target, levels = torch.rand(50, 3).double(), torch.rand(50).double(), [0.1, 0.5, 0.9]
    losses = pinball_loss(scores, target, levels)
    for column, level in enumerate(levels):
        wanted = _reference_sklearn_pinball(scores[:, column], target, level)
        assert losses[:, column].mean().item() == pytest.approx(wanted, abs=1e-12)


def test_pinball_is_least_at_the_quantile_and_the_soft_cross_entropy_at_the_mean() -> None:
    """Rates 0, 0, 0, 1: the median is 0, the 90 % quantile is 1, and the mean is 1/4."""
    rates, grid = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.linspace(0.0, 1.0, 101)
    scores = grid[:, None, None].expand(-1, 4, 2)
    losses = pinball_loss(scores, rates.expand(101, 4), [0.5, 0.9]).mean(dim=1)
    assert grid[losses.argmin(dim=0)].tolist() == pytest.approx([0.0, 1.0])
    inner = grid[1:-1]
    entropy = soft_cross_entropy(inner.logit()[:, None].expand(-1, 4), rates.expand(99, 4)).mean(dim=1)
    assert inner[entropy.argmin()].item() == pytest.approx(0.25)


def test_soft_cross_entropy_by_hand() -> None:
    # sigmoid(log 3) = 3/4: -1/2 log 3/4 - 1/2 log 1/4 = log 4 - 1/2 log 3.
    loss = soft_cross_entropy(torch.tensor([math.log(3.0), 200.0]), torch.tensor([0.5, 1.0]))
    assert loss.tolist() == pytest.approx([math.log(4.0) - 0.5 * math.log(3.0), 0.0], abs=1e-6)


def test_ranknet_equals_the_vectors(vectors: Vectors) -> None:
    """The reference's sum is its mean times the number of pairs."""
    for case in vectors("ranknet_loss")["cases"]:
        scores, target = torch.tensor(case["scores"]), torch.tensor(case["targets"])
        options = {"temperature": case["temperature"], "tie_weight": case["tie_loss_weight"]}
        loss = ranknet_loss(scores, target, **options).item()
        if case["reduction"] == "sum":
            assert len(set(case["targets"])) == len(case["targets"])
            loss *= math.comb(len(scores), 2)
        assert loss == pytest.approx(case["loss"], abs=1e-6)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-5.0, 5.0), st.sampled_from([0.0, 0.5, 1.0])), max_size=6),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_ranknet_equals_two_loops(pairs: list[tuple[float, float]], temperature: float, tie_weight: float) -> None:
    scores, targets = [s for s, _ in pairs], [t for _, t in pairs]
    found = ranknet_loss(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(targets), temperature=temperature, tie_weight=tie_weight
    )
    assert found.item() == pytest.approx(_reference_naive_ranknet(scores, targets, temperature, tie_weight), abs=1e-9)


def test_ranknet_of_ties_alone_keeps_a_gradient_of_zero() -> None:
    scores = torch.tensor([0.2, 1.0], requires_grad=True)
    loss = ranknet_loss(scores, torch.tensor([0.5, 0.5]))
    loss.backward()
    assert loss.item() == 0.0
    assert scores.grad.tolist() == [0.0, 0.0]
