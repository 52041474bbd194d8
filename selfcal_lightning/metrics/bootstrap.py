"""Bootstrap intervals over questions: all responses to a question are resampled together.

A resample is a count for every question, so each metric is computed from sums per question (or, for AUROC, from one
sorted column) for many resamples at once. Intervals are percentiles of the resamples, except for the calibration error,
where percentiles miss a small true value: see :mod:`selfcal_lightning.metrics.calibration`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Self

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics import arrays
from selfcal_lightning.metrics.arrays import ECE, Array, Floats
from selfcal_lightning.metrics.calibration import ErrorBounds


@dataclass(frozen=True)
class ScoredResponses:
    """Responses with a confidence and a verdict, in any order.

    Attributes:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N]; unreadable responses count as wrong.
        question_index: The question of each response [N], as integers or strings.
    """

    confidence: Array
    correct: Array
    question_index: Array


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap interval; None where it is not defined.

    Attributes:
        num_undefined: Resamples where the metric is undefined (e.g. no wrong response); the interval leaves them out.
    """

    value: float | None
    low: float | None
    high: float | None
    num_undefined: int = 0

    @property
    def is_positive(self) -> bool | None:
        """Whether the whole interval lies above 0 (True) or below (False); None otherwise."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return None
        return self.low > 0.0

    @classmethod
    def from_resamples(cls, value: float, resampled: Floats, *, level: float = 0.95) -> Self:
        """Build the estimate from its value and the values of the resamples [R]; NaN means undefined."""
        _check_level(level)
        defined = resampled[~np.isnan(resampled)]
        ends = 0.5 - level / 2.0, 0.5 + level / 2.0
        low, high = np.quantile(defined, ends).tolist() if len(defined) else (None, None)
        return cls(None if np.isnan(value) else float(value), low, high, len(resampled) - len(defined))

    @classmethod
    def from_bounds(
        cls, bounds: ErrorBounds | None, *, least: float = -np.inf, most: float = np.inf, level: float = 0.95
    ) -> Self:
        """Build the estimate from bounds of a calibration error, with its interval clipped to the possible range."""
        _check_level(level)
        if bounds is None or np.isnan(bounds.value):
            return cls(None, None, None)
        undefined = int(np.isnan(bounds.least).sum())
        if undefined == len(bounds.least):
            return cls(bounds.value, None, None, undefined)
        low, high = bounds.interval(level)
        return cls(bounds.value, max(low, least), min(high, most), undefined)


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise InputError(f"Expected `level` to lie in (0, 1), but got {level}.")


@dataclass(frozen=True)
class MetricChange:
    """One metric on the same questions before and after, with intervals from the same resamples.

    Attributes:
        metric: Key, e.g. "calibration/ECE".
        change: After minus before.
        ratio: After divided by before; None if before is 0.
    """

    metric: str
    before: Estimate
    after: Estimate
    change: Estimate
    ratio: Estimate


BOOTSTRAP_METRICS = (ECE, arrays.BRIER, arrays.AUROC, arrays.WITHIN_QUESTION_AUROC, arrays.PASS_AT_1)

_ROWS_AT_ONCE = 64
# Upper limit on the counts held in memory at once, over all resamples.
_COUNTS_AT_ONCE = 1 << 22


def resample_counts(num_questions: int, *, num_resamples: int = 1000, seed: int = 0) -> Iterator[Floats]:
    """Draw questions with replacement; yield, a few resamples at a time, how often each question was drawn [r, Q].

    The draw depends only on the number of questions and the seed, so two sets of responses to the same questions, in
    the same order, get the same resamples.
    """
    arrays.check_positive(num_questions, "num_questions")
    arrays.check_positive(num_resamples, "num_resamples")
    generator = np.random.default_rng(seed)
    for start in range(0, num_resamples, _ROWS_AT_ONCE):
        block = np.empty((min(_ROWS_AT_ONCE, num_resamples - start), num_questions))
        for row in block:
            row[:] = np.bincount(generator.integers(num_questions, size=num_questions), minlength=num_questions)
        yield block


def question_bootstrap(
    confidence: Array,
    correct: Array,
    question_index: Array,
    *,
    metrics: Sequence[str] = BOOTSTRAP_METRICS,
    num_resamples: int = 1000,
    seed: int = 0,
    num_bins: int = 10,
) -> dict[str, Floats]:
    """Return the values of metrics on resamples of the questions [R] by key; NaN where undefined.

    Arguments are those of :func:`bootstrap_interval`. Equal seeds and equal numbers of questions give the same
    resamples of the sorted questions.
    """
    columns = _PerQuestion(confidence, correct, question_index, metrics=metrics, num_bins=num_bins)
    resampled = columns.resampled(num_resamples=num_resamples, seed=seed)
    return {name: (np.abs(rows).sum(axis=1) if name == ECE else rows)[1:] for name, rows in resampled.items()}


def bootstrap_interval(
    confidence: Array,
    correct: Array,
    question_index: Array,
    *,
    metrics: Sequence[str] = BOOTSTRAP_METRICS,
    num_resamples: int = 1000,
    seed: int = 0,
    num_bins: int = 10,
    level: float = 0.95,
) -> dict[str, Estimate]:
    """Compute metrics with intervals over resampled questions.

    Args:
        confidence: Confidences [N] in [0, 1]; any scores [N] if neither ECE nor Brier is requested.
        correct: Labels [N]; unreadable responses count as wrong.
        question_index: The question of each response [N], as integers or strings.
        metrics: Keys from ``BOOTSTRAP_METRICS``.
        num_resamples: R.
        seed: Seeds the draw.
        num_bins: Equal-width bins of the calibration error.
        level: Share of the resamples inside the interval.

    Example:
        >>> estimates = bootstrap_interval([0.9, 0.8, 0.3, 0.4], [1, 1, 0, 1], ["a", "a", "b", "b"])
        >>> estimates["accuracy/PassAt1"]
        Estimate(value=0.75, low=0.5, high=1.0, num_undefined=0)

    Reference:
        Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    columns = _PerQuestion(confidence, correct, question_index, metrics=metrics, num_bins=num_bins)
    return {
        metric: Estimate.from_bounds(columns.error_bounds(rows), least=0.0, most=1.0, level=level)
        if metric == ECE
        else estimate_of(rows, level=level)
        for metric, rows in columns.resampled(num_resamples=num_resamples, seed=seed).items()
    }


