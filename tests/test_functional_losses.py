"""Losses against values written out by hand and torch's own modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from selfcal_lightning.functional.losses import (
    calibration_loss,
    packed_negative_log_likelihood,
    squared_calibration_loss,
)


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


def test_calibration_loss_equals_the_vectors(vectors: Callable[[str], dict[str, Any]]) -> None:
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


def test_unlike_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="Expected `confidence` and `target` to have the same shape"):
        calibration_loss(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="Expected `beta` to be above 0"):
        calibration_loss(torch.zeros(2), torch.zeros(2), beta=0.0)


def masked_likelihood(logits: torch.Tensor, token_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-likelihood of the masked tokens of each row: logits [B, T, V], the others [B, T]."""
    rows = mask.nonzero()[:, 0]
    return packed_negative_log_likelihood(logits[mask], token_ids[mask], rows, num_rows=len(mask))


def test_sequence_likelihood_by_hand() -> None:
    # Two tokens of a uniform distribution over four: log 4 each; the unmasked position would cost much more.
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 0] = 50.0
    token_ids, mask = torch.tensor([[3, 1, 2]]), torch.tensor([[False, True, True]])
    torch.testing.assert_close(masked_likelihood(logits, token_ids, mask), torch.tensor([math.log(4.0)]))


def test_sequence_likelihood_equals_naive_loops() -> None:
    torch.manual_seed(0)
    logits, token_ids = torch.randn(4, 6, 11), torch.randint(11, (4, 6))
    mask = torch.rand(4, 6) > 0.4
    mask[2] = False
    losses = masked_likelihood(logits, token_ids, mask)
    assert losses.tolist() == pytest.approx(_reference_naive_mean_nll(logits, token_ids, mask), abs=1e-5)
    rows = mask.nonzero()[:, 0]
    shuffled = torch.randperm(len(rows))
    packed = packed_negative_log_likelihood(
        logits[mask][shuffled], token_ids[mask][shuffled], rows[shuffled], num_rows=4
    )
    torch.testing.assert_close(packed, losses)


def test_a_row_without_tokens_gives_zero_and_no_gradient_of_nan() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    losses = masked_likelihood(logits, torch.zeros(2, 3).long(), mask)
    assert losses[1].item() == 0.0
    losses.sum().backward()
    assert torch.isfinite(logits.grad).all()
    empty = packed_negative_log_likelihood(torch.zeros(0, 5), torch.zeros(0).long(), torch.zeros(0).long(), num_rows=2)
    assert empty.tolist() == [0.0, 0.0]
