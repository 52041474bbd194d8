"""Thresholds chosen on a calibration split: for a budget, an accuracy, or a guaranteed error rate with abstention.

:func:`fit_budget_threshold` and :func:`fit_accuracy_threshold` choose when a strategy stops, without a guarantee for
other questions. :func:`fit_risk_threshold` decides which verdicts to withhold, with a guarantee. All three test exactly
the procedure that will be used, so every calibration question needs as many responses as the strategy may draw. They
refuse questions that a scaler or fusion was fitted on, and record their own, so that nothing is reported on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.fusion import FittedScorer, scorer_digests
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import (
    CalibrationPool,
    FittedThreshold,
    TargetKind,
    calibration_pool,
    check_guide,
    fields_of,
    ready_entries,
)
from selfcal_lightning.inference.vectorised import (
    NUM_RESHUFFLES,
    SEED,
    GridStrategy,
    Orders,
    PoolArrays,
    curve_of,
    right_codes,
    with_setting,
)
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.curves import best_setting_within, cheapest_setting_reaching
from selfcal_lightning.metrics.risk import Certificate, Procedure, certify_threshold, guided_grid
from selfcal_lightning.records import QuestionSamples

# Steps of a hundredth, and finer ones at the top, where a confident model has most of its values.
THRESHOLDS = tuple(round(step / 100, 2) for step in range(100)) + tuple(round(0.99 + s / 1000, 3) for s in range(1, 11))
NUM_QUANTILES = 50
# Whole numbers in the smallest type that holds them, or floats.
Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class GridOutcome:
    """A strategy at G settings on Q questions: integer sums over the orders of the samples.

    Attributes:
        grid: The G settings.
        sum_correct: Number of orders in which the verdict is right [G, Q]; an unreadable answer is wrong.
        sum_samples: Samples used [G, Q].
        sum_tokens: Tokens of these samples [G, Q]; None if lengths are unknown or were not requested.
        num_orders: Number of orders summed.
    """

    grid: tuple[float, ...]
    sum_correct: Numbers = field(repr=False)
    sum_samples: Numbers = field(repr=False)
    sum_tokens: Numbers | None = field(default=None, repr=False)
    num_orders: int = 1

    @property
    def num_questions(self) -> int:
        """Q."""
        return self.sum_correct.shape[1]

    @property
    def correct(self) -> Floats:
        """Share of orders in which the verdict is right [G, Q]."""
        return self.sum_correct / self.num_orders

    @property
    def samples(self) -> Floats:
        """Mean number of samples used over the orders [G, Q]."""
        return self.sum_samples / self.num_orders

    @property
    def tokens(self) -> Floats | None:
        """Mean number of tokens of these samples over the orders [G, Q], or None."""
        return None if self.sum_tokens is None else self.sum_tokens / self.num_orders

    @cached_property
    def accuracy(self) -> Floats:
        """Accuracy at each setting [G]."""
        return self.correct.mean(axis=1)

    @cached_property
    def mean_samples(self) -> Floats:
        """Mean number of samples at each setting [G]."""
        return self.samples.mean(axis=1)

    @cached_property
    def mean_tokens(self) -> Floats | None:
        """Mean number of tokens at each setting [G], or None."""
        tokens = self.tokens
        return None if tokens is None else tokens.mean(axis=1)


class GridSums:
    """Sums a strategy's outcomes over the orders of a pool."""

    def __init__(
        self,
        strategy: GridStrategy,
        grid: Sequence[float],
        num_questions: int,
        *,
        num_orders: int,
        width: int,
        most_tokens: float | None = None,
    ) -> None:
        shape = len(grid), num_questions
        self._strategy, self._grid, self._num_orders = strategy, tuple(grid), num_orders
        self._correct = np.zeros(shape, dtype=np.min_scalar_type(num_orders))
        self._samples = np.zeros(shape, dtype=np.min_scalar_type(num_orders * width))
        self._tokens: Numbers | None = None
        if most_tokens is not None:
            self._tokens = np.zeros(shape, dtype=np.min_scalar_type(num_orders * max(int(most_tokens), 1)))

    def add(
        self, pool: PoolArrays, right: NDArray[np.bool_], spent: Floats | None, questions: slice = slice(None)
    ) -> None:
        """Run the strategy on r orders of q questions, stacked."""
        outcome = curve_of(self._strategy, pool, self._grid)
        rows = np.arange(outcome.answer.shape[1])
        _add(self._correct[:, questions], right[rows, outcome.answer])
        _add(self._samples[:, questions], outcome.used)
        if self._tokens is not None and spent is not None:
            _add(self._tokens[:, questions], spent[rows, outcome.used])

    def outcome(self) -> GridOutcome:
        """Return the sums, once all orders were added."""
        return GridOutcome(self._grid, self._correct, self._samples, self._tokens, self._num_orders)


