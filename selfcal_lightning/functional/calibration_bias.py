"""What chance adds to a calibration error: a value with its bias taken off, and bounds that hold where it is small.

``ECE = sum_b |g_b|`` with g_b the mean over all responses of (correct - confidence) in bin b. Absolute values do not
average out: a perfectly calibrated confidence has an ECE above 0 on every sample, and resampling such a sample adds
the same bias once more. So the percentiles of a bootstrap lie above the truth where the truth is small.

With h_b the deviation of a gap from its population value g_b, convexity gives

``sum_b sign(g_b) h_b  <=  sum_b |g_b + h_b| - sum_b |g_b|  <=  sum_b |h_b|``,

where both ends meet in the bins whose sign is beyond doubt. The deviations of resampled gaps from those measured stand
for h (the bootstrap is valid for means), and a sign is beyond doubt where the gap exceeds ``sqrt(2 ln Q)`` of its
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

from selfcal_lightning.functional.base import (
    Array,
    Floats,
    as_labels,
    as_probabilities,
    bin_index,
    check_same_length,
    question_codes,
    uniform_edges,
)


@dataclass(frozen=True)
class ErrorBounds:
    """A calibration error, or a change or ratio of two, with bounds of "measured minus true" in each of R resamples.

    Attributes:
        value: As measured.
        least: Lower bound [R].
        most: Upper bound [R].
    """

    value: float
    least: Floats
    most: Floats

    @classmethod
    def from_gaps(cls, gaps: Floats, resampled: Floats, *, num_questions: int) -> ErrorBounds:
        """Build the bounds from the gaps of B bins.

        Args:
            gaps: Measured [B].
            resampled: On R resamples of the questions [R, B]; NaN where one has no response.
            num_questions: Q.

        Example:
            >>> bounds = ErrorBounds.from_gaps(np.array([-0.5]), np.array([[-0.25], [-0.75]]), num_questions=2)
            >>> bounds.value, bounds.least.tolist(), bounds.most.tolist()  # 2 standard errors: its sign is clear
            (0.5, [-0.25, 0.25], [-0.25, 0.25])
            >>> bounds = ErrorBounds.from_gaps(np.array([-0.125]), np.array([[0.125], [-0.375]]), num_questions=2)
            >>> bounds.value, bounds.least.tolist(), bounds.most.tolist()  # half a standard error: it is not
            (0.125, [-0.25, 0.25], [0.25, 0.25])
        """
        deviation = resampled - gaps
        drawn = deviation[~np.isnan(deviation).any(axis=1)]
        spread = drawn.std(axis=0) if len(drawn) else np.zeros_like(gaps)
        is_clear = np.abs(gaps) > np.sqrt(2.0 * np.log(num_questions)) * spread
        signed = np.sign(gaps) * deviation
        most = np.where(is_clear, signed, np.abs(deviation))
        return cls(float(np.abs(gaps).sum()), signed.sum(axis=1), most.sum(axis=1))

    @classmethod
    def from_sums(cls, gaps: Floats, sizes: Floats, weights: Floats) -> ErrorBounds:
        """Build the bounds from what each question adds to the gaps.

        Args:
            gaps: Sums of (correct - confidence) in each bin [Q, B].
            sizes: Responses [Q].
            weights: Of the questions in the mean and in R resamples [Q, 1 + R], ``question_means.resample_weights``.

        Example:
            >>> weights = np.array([[0.5, 1.0], [0.5, 0.0]])  # all questions, then a resample of the first alone
            >>> bounds = ErrorBounds.from_sums(np.array([[-1.0], [0.0]]), np.array([2.0, 2.0]), weights)
            >>> bounds.value, bounds.least.tolist()
            (0.25, [0.25])
        """
        totals = weights.T @ sizes
        means = (weights.T @ gaps) / np.where(totals > 0.0, totals, np.nan)[:, None]
        return cls.from_gaps(means[0], means[1:], num_questions=len(gaps))

    def minus(self, other: ErrorBounds) -> ErrorBounds:
        """Return this error minus another one of the same resamples."""
        return ErrorBounds(self.value - other.value, self.least - other.most, self.most - other.least)

    def over(self, other: ErrorBounds) -> ErrorBounds | None:
        """Return this error divided by another one of the same resamples, to first order; None where that is 0."""
        if other.value == 0.0:
            return None
        ratio = self.value / other.value
        least, most = self.least - ratio * other.most, self.most - ratio * other.least
        return ErrorBounds(ratio, least / other.value, most / other.value)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Return the ends of an interval that holds the true value with about the chance ``level``, or more.

        Resamples in which it is not defined are left out.
        """
        low = self.value - float(np.nanquantile(self.most, 0.5 + level / 2.0))
        return low, self.value - float(np.nanquantile(self.least, 0.5 - level / 2.0))


def debiased_calibration_error(
    confidence: Array, correct: Array, question_index: Array, *, num_bins: int = 10
) -> float | None:
    """Compute the expected calibration error less what chance adds to it, at least 0.

    ``max(0, 2 ECE - sum_b E|N(g_b, s_b^2)|)``: the bias is estimated by what chance adds to the gaps as measured, with
    s_b the standard error of g_b over questions. It removes most of the bias, not all where the true error is near 0.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        question_index: The question of each response [N], as integers or strings.
        num_bins: Bins of equal width.

    Raises:
        ValueError: If a value lies outside [0, 1], is None or NaN, or the lengths differ.

    Example:
        >>> debiased_calibration_error([0.5] * 4, [True] * 4, [0, 1, 2, 3])  # all gaps are alike: no chance in them
        0.5
        >>> debiased_calibration_error([0.5] * 32, [True] * 15 + [False] * 17, list(range(32)))  # ECE is 1 / 32
        0.0
    """
    from scipy.special import erf

    scores, labels = as_probabilities(confidence), as_labels(correct)
    questions, codes = question_codes(question_index)
    check_same_length(confidence=scores, correct=labels, question_index=codes)
    if not len(scores):
        return None
    slot = codes * num_bins + bin_index(scores, uniform_edges(num_bins))
    size = len(questions) * num_bins
    sums = np.bincount(slot, weights=labels - scores, minlength=size).reshape(-1, num_bins)
    counts = np.bincount(codes, minlength=len(questions))[:, None]
    gaps = sums.sum(axis=0) / len(scores)
    errors = np.sqrt(((sums - gaps * counts) ** 2).sum(axis=0)) / len(scores)
    spread = np.where(errors > 0.0, errors, 1.0)
    z = gaps / spread
    folded = spread * np.sqrt(2.0 / np.pi) * np.exp(-0.5 * z**2) + gaps * erf(z / np.sqrt(2.0))
    expected = np.where(errors > 0.0, folded, np.abs(gaps))
    return max(0.0, float((2.0 * np.abs(gaps) - expected).sum()))
