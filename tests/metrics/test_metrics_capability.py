"""CapabilityMetrics against recorded vectors, scipy and the pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from selfcal_lightning.capability.metrics import CAPABILITY_QUESTIONS, KEYS, CapabilityMetrics
from selfcal_lightning.metrics.capability import skill, squared_error

Vectors = Callable[[str], dict[str, Any]]


def _questions(size: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(0)
    truth = generator.beta(0.6, 0.7, size)
    samples = generator.integers(2, 12, size)
    predicted = np.clip(truth + generator.normal(0.0, 0.2, size), 0.0, 1.0)
    return torch.tensor(predicted), torch.tensor(generator.binomial(samples, truth)), torch.tensor(samples)


def _computed(*columns: torch.Tensor, step: int = 90, **options: Any) -> dict[str, float]:
    metric = CapabilityMetrics(**options)
    for start in range(0, len(columns[0]), step):
        metric.update(*(column[start : start + step] for column in columns))
    return metric.compute()


def _reference_scipy_correlations(predicted: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    return float(stats.pearsonr(predicted, share)[0]), float(stats.spearmanr(predicted, share)[0])


def test_values_equal_the_vectors(vectors: Vectors) -> None:
    """Counts of 100 samples. Correlations of a constant, which the reference calls 0, are not defined here."""
    for case in vectors("capability_metrics")["cases"]:
        correct = torch.tensor(case["c_star"]).mul(100).round()
        found = _computed(torch.tensor(case["c"]).double(), correct, torch.full_like(correct, 100), debiased=False)
        out = case["out"]
        for key, name in (("MSE", "mse"), ("MAE", "mae"), ("RMSE", "rmse"), ("ECE", "ece")):
            assert found[f"capability/{key}"] == pytest.approx(out[name], abs=1e-6)
        for key, name in (("Pearson", "pearson_r"), ("Spearman", "spearman_r")):
            value = found[f"capability/{key}"]
            assert (0.0 if math.isnan(value) else value) == pytest.approx(out[name], abs=1e-6)
        assert found[CAPABILITY_QUESTIONS] == out["num_examples"]


def test_correlations_equal_scipy() -> None:
    predicted, correct, samples = _questions()
    found = _computed(predicted, correct, samples)
    wanted = _reference_scipy_correlations(predicted.numpy(), (correct / samples).numpy())
    assert (found["capability/Pearson"], found["capability/Spearman"]) == pytest.approx(wanted, abs=1e-6)
    assert set(found) == set(KEYS)


@pytest.mark.parametrize("debiased", [True, False])
def test_errors_equal_the_functions_in_any_batches(debiased: bool) -> None:
    columns = _questions()
    found = _computed(*columns, debiased=debiased)
    predicted, correct, samples = columns
    error = squared_error(predicted, correct, samples, debiased=debiased)
    assert found["capability/MSE"] == pytest.approx(error, abs=1e-12)
    assert found["capability/RMSE"] == pytest.approx(error**0.5, abs=1e-12)
    assert found["capability/Skill"] == pytest.approx(skill(predicted, correct, samples, debiased=debiased), abs=1e-12)
    assert _computed(*columns, step=7, debiased=debiased) == found
    assert _computed(*(column.flip(0) for column in columns), debiased=debiased) == found


def test_a_squared_error_below_zero_has_the_root_zero() -> None:
    found = _computed(torch.tensor([0.5]), torch.tensor([1]), torch.tensor([2]))
    assert found["capability/MSE"] == -0.25
    assert found["capability/RMSE"] == 0.0
    assert math.isnan(found["capability/Skill"])


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Expected `predicted` to lie in \[0, 1\]"):
        CapabilityMetrics().update(torch.tensor([1.5]), torch.tensor([1]), torch.tensor([2]))
    metric = CapabilityMetrics()
    metric.update(torch.tensor([0.5]), torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(ValueError, match="Expected `num_samples` to be at least 2"):
        metric.compute()