def _add(sums: Numbers, values: np.ndarray) -> None:
    """Add values [G, r * q] of r orders to sums [G, q], in place."""
    num_settings, num_questions = sums.shape
    sums += values.reshape(num_settings, -1, num_questions).sum(axis=1, dtype=np.float64).astype(sums.dtype)


def grid_outcome(
    strategy: GridStrategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float],
    *,
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> GridOutcome:
    """Return the cost and accuracy of ``strategy`` at every value of ``grid``."""
    if not len(grid):
        raise InputError("Expected `grid` to hold at least one value, but got none.")
    arrays = PoolArrays.from_samples(pool, confidence=strategy.confidence)
    width, fewest = max(with_setting(strategy, value).max_samples for value in grid), int(arrays.length.min())
    if width > fewest:
        raise InputError(
            f"Expected `grid` to ask for at most the {fewest} samples that every question has, but got {width}. Leave "
            "larger values out, or sample more."
        )
    orders = Orders(arrays.length, width, num_reshuffles, seed)
    sums = GridSums(strategy, grid, len(arrays.length), num_orders=orders.num_orders, width=width)
    for block in orders.blocks():
        ordered = arrays.in_orders(block.position, block.questions)
        sums.add(ordered, right_codes(ordered.answer, ordered.correct), None, block.questions)
    return sums.outcome()


def grid_of(
    strategy: GridStrategy, *, thresholds: Sequence[float] = THRESHOLDS, values: Sequence[float] = ()
) -> tuple[float, ...]:
    """Return the settings of a strategy worth trying, in ascending order.

    Example:
        >>> grid_of(EarlyStopping(), thresholds=(0.5, 0.9), values=(0.71,))
        (0.5, 0.71, 0.9)
    """
    if strategy.grid_parameter == "threshold":
        more = values if isinstance(strategy, EarlyStopping) else ()
        return tuple(sorted({*thresholds, *more}))
    least = min(2, strategy.max_samples) if strategy.grid_parameter == "window" else 1
    return tuple(range(least, strategy.max_samples + 1))


def confidence_quantiles(pool: Sequence[QuestionSamples], name: str) -> tuple[float, ...]:
    """Return fifty quantiles of a confidence within [0, 1], so that a narrow range gets thresholds too."""
    values = [
        value
        for entry in pool
        for sample in entry.samples
        if sample.answer is not None and (value := confidence_of(sample, name)) is not None
    ]
    levels = np.quantile(values, np.linspace(0.01, 0.99, NUM_QUANTILES)) if values else np.zeros(0)
    return tuple(round(float(level), 6) for level in levels if 0.0 <= level <= 1.0)


def as_gridded(strategy: Strategy) -> GridStrategy:
    """Return ``strategy``; raise InputError unless it names the field that a grid sets."""
    if not isinstance(strategy, GridStrategy):
        raise InputError(
            f"Expected {strategy.name} to name the field that its settings are tried by as `grid_parameter`, but got "
            "none. Add one to its class, such as `grid_parameter: ClassVar[str] = 'max_samples'`."
        )
    return strategy


