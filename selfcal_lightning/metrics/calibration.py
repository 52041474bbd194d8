"""Calibration errors: plain and debiased, with bounds that also hold where the true error is small.

``ECE = sum_b |g_b|`` with g_b the mean over all responses of (correct - confidence) in bin b. Noise in absolute
values does not average out: even perfectly calibrated confidences measure an ECE above 0, and resampling adds the
same bias a second time. So bootstrap percentiles lie above the true value where that is small.

With h_b the deviation of a gap from its population value g_b, convexity gives

``sum_b sign(g_b) h_b  <=  sum_b |g_b + h_b| - sum_b |g_b|  <=  sum_b |h_b|``,

where a bin whose sign is certain adds the same to both ends. The deviations of resampled gaps from the measured ones
estimate h (the bootstrap is valid for means), and a sign is certain where the gap exceeds ``sqrt(2 ln Q)`` of its
standard errors, Q the number of questions. Quantiles of the two ends then bound how far the measured error may lie
from the true one, whether that is 0 or not.

Reference:
    Fang and Santos, Inference on Directionally Differentiable Functions, 2019 (why the plain bootstrap fails at a kink,
    and the selection of the bins away from it); Kumar, Liang and Ma, Verified Uncertainty Calibration, 2019, section 4
    (the debiased value).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfcal_lightning.metrics import arrays
from selfcal_lightning.metrics.arrays import Array, Floats, Integers


@dataclass(frozen=True)
class ReliabilityBins:
    """The data of a reliability diagram. Bins are [lower, upper); the last one is closed.

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
    def from_sums(cls, edges: Floats, count: Floats, confidence_sum: Floats, correct_sum: Floats) -> ReliabilityBins:
        """Build the bins from edges [B + 1] and the sums over each bin [B]."""
        filled = np.where(count > 0, count, np.nan)
        return cls(edges[:-1], edges[1:], count.astype(np.int64), confidence_sum / filled, correct_sum / filled)

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
        """Largest absolute gap of a filled bin (Guo et al., 2017, equation 5); None without responses."""
        return float(np.nanmax(np.abs(self.gap))) if self.count.any() else None


def reliability_bins(confidence: Array, correct: Array, *, num_bins: int = 10) -> ReliabilityBins:
    """Sort responses into bins of confidence of equal width.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        num_bins: B.

    Example:
        >>> bins = reliability_bins([0.1, 0.8, 0.9, 1.0], [False, True, True, False], num_bins=2)
        >>> bins.count.tolist(), bins.confidence.round(3).tolist(), bins.accuracy.round(3).tolist()
        ([1, 3], [0.1, 0.9], [0.0, 0.667])
    """
    probabilities, labels = arrays.as_probabilities(confidence), arrays.as_probabilities(correct, "correct")
    arrays.check_same_length(confidence=probabilities, correct=labels)
    edges = arrays.uniform_edges(num_bins)
    index = arrays.bin_index(probabilities, edges)
    count, confidence_sum, correct_sum = (
        np.bincount(index, weights=weights, minlength=num_bins).astype(np.float64)
        for weights in (None, probabilities, labels)
    )
    return ReliabilityBins.from_sums(edges, count, confidence_sum, correct_sum)


def expected_calibration_error(confidence: Array, correct: Array, *, num_bins: int = 10) -> float | None:
    """Compute the expected calibration error, in [0, 1]; lower is better. None without responses.

    ``ECE = sum_b n_b / N * |accuracy_b - mean confidence_b|`` over the bins b of :func:`reliability_bins`; the last one
    holds 1.0.

    Example:
        >>> expected_calibration_error([1.0, 1.0, 1.0, 1.0], [True, False, True, True])
        0.25

    Reference:
        Guo et al., On Calibration of Modern Neural Networks, 2017, equation 3.
    """
    return reliability_bins(confidence, correct, num_bins=num_bins).expected_error


def brier_score(confidence: Array, correct: Array) -> float | None:
    """Compute the mean squared difference of confidence and correctness, in [0, 1]; lower is better.

    Example:
        >>> brier_score([0.5, 1.0], [True, True])
        0.125

    Reference:
        Brier, Verification of forecasts expressed in terms of probability, 1950.
    """
    probabilities, labels = arrays.as_probabilities(confidence), arrays.as_probabilities(correct, "correct")
    arrays.check_same_length(confidence=probabilities, correct=labels)
    return float(np.mean((probabilities - labels) ** 2)) if len(probabilities) else None


