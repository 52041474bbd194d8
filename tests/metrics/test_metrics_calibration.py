"""BinnedCalibrationError against the function and against torchmetrics."""

from __future__ import annotations

import pytest
import torch
from numpy.testing import assert_allclose
from torchmetrics.classification import BinaryCalibrationError

from selfcal_lightning.metrics.calibration import (
    expected_calibration_error,
    maximum_calibration_error,
    reliability_bins,
)
from selfcal_lightning.metrics.streaming import BinnedCalibrationError


def _responses() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(1000, generator=generator, dtype=torch.float64)
    return confidence, (torch.rand(1000, generator=generator) < confidence**2).long()


def _reference_torchmetrics_calibration(confidence: torch.Tensor, correct: torch.Tensor, norm: str) -> float:
    metric = BinaryCalibrationError(n_bins=10, norm=norm)
    metric.update(confidence, correct)
    return metric.compute().item()


@pytest.mark.parametrize("norm", ["l1", "max"])
def test_equals_the_function_and_torchmetrics(norm: str) -> None:
    confidence, correct = _responses()
    metric = BinnedCalibrationError(norm=norm)
    for start in range(0, 1000, 300):
        metric.update(confidence[start : start + 300], correct[start : start + 300])
    function = expected_calibration_error if norm == "l1" else maximum_calibration_error
    value = metric.compute()
    assert value.dtype == torch.float64
    assert value.item() == pytest.approx(function(confidence, correct), abs=1e-12)
    assert value.item() == pytest.approx(_reference_torchmetrics_calibration(confidence, correct, norm), abs=1e-5)


@pytest.mark.parametrize("num_bins", [1, 3, 10, 15])
def test_bins_equal_the_function_also_on_edges(num_bins: int) -> None:
    edges = torch.linspace(0.0, 1.0, num_bins + 1, dtype=torch.float64)
    tenths = torch.arange(11, dtype=torch.float64) / 10
    confidence = torch.cat([edges, tenths, tenths.float().double()])
    correct = torch.arange(len(confidence)) % 2
    metric = BinnedCalibrationError(num_bins)
    metric.update(confidence, correct)
    ours, function = metric.bins(), reliability_bins(confidence, correct, num_bins=num_bins)
    for name in ("lower", "upper", "count", "confidence", "accuracy"):
        assert_allclose(getattr(ours, name), getattr(function, name), atol=1e-12)


def test_many_bfloat16_batches_do_not_drift() -> None:
    metric = BinnedCalibrationError().to(torch.bfloat16)
    for _ in range(3000):
        metric.update(torch.tensor([0.5], dtype=torch.bfloat16), torch.tensor([0]))
    assert metric.bins().count.sum() == 3000
    assert metric.compute().item() == 0.5


def test_gradients_do_not_enter() -> None:
    confidence = torch.tensor([0.5, 0.9], requires_grad=True)
    metric = BinnedCalibrationError()
    assert not metric(confidence, torch.tensor([1, 1])).requires_grad
    assert not metric.count.requires_grad


@pytest.mark.parametrize("confidence", [[1.5], [-0.1], [float("nan")]])
def test_impossible_confidences_are_refused(confidence: list[float]) -> None:
    with pytest.raises(ValueError, match=r"Expected `confidence` to lie in \[0, 1\]"):
        BinnedCalibrationError().update(torch.tensor(confidence), torch.tensor([1]))


def test_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match='Expected `norm` to be "l1" or "max"'):
        BinnedCalibrationError(norm="l2")