class NoThresholdError(InputError):
    """No threshold keeps the error rate with the required confidence."""

    def __init__(self, certificate: Certificate) -> None:
        super().__init__(certificate.message)
        self.certificate = certificate


def fit_budget_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float] | None = None,
    *,
    budget: float,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> FittedThreshold:
    """Choose the most accurate setting that uses at most ``budget`` samples per question on average.

    Ties go to the cheapest setting, then to the first.
    """
    if not budget > 0.0:
        raise InputError(f"Expected `budget` to be positive, but got {budget}.")
    calibration = calibration_pool(strategy, pool, scorers)
    outcome = _outcome(strategy, calibration, grid, num_reshuffles=num_reshuffles, seed=seed)
    return threshold_for_budget(as_gridded(strategy), calibration, outcome, budget)


def threshold_for_budget(
    strategy: GridStrategy, calibration: CalibrationPool, outcome: GridOutcome, budget: float
) -> FittedThreshold:
    """Choose as :func:`fit_budget_threshold` does, from known costs and accuracies."""
    best = best_setting_within(outcome.mean_samples, outcome.accuracy, budget)
    if best is None:
        cheapest = int(outcome.mean_samples.argmin())
        raise InputError(
            f"Expected a value of the grid to use at most {budget:g} samples on average, but the cheapest, "
            f"{outcome.grid[cheapest]:g}, uses {outcome.mean_samples[cheapest]:.2f}. Widen the grid."
        )
    return _chosen(strategy, calibration, outcome, best, "budget", budget)


def fit_accuracy_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float] | None = None,
    *,
    accuracy: float,
    scorers: Sequence[FittedScorer] = (),
    num_reshuffles: int = NUM_RESHUFFLES,
    seed: int = SEED,
) -> FittedThreshold:
    """Choose the cheapest setting whose accuracy on the calibration questions reaches ``accuracy``.

    Ties go to the more accurate setting. For the other arguments see :func:`fit_budget_threshold`.
    """
    if not 0.0 < accuracy <= 1.0:
        raise InputError(f"Expected `accuracy` to lie in (0, 1], but got {accuracy}.")
    calibration = calibration_pool(strategy, pool, scorers)
    outcome = _outcome(strategy, calibration, grid, num_reshuffles=num_reshuffles, seed=seed)
    found = cheapest_setting_reaching(outcome.mean_samples, outcome.accuracy, accuracy)
    if found is None:
        best = int(outcome.accuracy.argmax())
        raise InputError(
            f"Expected a value of the grid to reach an accuracy of {accuracy:g}, but the best, "
            f"{outcome.grid[best]:g}, reaches {outcome.accuracy[best]:.4f}. Widen the grid, raise the strategy's "
            "budget, or ask for less."
        )
    return _chosen(as_gridded(strategy), calibration, outcome, found, "accuracy", accuracy)


def fit_risk_threshold(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    *,
    risk: float,
    delta: float = 0.1,
    scorers: Sequence[FittedScorer] = (),
    guide: Sequence[QuestionSamples] | None = None,
    grid: Sequence[float] | None = None,
    num_starts: int | None = None,
    procedure: Procedure = "fixed_sequence",
) -> FittedThreshold:
    """Choose, by Learn then Test, the confidence below which the strategy abstains."""
    if guide is not None and grid is not None:
        raise InputError("Expected either `guide` or `grid`, but got both.")
    calibration = calibration_pool(strategy, pool, scorers)
    confidence, wrong, samples = _verdicts(strategy, calibration.entries)
    if guide is not None:
        check_guide(calibration, guide)
        seen, lost, _ = _verdicts(strategy, ready_entries(strategy, guide, scorers))
        thresholds = guided_grid(seen, lost, num_questions=len(pool), risk=risk)
    else:
        thresholds = np.linspace(1.0, 0.0, 101) if grid is None else np.asarray(grid, dtype=np.float64)
    starts = num_starts or (10 if guide is None and grid is None else 1)
    certificate = certify_threshold(
        confidence, wrong, thresholds, risk=risk, delta=delta, procedure=procedure, num_starts=starts
    )
    if certificate.threshold is None:
        raise NoThresholdError(certificate)
    return FittedThreshold(
        name=f"{strategy.name}_risk_{risk:g}",
        strategy=strategy.name,
        fields=fields_of(strategy),
        parameter=None,
        threshold=certificate.threshold,
        target="risk",
        value=risk,
        delta=delta,
        num_samples=calibration.num_samples,
        scorers=scorer_digests(strategy.confidence, scorers),
        fitted_on=calibration.fitted_on,
        achieved=_achieved(certificate, wrong, samples),
        message=certificate.message,
    )


