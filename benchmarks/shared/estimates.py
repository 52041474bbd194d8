"""Intervals over questions and seeds: every resample draws questions, the same ones for all seeds, and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from selfcal_lightning.evaluation.metrics import SHORT_NAMES
from selfcal_lightning.metrics import bootstrap
from selfcal_lightning.metrics.arrays import ECE, Array, Floats
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.records import QuestionSamples

RESAMPLES = 1000
Column = Floats | ErrorBounds


@dataclass(frozen=True)
class Measured:
    """A confidence on the responses of one seed, and on resamples of their questions."""

    values: dict[str, Floats]
    errors: ErrorBounds

    @classmethod
    def of(cls, scored: bootstrap.ScoredResponses) -> Self:
        columns = (scored.confidence, scored.correct, scored.question_index)
        rows = metric_columns(columns, list(SHORT_NAMES), num_resamples=RESAMPLES)
        return cls(rows, bootstrap.calibration_error_bounds(*columns, num_resamples=RESAMPLES))


def seed_weights(num_seeds: int, *, num_resamples: int = 1000) -> Floats:
    """Return the weight of each seed in the mean, then in R draws of as many seeds with replacement [1 + R, S]."""
    draws = np.random.default_rng(0).multinomial(num_seeds, np.full(num_seeds, 1.0 / num_seeds), size=num_resamples)
    return np.vstack([np.ones(num_seeds), draws]) / num_seeds


def mean_over_seeds(columns: Floats) -> Floats:
    """Return the mean over seeds of columns [S, ..., 1 + R], each resample with its own draw of the seeds [..., 1 + R].

    The first entry of a column is its value, the others are its resamples, which draw the same questions for all seeds.
    """
    weights = seed_weights(len(columns), num_resamples=columns.shape[-1] - 1)
    return np.einsum("s...r,rs->...r", columns, weights)


def errors_over_seeds(rows: Sequence[ErrorBounds]) -> ErrorBounds:
    """Return the mean of the seeds' calibration errors; which seeds were drawn adds to its deviation."""
    weights = seed_weights(len(rows), num_resamples=len(rows[0].least))[1:]
    values = np.array([row.value for row in rows])
    shift = weights @ values - values.mean()
    least, most = (np.einsum("sr,rs->r", np.array(ends), weights) for ends in zip(*map(_ends, rows), strict=True))
    return ErrorBounds(float(values.mean()), least + shift, most + shift)


def column_over_seeds(columns: Sequence[Column]) -> Column:
    """Return the mean over seeds of columns [..., 1 + R], or of calibration errors by their bounds."""
    errors = [column for column in columns if isinstance(column, ErrorBounds)]
    return errors_over_seeds(errors) if errors else mean_over_seeds(np.array(columns))


def estimated(column: Column) -> bootstrap.Estimate:
    if isinstance(column, ErrorBounds):
        return bootstrap.Estimate.from_bounds(column, least=0.0, most=1.0)
    return bootstrap.estimate_of(column)


def summary(rows: Sequence[Measured]) -> dict[str, bootstrap.Estimate]:
    found = {short: bootstrap.estimate_of(_column(rows, metric)) for metric, short in SHORT_NAMES.items()}
    found[SHORT_NAMES[ECE]] = estimated(errors_over_seeds([row.errors for row in rows]))
    return found


def difference(rows: Sequence[Measured], others: Sequence[Measured], metric: str) -> bootstrap.Estimate:
    if metric == ECE:
        return error_difference([row.errors for row in rows], [row.errors for row in others])
    return bootstrap.estimate_of(_column(rows, metric) - _column(others, metric))


def error_difference(rows: Sequence[ErrorBounds], others: Sequence[ErrorBounds]) -> bootstrap.Estimate:
    change = errors_over_seeds([a.minus(b) for a, b in zip(rows, others, strict=True)])
    return bootstrap.Estimate.from_bounds(change, least=-1.0, most=1.0)


def metric_columns(
    columns: tuple[Array, Array, Array], metrics: Sequence[str], *, num_resamples: int
) -> dict[str, Floats]:
    whole = bootstrap.bootstrap_interval(*columns, metrics=metrics, num_resamples=1)
    resampled = bootstrap.question_bootstrap(*columns, metrics=metrics, num_resamples=num_resamples)
    values = {key: whole[key].value for key in metrics}
    return {key: np.append(np.nan if values[key] is None else values[key], resampled[key]) for key in metrics}


def mean_bounds(rows: Sequence[ErrorBounds]) -> ErrorBounds:
    """Return the mean over seeds of calibration errors on the same resamples of the questions, seeds not drawn."""
    least, most = (np.mean(ends, axis=0) for ends in zip(*map(_ends, rows), strict=True))
    return ErrorBounds(float(np.mean([row.value for row in rows])), least, most)


def _column(rows: Sequence[Measured], metric: str) -> Floats:
    return mean_over_seeds(np.array([row.values[metric] for row in rows]))


def _ends(row: ErrorBounds) -> tuple[Floats, Floats]:
    return row.least, row.most


def samples_needed(curve: Floats, wanted: Floats) -> Floats:
    """Return the samples at which a curve [K, 1 + R] first reaches an accuracy [1 + R]; NaN where it never does.

    Between two numbers of samples the accuracy is taken as a straight line, and more samples as no worse.
    """
    best = np.maximum.accumulate(curve, axis=0)
    reached = best >= wanted
    first = reached.argmax(axis=0)
    columns = np.arange(curve.shape[1])
    above, below = best[first, columns], best[np.maximum(first - 1, 0), columns]
    step = np.divide(wanted - below, above - below, out=np.zeros_like(wanted), where=above > below)
    needed = np.where(first == 0, 1.0, first + step)
    return np.where(reached.any(axis=0), needed, np.nan)


def with_question_confidence(
    entries: Sequence[QuestionSamples], values: Floats | Sequence[float], *, name: str
) -> tuple[QuestionSamples, ...]:
    """Give every response the value of its question as a confidence."""
    found = []
    for entry, value in zip(entries, values, strict=True):
        scored = (replace(one, confidences={**one.confidences, name: float(value)}) for one in entry.samples)
        found.append(replace(entry, samples=tuple(scored)))
    return tuple(found)
