"""What the report on a real language model computes from stored samples: confidences, votes, and equal accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from selfcal_lightning.confidence.base import MEAN_LOGPROB, add_scores, confidence_of
from selfcal_lightning.confidence.fusion import fit_fusion
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.inference.threshold_fitting import grid_outcome
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import (
    Estimate,
    bootstrap_interval,
    calibration_error_bounds,
    question_bootstrap,
    resample_weights,
)
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.records import QuestionSamples, Sample

Pool = list[QuestionSamples]
METRICS = (AUROC, ECE, BRIER, WITHIN_QUESTION_AUROC, PASS_AT_1)
LIKELIHOOD, SCALED, SHARE = "likelihood", "likelihood_platt", "share_of_4"
GROUP = 4
RESAMPLES = 1000


@dataclass(frozen=True)
class Columns:
    """A confidence on the test responses: each metric's value and resamples [1 + R], mean over seeds, and by seed."""

    metrics: Mapping[str, Floats]
    error: ErrorBounds
    by_seed: Mapping[str, tuple[float, ...]]

    def estimate(self, metric: str) -> Estimate:
        """Return the value of a metric with its interval over questions."""
        if metric == ECE:
            return Estimate.from_bounds(self.error, least=0.0, most=1.0)
        column = self.metrics[metric]
        return Estimate.from_resamples(float(column[0]), column[1:])

    def above(self, other: Columns, metric: str) -> Estimate:
        """Return by how much a metric is above that of another confidence, on the same resamples."""
        difference = self.metrics[metric] - other.metrics[metric]
        return Estimate.from_resamples(float(difference[0]), difference[1:])


def columns_of(pool: Pool, names: Sequence[str]) -> Columns:
    """Return the metrics of one confidence, or the mean of those of several seeds."""
    return columns_over([(pool, name) for name in names])


def columns_over(seeds: Sequence[tuple[Pool, str]]) -> Columns:
    """Return the mean of the metrics of a confidence over seeds, each on responses of its own to the same questions."""
    rows: list[dict[str, Floats]] = []
    errors: list[ErrorBounds] = []
    for pool, name in seeds:
        scored = scored_responses(pool, name=name)
        given = scored.confidence, scored.correct, scored.question_index
        value = bootstrap_interval(*given, metrics=list(METRICS), num_resamples=1)
        resampled = question_bootstrap(*given, metrics=list(METRICS), num_resamples=RESAMPLES)
        rows.append({name: np.array([_number(value[name].value), *resampled[name]]) for name in METRICS})
        errors.append(calibration_error_bounds(*given, num_resamples=RESAMPLES))
    mean = {metric: np.mean([row[metric] for row in rows], axis=0) for metric in METRICS}
    error = ErrorBounds(
        float(np.mean([one.value for one in errors])),
        np.mean([one.least for one in errors], axis=0),
        np.mean([one.most for one in errors], axis=0),
    )
    by_seed = {metric: tuple(float(row[metric][0]) for row in rows) for metric in METRICS}
    by_seed[ECE] = tuple(one.value for one in errors)
    return Columns(mean, error, by_seed)


def with_plain_confidences(pool: Pool) -> Pool:
    """Put on each response its likelihood a token, and the share of its answer among four samples, its own included.

    The samples of a question are taken four by four, in their order; a response without a readable answer agrees with
    nothing, and has a share of 0.
    """
    return [replace(entry, samples=tuple(_plain(entry.samples))) for entry in pool]


def with_fitted(pool: Pool, calibration: Pool, fusions: Mapping[str, Sequence[str]]) -> Pool:
    """Put on each response the likelihood scaled by Platt, and fusions, all fitted to the labels of ``calibration``."""
    scorers = [fit_scaler(calibration, "platt", source=LIKELIHOOD, name=SCALED)]
    scorers += [fit_fusion(calibration, _features(parts), name=name) for name, parts in fusions.items()]
    return [replace(entry, samples=tuple(add_scores(one, scorers) for one in entry.samples)) for entry in pool]


def vote_columns(pool: Pool, names: Sequence[str | None], budgets: Sequence[int]) -> Floats:
    """Return the accuracy of votes at each budget with its resamples [K, 1 + R], over random orders of the samples."""
    hits = np.mean([grid_outcome(SelfConsistency(confidence=name), pool, budgets).correct for name in names], axis=0)
    return hits @ resample_weights(len(pool), num_resamples=RESAMPLES)


def mean_tokens(pool: Pool) -> float:
    """Return the mean length of a response."""
    return float(np.mean([sample.num_tokens or 0 for entry in pool for sample in entry.samples]))


def samples_to_reach(curve: Floats, accuracy: float) -> float:
    """Return how many samples a curve over 1, 2, 3 ... samples takes to an accuracy, between samples by a line.

    Example:
        >>> samples_to_reach(np.array([0.2, 0.4, 0.5]), 0.45)
        2.5
        >>> samples_to_reach(np.array([0.2, 0.4]), 0.5)
        inf
    """
    reached = np.flatnonzero(curve >= accuracy)
    if not len(reached):
        return math.inf
    place = int(reached[0])
    if place == 0:
        return 1.0
    low, high = float(curve[place - 1]), float(curve[place])
    return place + (accuracy - low) / (high - low)


def _plain(samples: Sequence[Sample]) -> list[Sample]:
    found = []
    for start in range(0, len(samples), GROUP):
        group = samples[start : start + GROUP]
        for sample in group:
            same = sum(sample.answer is not None and other.answer == sample.answer for other in group)
            mean = confidence_of(sample, MEAN_LOGPROB)
            further = {SHARE: same / len(group), **({} if mean is None else {LIKELIHOOD: min(1.0, math.exp(mean))})}
            found.append(replace(sample, confidences={**sample.confidences, **further}))
    return found


def _features(parts: Sequence[str]) -> list[str]:
    """Return confidences as features: probabilities by their log-odds."""
    return [part if part == MEAN_LOGPROB else f"logit:{part}" for part in parts]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