def _outcome(
    strategy: Strategy,
    calibration: CalibrationPool,
    grid: Sequence[float] | None,
    *,
    num_reshuffles: int,
    seed: int,
) -> GridOutcome:
    curved, reads = as_gridded(strategy), strategy.confidence
    if grid is None:
        values = () if reads is None else confidence_quantiles(calibration.entries, reads)
        grid = grid_of(curved, values=values)
    return grid_outcome(curved, calibration.entries, grid, num_reshuffles=num_reshuffles, seed=seed)


def _chosen(
    strategy: GridStrategy,
    calibration: CalibrationPool,
    outcome: GridOutcome,
    best: int,
    target: TargetKind,
    value: float,
) -> FittedThreshold:
    threshold, parameter = float(outcome.grid[best]), strategy.grid_parameter
    accuracy, samples = float(outcome.accuracy[best]), float(outcome.mean_samples[best])
    return FittedThreshold(
        name=f"{strategy.name}_{target}_{value:g}",
        strategy=strategy.name,
        fields=fields_of(with_setting(strategy, threshold)),
        parameter=parameter,
        threshold=threshold,
        target=target,
        value=float(value),
        delta=None,
        num_samples=calibration.num_samples,
        scorers=scorer_digests(strategy.confidence, calibration.scorers),
        fitted_on=calibration.fitted_on,
        achieved={"accuracy": accuracy, "mean_samples": samples},
        message=f"{parameter} {threshold:g} reaches accuracy {accuracy:.4f} at {samples:.2f} samples on the "
        f"{calibration.fitted_on.num_questions} calibration questions that it was chosen on.",
    )


def _verdicts(strategy: Strategy, entries: Sequence[QuestionSamples]) -> tuple[Floats, Floats, Floats]:
    """Return each verdict's confidence (-inf if it has no answer), whether it is wrong, and its samples used [Q]."""
    verdicts = [replay(strategy, entry) for entry in entries]
    answered = [verdict for verdict in verdicts if verdict.answer is not None]
    if answered and all(verdict.confidence is None for verdict in answered):
        raise InputError(
            f"Expected {strategy.name} to state a confidence in its answers, but got none in {len(answered)} of "
            f"{len(verdicts)} verdicts. A threshold with a guarantee needs a strategy that does."
        )
    confidence = [-math.inf if v.answer is None or v.confidence is None else v.confidence for v in verdicts]
    wrong = [float(not verdict.correct) for verdict in verdicts]
    return np.array(confidence), np.array(wrong), np.array([float(verdict.samples_used) for verdict in verdicts])


def _achieved(certificate: Certificate, wrong: Floats, samples: Floats) -> dict[str, float]:
    answered = certificate.num_answered
    return {
        "coverage": answered / len(wrong),
        "num_answered": answered,
        "num_wrong": certificate.loss,
        "error_rate_of_answered": certificate.loss / answered if answered else 0.0,
        "p_value": certificate.p_value,
        "accuracy_without_abstaining": float(1.0 - wrong.mean()),
        "mean_samples": float(samples.mean()),
    }