@dataclass(frozen=True)
class ErrorBounds:
    """A calibration error, or a change or ratio of two, with bounds of "measured minus true" in each of R resamples."""

    value: float  # measured value
    least: Floats  # lower bound [R]
    most: Floats  # upper bound [R]

    @classmethod
    def from_gaps(cls, rows: Floats, *, num_questions: int) -> ErrorBounds:
        """Build the bounds from the gaps of B bins [1 + R, B]: the measured ones, then those of R resamples."""
        gaps, deviation = rows[0], rows[1:] - rows[0]
        drawn = deviation[~np.isnan(deviation).any(axis=1)]
        spread = drawn.std(axis=0) if len(drawn) else np.zeros_like(gaps)
        is_clear = np.abs(gaps) > np.sqrt(2.0 * np.log(num_questions)) * spread
        signed = np.sign(gaps) * deviation
        most = np.where(is_clear, signed, np.abs(deviation))
        return cls(float(np.abs(gaps).sum()), signed.sum(axis=1), most.sum(axis=1))

    @classmethod
    def from_sums(cls, gaps: Floats, sizes: Floats, weights: Floats) -> ErrorBounds:
        """Build the bounds from the contribution of each question to the gaps."""
        totals = weights.T @ sizes
        means = (weights.T @ gaps) / np.where(totals > 0.0, totals, np.nan)[:, None]
        return cls.from_gaps(means, num_questions=len(gaps))

    def minus(self, other: ErrorBounds) -> ErrorBounds:
        """Return this error minus another on the same resamples."""
        return ErrorBounds(self.value - other.value, self.least - other.most, self.most - other.least)

    def over(self, other: ErrorBounds) -> ErrorBounds | None:
        """Return this error divided by another on the same resamples, to first order; None if the other is 0."""
        if other.value == 0.0:
            return None
        ratio = self.value / other.value
        least, most = self.least - ratio * other.most, self.most - ratio * other.least
        return ErrorBounds(ratio, least / other.value, most / other.value)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return an interval that holds the true value with a probability of about ``level`` or more."""
        low = self.value - float(np.nanquantile(self.most, 0.5 + level / 2.0))
        return low, self.value - float(np.nanquantile(self.least, 0.5 - level / 2.0))


def debiased_calibration_error(
    confidence: Array, correct: Array, question_index: Array, *, num_bins: int = 10
) -> float | None:
    """Compute the expected calibration error minus its estimated bias, at least 0.

    ``max(0, 2 ECE - sum_b E|N(g_b, s_b^2)|)``: the bias is what noise would add to the measured gaps, with s_b
    the standard error of g_b over questions. Where the true error is near 0, some bias remains.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        question_index: The question of each response [N], as integers or strings.
        num_bins: Number of equal-width bins.

    Example:
        >>> debiased_calibration_error([0.5] * 4, [True] * 4, [0, 1, 2, 3])  # all gaps are alike: no chance in them
        0.5
    """
    from scipy.special import erf

    scores, labels = arrays.as_probabilities(confidence), arrays.as_labels(correct)
    questions, codes = arrays.question_codes(question_index)
    arrays.check_same_length(confidence=scores, correct=labels, question_index=codes)
    if not len(scores):
        return None
    slot = codes * num_bins + arrays.bin_index(scores, arrays.uniform_edges(num_bins))
    sums = np.bincount(slot, weights=labels - scores, minlength=len(questions) * num_bins).reshape(-1, num_bins)
    counts = np.bincount(codes, minlength=len(questions))[:, None]
    gaps = sums.sum(axis=0) / len(scores)
    errors = np.sqrt(((sums - gaps * counts) ** 2).sum(axis=0)) / len(scores)
    spread = np.where(errors > 0.0, errors, 1.0)
    z = gaps / spread
    folded = spread * np.sqrt(2.0 / np.pi) * np.exp(-0.5 * z**2) + gaps * erf(z / np.sqrt(2.0))
    expected = np.where(errors > 0.0, folded, np.abs(gaps))
    return max(0.0, float((2.0 * np.abs(gaps) - expected).sum()))


def half_budget_threshold(confidence: Array, question: Array) -> float | None:
    """Return the highest threshold at which early stopping draws at most half of the responses, without labels.

    If m of the n responses to a question reach the threshold, a random order meets the first of them after ``(n + 1) /
    (m + 1)`` responses on average. If none does, all n are drawn. The threshold is one of 0, .01 ... 1; None if no
    question has two responses.

    Example:
        >>> half_budget_threshold([0.9, 0.2, 0.9, 0.2, 0.3, 0.1, 0.3, 0.1], [0, 0, 0, 0, 1, 1, 1, 1])
        0.3
    """
    sure, (_, codes) = arrays.as_probabilities(confidence), arrays.question_codes(question)
    sizes = np.bincount(codes) if len(sure) else np.zeros(0)
    if not (sizes > 1).any():
        return None
    found = 0.0
    for threshold in np.arange(101) / 100:
        enough = np.bincount(codes, weights=sure >= threshold, minlength=len(sizes))
        taken = np.where(enough > 0, (sizes + 1) / (enough + 1), sizes)
        if taken.sum() > sizes.sum() / 2:
            break
        found = float(threshold)
    return found
