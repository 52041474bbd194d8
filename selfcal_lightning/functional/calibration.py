"""How far confidence is from the share of right responses. Confidence lies in [0, 1], higher is better.

Every function takes sequences, NumPy arrays or tensors of shape [N], computes in float64, and returns None where
there is no response. ``correct`` holds True and False, or shares of right responses in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import (
    Array,
    Floats,
    Integers,
    as_probabilities,
    bin_index,
    check_same_length,
    uniform_edges,
)

Binning = Literal["uniform", "quantile"]


@dataclass(frozen=True)
class ReliabilityBins:
    """What a reliability diagram shows. Bins are [lower, upper); the last one is closed.

    Attributes:
        lower: Lower edges [B].
        upper: Upper edges [B].
        count: Responses in each bin [B].
        confidence: Mean confidence [B]; NaN where a bin is empty.
        accuracy: Share of right responses [B]; NaN where a bin is empty.
    """

    lower: Floats
    upper: Floats
    count: Integers
    confidence: Floats
    accuracy: Floats

    @classmethod
    def from_sums(
        cls, edges: Floats, count: Floats | Integers, confidence_sum: Floats, correct_sum: Floats
    ) -> ReliabilityBins:
        """Build the bins from edges [B + 1] and the sums over each bin [B]."""
        filled = np.where(count > 0, count, np.nan)
        return cls(
            edges[:-1], edges[1:], np.asarray(count).astype(np.int64), confidence_sum / filled, correct_sum / filled
        )

    @property
    def gap(self) -> Floats:
        """Accuracy minus mean confidence [B]: negative where the model is too confident; NaN where empty."""
        return self.accuracy - self.confidence

    @property
    def expected_error(self) -> float | None:
        """Mean absolute gap, weighted by the number of responses; None without responses."""
        total = int(self.count.sum())
        return float(np.nansum(np.abs(self.gap) * self.count) / total) if total else None

    @property
    def maximum_error(self) -> float | None:
        """Largest absolute gap of a filled bin; None without responses."""
        return float(np.nanmax(np.abs(self.gap))) if self.count.any() else None


def reliability_bins(
    confidence: Array, correct: Array, *, num_bins: int = 10, binning: Binning = "uniform"
) -> ReliabilityBins:
    """Sort responses into bins of confidence.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        num_bins: B. With "quantile" edges that fall together are merged, so there may be fewer.
        binning: "uniform" for bins of equal width, "quantile" for bins of about equal numbers of responses.

    Raises:
        ValueError: If a value lies outside [0, 1], is None or NaN, or the lengths differ.

    Example:
        >>> bins = reliability_bins([0.1, 0.8, 0.9, 1.0], [False, True, True, False], num_bins=2)
        >>> bins.count.tolist(), bins.confidence.round(3).tolist(), bins.accuracy.round(3).tolist()
        ([1, 3], [0.1, 0.9], [0.0, 0.667])
    """
    if binning not in ("uniform", "quantile"):
        raise InputError(f'Expected `binning` to be "uniform" or "quantile", but got {binning!r}.')
    probabilities, labels = as_probabilities(confidence), as_probabilities(correct, "correct")
    check_same_length(confidence=probabilities, correct=labels)
    edges = uniform_edges(num_bins)
    if binning == "quantile" and len(probabilities):
        # Each response falls into exactly one bin also where many confidences are equal.
        edges = np.unique(np.concatenate([[0.0], np.quantile(probabilities, edges[1:-1]), [1.0]]))
    index = bin_index(probabilities, edges)
    count, confidence_sum, correct_sum = (
        np.bincount(index, weights=weights, minlength=len(edges) - 1).astype(np.float64)
        for weights in (None, probabilities, labels)
    )
    return ReliabilityBins.from_sums(edges, count, confidence_sum, correct_sum)


def expected_calibration_error(
    confidence: Array, correct: Array, *, num_bins: int = 10, binning: Binning = "uniform"
) -> float | None:
    """Compute the expected calibration error, in [0, 1]; lower is better.

    ``ECE = sum_b n_b / N * |accuracy_b - mean confidence_b|`` over the bins b. The last bin holds 1.0.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        num_bins: Number of bins.
        binning: "uniform" for bins of equal width, "quantile" for bins of about equal numbers of responses.

    Raises:
        ValueError: If a value lies outside [0, 1], is None or NaN, or the lengths differ.

    Example:
        >>> expected_calibration_error([1.0, 1.0, 1.0, 1.0], [True, False, True, True])
        0.25

    Reference:
        Guo et al., On Calibration of Modern Neural Networks, 2017, equation 3.
    """
    return reliability_bins(confidence, correct, num_bins=num_bins, binning=binning).expected_error


def maximum_calibration_error(
    confidence: Array, correct: Array, *, num_bins: int = 10, binning: Binning = "uniform"
) -> float | None:
    """Compute the largest gap between accuracy and mean confidence of a filled bin, in [0, 1]; lower is better.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        num_bins: Number of bins.
        binning: "uniform" for bins of equal width, "quantile" for bins of about equal numbers of responses.

    Raises:
        ValueError: If a value lies outside [0, 1], is None or NaN, or the lengths differ.

    Example:
        >>> maximum_calibration_error([0.25, 0.25, 1.0], [False, False, True])
        0.25

    Reference:
        Guo et al., On Calibration of Modern Neural Networks, 2017, equation 5.
    """
    return reliability_bins(confidence, correct, num_bins=num_bins, binning=binning).maximum_error


def brier_score(confidence: Array, correct: Array) -> float | None:
    """Compute the mean squared difference of confidence and correctness, in [0, 1]; lower is better.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].

    Raises:
        ValueError: If a value lies outside [0, 1], is None or NaN, or the lengths differ.

    Example:
        >>> brier_score([0.5, 1.0], [True, True])
        0.125

    Reference:
        Brier, Verification of forecasts expressed in terms of probability, 1950.
    """
    probabilities, labels = as_probabilities(confidence), as_probabilities(correct, "correct")
    check_same_length(confidence=probabilities, correct=labels)
    return float(np.mean((probabilities - labels) ** 2)) if len(probabilities) else None
