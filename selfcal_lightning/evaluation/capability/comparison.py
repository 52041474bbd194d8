"""How far estimates of capability are from what the responses show, with paired intervals over questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.functional.base import Floats, bin_index, uniform_edges
from selfcal_lightning.functional.calibration_bias import ErrorBounds
from selfcal_lightning.functional.capability_errors import error_parts, random_brier, squared_errors
from selfcal_lightning.functional.capability_maps import isotonic_knots
from selfcal_lightning.functional.discrimination import spearman
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.functional.question_means import estimate_of, resample_weights

MAPPED = "isotonic"


@dataclass(frozen=True)
class EstimatorRow:
    """An estimate of capability and how good it is.

    Attributes:
        name: What it is; one mapped on calibration questions says so.
        samples: Responses that it takes of a question.
        needs_labels: Whether it looks at verdicts on the question itself, or was mapped on such of others.
        mse: Squared error, without the noise of the responses; None for a score that is no probability.
        difference: Its squared error less that of the first row, on the same resamples; None for the first.
        skill: Share of the variance of capability that it explains.
        spearman: Rank correlation with the share of right responses.
        ece: Calibration error against that share.
    """

    name: str
    samples: int
    needs_labels: bool
    mse: Estimate | None
    difference: Estimate | None
    skill: Estimate | None
    spearman: Estimate
    ece: Estimate | None


@dataclass(frozen=True)
class CapabilityComparison:
    """Estimates on the same questions.

    Attributes:
        rows: One an estimate.
        num_questions: Questions.
        num_samples: Fewest responses that a question is judged by.
        mean: Mean share of right responses.
        constant: Squared error of the best constant: the variance of capability.
        random: Squared error of a number drawn at random.
        single: Squared error of the verdict on one response, taken as the capability.
    """

    rows: tuple[EstimatorRow, ...]
    num_questions: int
    num_samples: int
    mean: float
    constant: float
    random: float
    single: float


def compare_estimators(
    test: TestQuestions, calibration: TestQuestions | None = None, *, num_resamples: int = 1000, seed: int = 0
) -> CapabilityComparison:
    """Judge estimates, and the same ones mapped by isotonic regression on calibration questions.

    Args:
        test: Questions with estimates; at least 2 responses each to judge by.
        calibration: Other questions, to map every estimate on; None maps none.
        num_resamples: Resamples of the questions.
        seed: Of the resamples.
    """
    truth = test.truth
    weights = resample_weights(len(truth), num_resamples=num_resamples, seed=seed)
    shares = truth.expected_accuracy
    spread = capability_spread(truth.num_correct, truth.num_samples, weights)
    rows: list[EstimatorRow] = []
    errors: list[Floats] = []
    for name, values, needs_labels in candidates(test, calibration):
        is_chance = bool(((values >= 0.0) & (values <= 1.0)).all())
        mse = squared_errors(values, truth.num_correct, truth.num_samples) @ weights if is_chance else None
        if mse is not None:
            errors.append(mse)
        rows.append(
            EstimatorRow(
                name=name,
                samples=test.costs[name.partition(" + ")[0]],
                needs_labels=needs_labels,
                mse=None if mse is None else estimate_of(mse),
                difference=None if mse is None or len(errors) < 2 else estimate_of(mse - errors[0]),
                skill=None if mse is None else estimate_of(1.0 - mse / spread),
                spearman=estimate_of(resampled_column(spearman, values, shares, weights)),
                ece=Estimate.from_bounds(share_error_bounds(values, shares, weights), least=0.0, most=1.0)
                if is_chance
                else None,
            )
        )
    parts = error_parts(np.zeros(len(truth)), truth.num_correct, truth.num_samples)
    return CapabilityComparison(
        rows=tuple(rows),
        num_questions=len(truth),
        num_samples=int(truth.num_samples.min()),
        mean=float(shares.mean()),
        constant=float(spread[0]),
        random=float(random_brier(shares) or 0.0),
        single=0.0 if parts is None else parts.spread,
    )


def mapped(scores: Floats, calibration: TestQuestions, name: str) -> Floats:
    """Return scores mapped by isotonic regression to the share of right responses on calibration questions [Q]."""
    x, y = isotonic_knots(calibration.estimates[name], calibration.truth.expected_accuracy)
    return np.interp(scores, x, y)


def candidates(test: TestQuestions, calibration: TestQuestions | None) -> list[tuple[str, Floats, bool]]:
    """Return every estimate and, with calibration questions, each mapped: (name, values [Q], whether it saw labels)."""
    found = [(name, values, name in test.needs_labels) for name, values in test.estimates.items()]
    if calibration is not None:
        found += [
            (f"{name} + {MAPPED}", mapped(values, calibration, name), True) for name, values in test.estimates.items()
        ]
    return found


def capability_spread(correct: Floats, samples: np.ndarray, weights: Floats) -> Floats:
    """Return the variance of capability in the sample and in each resample [1 + R], without the responses' noise.

    Args:
        correct: Right responses of each question [Q].
        samples: Responses of each [Q].
        weights: Those of the questions [Q, 1 + R]. NaN where capabilities do not differ beyond the noise.
    """
    shares = correct / samples
    noise = shares * (1.0 - shares) / np.maximum(samples - 1, 1)
    variance = (shares**2) @ weights - (shares @ weights) ** 2 - noise @ weights
    return np.where(variance > 1e-12, variance, np.nan)


def resampled_column(
    measure: Callable[[Floats, Floats], float | None], values: Floats, shares: Floats, weights: Floats
) -> Floats:
    """Return a measure on the questions, then on their resamples [1 + R]; NaN where it is not defined.

    Args:
        measure: Of values and shares.
        values: Estimates [Q].
        shares: Shares of right responses [Q].
        weights: Those of the questions [Q, 1 + R] (``question_means.resample_weights``).
    """
    found = [measure(values, shares)]
    for counts in np.rint(weights.T[1:] * len(values)).astype(np.int64):
        found.append(measure(np.repeat(values, counts), np.repeat(shares, counts)))
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


def share_error_bounds(values: Floats, shares: Floats, weights: Floats, *, num_bins: int = 10) -> ErrorBounds:
    """Return the calibration error of estimates against shares of right responses, with bounds of what chance adds.

    Args:
        values: Estimates [Q], in [0, 1].
        shares: Shares of right responses [Q].
        weights: Those of the questions [Q, 1 + R] (``question_means.resample_weights``).
        num_bins: Bins of equal width.

    Example:
        >>> share_error_bounds(np.array([0.5, 0.5]), np.array([0.75, 0.5]), np.full((2, 1), 0.5)).value
        0.125
    """
    bins = np.eye(num_bins)[bin_index(values, uniform_edges(num_bins))]
    return ErrorBounds.from_sums(bins * (shares - values)[:, None], np.ones(len(values)), weights)