def calibration_error_bounds(
    confidence: Array,
    correct: Array,
    question_index: Array,
    *,
    num_resamples: int = 1000,
    seed: int = 0,
    num_bins: int = 10,
) -> ErrorBounds:
    """Compute the calibration error and its bounds over resampled questions, as :func:`bootstrap_interval` does."""
    columns = _PerQuestion(confidence, correct, question_index, metrics=[ECE], num_bins=num_bins)
    return columns.error_bounds(columns.resampled(num_resamples=num_resamples, seed=seed)[ECE])


def paired_bootstrap(
    before: ScoredResponses,
    after: ScoredResponses,
    *,
    metrics: Sequence[str] = BOOTSTRAP_METRICS,
    num_resamples: int = 1000,
    seed: int = 0,
    num_bins: int = 10,
    level: float = 0.95,
) -> dict[str, MetricChange]:
    """Compare two sets of responses to the same questions; every resample draws the same questions from both.

    A question may have more responses in one set than in the other. Options are those of :func:`bootstrap_interval`.
    """
    first, second = (
        _PerQuestion(part.confidence, part.correct, part.question_index, metrics=metrics, num_bins=num_bins)
        for part in (before, after)
    )
    if not np.array_equal(first.questions, second.questions):
        lone = np.setxor1d(first.questions, second.questions)
        found = f"{len(lone)} that only one of them has, such as {lone[:3].tolist()}"
        raise InputError(f"Expected `before` and `after` to hold the same questions, but got {found}.")
    draws = [part.resampled(num_resamples=num_resamples, seed=seed) for part in (first, second)]
    changes = {}
    for metric in metrics:
        old, new = (drawn[metric] for drawn in draws)
        if metric == ECE:
            changes[metric] = error_change(first.error_bounds(old), second.error_bounds(new), level=level)
        else:
            ratio = np.divide(new, old, out=np.full_like(new, np.nan), where=old != 0.0)
            changes[metric] = MetricChange(metric, *(estimate_of(c, level=level) for c in (old, new, new - old, ratio)))
    return changes


