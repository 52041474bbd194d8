"""Verdicts on single responses against capabilities: by hand, by the vectors, and by scipy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from selfcal_lightning.metrics.capability import drawn_verdicts, target_gap
from selfcal_lightning.metrics.discrimination import kendall


def _reference_scipy_kendall(first: np.ndarray, second: np.ndarray) -> float:
    return float(stats.kendalltau(first, second)[0])


def test_values_equal_the_vectors(vectors: Callable[[str], dict[str, Any]]) -> None:
    for case in vectors("metric_diff")["cases"]:
        found, out = target_gap(case["response"], case["capability"]), case["out"]
        assert found is not None
        assert found.mae == pytest.approx(out["mae"], abs=1e-6)
        assert found.spearman == pytest.approx(out["spearman_correlation"], abs=1e-6)
        assert found.kendall == pytest.approx(out["kendall_correlation"], abs=1e-6)


@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_kendall_equals_scipy(levels: int) -> None:
    rng = np.random.default_rng(levels)
    first, second = rng.integers(0, levels, 60).astype(float), rng.integers(0, 7, 60).astype(float)
    assert kendall(first, second) == pytest.approx(_reference_scipy_kendall(first, second))


def test_what_is_not_defined() -> None:
    assert target_gap([], []) is None
    assert kendall([1.0, 1.0], [0.0, 1.0]) is None
    gap = target_gap([1, 1], [0.5, 1.0])
    assert gap is not None
    assert (gap.mae, gap.spearman, gap.kendall) == (0.25, None, None)
    with pytest.raises(ValueError, match="expected_accuracy"):
        target_gap([1], [1.5])


def test_drawn_verdicts_have_the_capabilities_as_their_mean() -> None:
    truth = np.array([0.0, 0.25, 1.0])
    drawn = np.mean([drawn_verdicts(truth, seed=seed) for seed in range(2000)], axis=0)
    assert drawn == pytest.approx(truth, abs=0.03)
    assert drawn_verdicts(truth).tolist() == drawn_verdicts(truth).tolist()
