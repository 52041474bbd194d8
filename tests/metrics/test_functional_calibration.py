"""Calibration numbers against recorded vectors, naive loops, scikit-learn and torchmetrics."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss
from torchmetrics.functional.classification import binary_calibration_error

from selfcal_lightning.metrics.calibration import (
    brier_score,
    expected_calibration_error,
    maximum_calibration_error,
    reliability_bins,
)

Vectors = Callable[[str], dict[str, Any]]
RESPONSES = st.lists(
    st.tuples(st.one_of(st.floats(0.0, 1.0), st.integers(0, 20).map(lambda n: n / 20)), st.booleans()),
    min_size=1,
    max_size=40,
)


def _responses(size: int = 500, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    confidence = generator.random(size) ** 2
    return confidence, generator.random(size) < confidence


def _reference_naive_calibration_errors(
    confidence: list[float], correct: list[bool], edges: np.ndarray
) -> tuple[float, float]:
    """Return ECE and MCE by one loop over bins and one over responses."""
    expected, maximum = 0.0, 0.0
    for lower, upper in itertools.pairwise(edges):
        last = upper == edges[-1]
        inside = [
            (c, y) for c, y in zip(confidence, correct, strict=True) if lower <= c < upper or (last and c == upper)
        ]
        if inside:
            gap = abs(sum(c for c, _ in inside) - sum(y for _, y in inside)) / len(inside)
            expected += gap * len(inside) / len(confidence)
            maximum = max(maximum, gap)
    return expected, maximum


def _reference_sklearn_reliability(confidence: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return calibration_curve(correct, confidence, n_bins=10)


def _reference_sklearn_brier(confidence: np.ndarray, correct: np.ndarray) -> float:
    return float(brier_score_loss(correct, confidence))


def _reference_torchmetrics_calibration(confidence: np.ndarray, correct: np.ndarray, norm: str) -> float:
    return binary_calibration_error(torch.tensor(confidence), torch.tensor(correct).long(), n_bins=10, norm=norm).item()


def test_selfcal_ece_equals_the_vectors(vectors: Vectors) -> None:
    cases = vectors("ece_auroc_selfcal")["cases"]
    for case in cases:
        error = expected_calibration_error(case["scores"], case["y"])
        assert error == pytest.approx(case["ece_last_bin_closed"], abs=1e-6)
    assert len(cases) >= 5


def test_calibration_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("calibration_discrimination")["cases"]:
        confidence, correct = case["confidences"], case["correct"]
        assert expected_calibration_error(confidence, correct) == pytest.approx(case["ece10"], abs=1e-6)
        assert maximum_calibration_error(confidence, correct) == pytest.approx(case["mce"], abs=1e-6)
        assert brier_score(confidence, correct) == pytest.approx(case["brier"], abs=1e-6)


def test_untied_quantile_bins_equal_the_vectors(vectors: Vectors) -> None:
    case = vectors("calibration_discrimination")["cases"][0]
    error = expected_calibration_error(case["confidences"], case["correct"], binning="quantile")
    assert error == pytest.approx(case["ace10_quantile"], abs=1e-6)


@settings(deadline=None)
@given(RESPONSES, st.sampled_from([1, 2, 7, 10]), st.sampled_from(["uniform", "quantile"]))
def test_errors_equal_naive_loops(responses: list[tuple[float, bool]], num_bins: int, binning: str) -> None:
    confidence, correct = [c for c, _ in responses], [y for _, y in responses]
    bins = reliability_bins(confidence, correct, num_bins=num_bins, binning=binning)
    edges = np.append(bins.lower, 1.0)
    expected, maximum = _reference_naive_calibration_errors(confidence, correct, edges)
    options = {"num_bins": num_bins, "binning": binning}
    assert expected_calibration_error(confidence, correct, **options) == pytest.approx(expected, abs=1e-12)
    assert maximum_calibration_error(confidence, correct, **options) == pytest.approx(maximum, abs=1e-12)
    assert bins.count.sum() == len(responses)


def test_reliability_equals_sklearn() -> None:
    confidence, correct = _responses()
    bins = reliability_bins(confidence, correct)
    accuracy, mean_confidence = _reference_sklearn_reliability(confidence, correct)
    assert_allclose(bins.accuracy[bins.count > 0], accuracy, atol=1e-12)
    assert_allclose(bins.confidence[bins.count > 0], mean_confidence, atol=1e-12)


def test_brier_equals_sklearn() -> None:
    confidence, correct = _responses()
    assert brier_score(confidence, correct) == pytest.approx(_reference_sklearn_brier(confidence, correct), abs=1e-12)


def test_errors_equal_torchmetrics_without_ones() -> None:
    confidence, correct = _responses()
    for norm, ours in (("l1", expected_calibration_error), ("max", maximum_calibration_error)):
        theirs = _reference_torchmetrics_calibration(confidence, correct, norm)
        assert ours(confidence, correct) == pytest.approx(theirs, abs=1e-5)


def test_one_belongs_to_the_last_bin() -> None:
    # Two of four right; the one bin has mean confidence .965: |.5 - .965|. torchmetrics gives 1.0 a bin of its own.
    confidence, correct = [0.93, 0.93, 1.0, 1.0], [True, True, False, False]
    assert expected_calibration_error(confidence, correct) == pytest.approx(0.465)
    assert reliability_bins(confidence, correct).count.tolist() == [0] * 9 + [4]
    theirs = _reference_torchmetrics_calibration(np.array(confidence), np.array(correct), "l1")
    assert theirs == pytest.approx(0.535, abs=1e-6)


def test_quantile_bins_hold_every_response_once() -> None:
    confidence, correct = _responses(1000)
    counts = reliability_bins(confidence, correct, binning="quantile").count
    assert counts.min() >= 99
    assert counts.max() <= 101
    tied = reliability_bins([0.5] * 7 + [0.9], [True] * 8, binning="quantile")
    assert tied.count.sum() == 8
    assert (np.diff(tied.lower) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_and_sequences_give_the_same(dtype: torch.dtype) -> None:
    confidence, correct = (torch.tensor(column) for column in _responses(100))
    rounded = confidence.to(dtype).requires_grad_()
    plain = rounded.detach().double().tolist()
    assert expected_calibration_error(rounded, correct) == expected_calibration_error(plain, correct.tolist())
    assert brier_score(rounded, correct) == brier_score(np.array(plain), correct.numpy())


def test_nothing_gives_none() -> None:
    assert expected_calibration_error([], []) is None
    assert maximum_calibration_error([], []) is None
    assert brier_score([], []) is None
    assert expected_calibration_error([], [], binning="quantile") is None


def test_shares_of_right_responses_are_labels_too() -> None:
    assert expected_calibration_error([0.5, 0.5], [0.25, 0.5]) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        ([0.5, None], [True, True], "None or NaN at position 1"),
        ([0.5, 1.5], [True, True], r"Expected `confidence` to lie in \[0, 1\], but got values from 0.5 to 1.5"),
        ([0.5], [None], "Expected `correct` to be known"),
        ([0.5], [True, False], r"same length, but got \(1, 2\)"),
        ([[0.5]], [True], "one-dimensional"),
    ],
)
def test_wrong_arguments_are_named(confidence: list[Any], correct: list[Any], message: str) -> None:
    for function in (expected_calibration_error, maximum_calibration_error, brier_score):
        with pytest.raises(ValueError, match=message):
            function(confidence, correct)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="Expected `num_bins` to be a positive integer, but got 0"):
        expected_calibration_error([0.5], [True], num_bins=0)
    with pytest.raises(ValueError, match='Expected `binning` to be "uniform" or "quantile"'):
        expected_calibration_error([0.5], [True], binning="equal")