def error_change(before: ErrorBounds, after: ErrorBounds, *, level: float = 0.95) -> MetricChange:
    """Return the change of a calibration error, from its bounds before and after on the same resamples."""
    return MetricChange(
        ECE,
        before=Estimate.from_bounds(before, least=0.0, most=1.0, level=level),
        after=Estimate.from_bounds(after, least=0.0, most=1.0, level=level),
        change=Estimate.from_bounds(after.minus(before), least=-1.0, most=1.0, level=level),
        ratio=Estimate.from_bounds(after.over(before), least=0.0, level=level),
    )


class _PerQuestion:
    """Per-question sums, so that a metric on a resample is a product with the question counts."""

    def __init__(
        self, confidence: Array, correct: Array, question_index: Array, *, metrics: Sequence[str], num_bins: int
    ) -> None:
        unknown = [metric for metric in metrics if metric not in BOOTSTRAP_METRICS]
        if unknown:
            raise InputError(f"Expected `metrics` to be among {BOOTSTRAP_METRICS}, but got {unknown}.")
        needs_probability = ECE in metrics or arrays.BRIER in metrics
        scores = arrays.as_probabilities(confidence) if needs_probability else arrays.as_scores(confidence)
        labels = arrays.as_labels(correct)
        self.questions, codes = arrays.question_codes(question_index)
        arrays.check_same_length(confidence=scores, correct=labels, question_index=codes)
        if not len(scores):
            raise InputError("Expected `confidence` to hold at least one response, but got none.")
        self.metrics = tuple(metrics)
        sums = partial(np.bincount, codes, minlength=len(self.questions))
        self.size = sums()
        if needs_probability:
            # Per question and bin, the sum of (correct - confidence) [Q, B]: all that ECE needs.
            slot = codes * num_bins + arrays.bin_index(scores, arrays.uniform_edges(num_bins))
            gaps = np.bincount(slot, weights=labels - scores, minlength=len(self.questions) * num_bins)
            self.bin_gap = gaps.reshape(-1, num_bins)
            self.squared_error = sums(weights=(scores - labels) ** 2)
        self.accuracy = sums(weights=labels) / self.size
        concordant, pairs = arrays.concordant_pairs(scores, labels, codes, len(self.questions))
        self.is_mixed = (pairs > 0).astype(np.float64)
        self.within = np.divide(concordant, pairs, out=np.zeros_like(pairs), where=pairs > 0)
        # AUROC: how many wrong responses each right one outranks, both sorted by confidence.
        order = np.argsort(scores, kind="stable")
        codes, scores, labels = codes[order], scores[order], labels[order]
        self.wrong_question, wrong = codes[~labels], scores[~labels]
        self.right_question, right = codes[labels], scores[labels]
        self.num_below = np.searchsorted(wrong, right, side="left")
        self.num_not_above = np.searchsorted(wrong, right, side="right")

    def resampled(self, *, num_resamples: int, seed: int) -> dict[str, Floats]:
        """Return each metric on all questions and on R resamples [1 + R]; of the ECE, its gaps by bin [1 + R, B].

        A gap is the mean over all responses of (correct - confidence) in the bin. R is 0 if there is only one question.
        """
        functions: dict[str, Callable[[Floats], Floats]] = {
            ECE: lambda counts: (counts @ self.bin_gap) / (counts @ self.size)[:, None],
            arrays.BRIER: lambda counts: (counts @ self.squared_error) / (counts @ self.size),
            arrays.AUROC: self._auroc,
            arrays.WITHIN_QUESTION_AUROC: self._within_question,
            arrays.PASS_AT_1: lambda counts: (counts @ self.accuracy) / counts.sum(axis=1),
        }
        num_questions = len(self.questions)
        number = num_resamples if num_questions > 1 else 0
        draws = resample_counts(num_questions, num_resamples=number, seed=seed) if number else ()
        blocks = [
            [functions[metric](counts) for metric in self.metrics]
            for counts in chain([np.ones((1, num_questions))], draws)
        ]
        return dict(zip(self.metrics, map(np.concatenate, zip(*blocks, strict=True)), strict=True))

    def error_bounds(self, gaps: Floats) -> ErrorBounds:
        return ErrorBounds.from_gaps(gaps, num_questions=len(self.questions))

    def _within_question(self, counts: Floats) -> Floats:
        mixed = counts @ self.is_mixed
        return np.divide(counts @ self.within, mixed, out=np.full_like(mixed, np.nan), where=mixed > 0)

    def _auroc(self, counts: Floats) -> Floats:
        # Sums of whole numbers are exact, so the order of the responses and the chunk size do not matter.
        at_once = max(1, _COUNTS_AT_ONCE // max(len(self.right_question) + len(self.wrong_question), 1))
        found = []
        for some in (counts[start : start + at_once] for start in range(0, len(counts), at_once)):
            wrong = np.zeros((len(some), len(self.wrong_question) + 1))
            np.cumsum(some[:, self.wrong_question], axis=1, out=wrong[:, 1:])
            right = some[:, self.right_question]
            concordant = 0.5 * np.einsum("rn,rn->r", right, wrong[:, self.num_below] + wrong[:, self.num_not_above])
            pairs = right.sum(axis=1) * wrong[:, -1]
            found.append(np.divide(concordant, pairs, out=np.full_like(pairs, np.nan), where=pairs > 0))
        return np.concatenate(found)


def resample_weights(num_questions: int, *, num_resamples: int = 1000, seed: int = 0) -> Floats:
    """Return the weight of each question in the plain mean and in the means of resamples [Q, 1 + R].

    ``values [P, Q] @ weights`` are then the means of P columns on the same resamples. R is 0 if there is only one
    question.
    """
    count = 0 if num_questions < 2 else max(num_resamples, 0)
    weights = np.empty((num_questions, 1 + count), order="F")
    weights[:, 0] = 1.0 / num_questions
    filled = 1
    for counts in resample_counts(num_questions, num_resamples=count, seed=seed) if count else ():
        np.divide(counts.T, num_questions, out=weights[:, filled : filled + len(counts)])
        filled += len(counts)
    return weights


def estimate_of(column: Floats, *, level: float = 0.95) -> Estimate:
    """Return the estimate of a column [1 + R] whose first entry is the value; no interval without resamples."""
    return Estimate.from_resamples(float(column[0]), column[1:], level=level)


def estimate_or_never(column: Floats, *, never: float) -> Estimate:
    """Return the estimate of a column [1 + R] in which NaN means that the target is never reached.

    Resamples that never reach it count as the worst, so an end of the interval that falls among them is None.
    """
    value, resamples = column[0], column[1:]
    undefined = int(np.isnan(resamples).sum())
    if np.isnan(value) or not len(resamples):
        return Estimate(None if np.isnan(value) else float(value), None, None, undefined)
    filled = np.where(np.isnan(resamples), never, resamples)
    # Each end is one of the resamples: interpolating between a number and infinity is impossible.
    ends = np.quantile(filled, 0.025, method="lower"), np.quantile(filled, 0.975, method="higher")
    low, high = (float(end) if np.isfinite(end) else None for end in ends)
    return Estimate(float(value), low, high, undefined)
