"""What a strategy costs and reaches at each value of a grid, averaged over random orders of recorded samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.rules.early_stopping import EarlyStopping
from selfcal_lightning.strategies.vectorised.arrays import GridStrategy, PoolArrays
from selfcal_lightning.strategies.vectorised.orders import NUM_RESHUFFLES, SEED, Orders, right_codes
from selfcal_lightning.strategies.vectorised.replayed import curve_of, with_setting

# Steps of a hundredth, and finer ones at the top, where a confident model has most of its values.
THRESHOLDS = tuple(round(step / 100, 2) for step in range(100)) + tuple(round(0.99 + s / 1000, 3) for s in range(1, 11))
NUM_QUANTILES = 50
# Whole numbers in the smallest type that holds them, or floats.
Numbers: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class GridOutcome:
    """A strategy at G settings on Q questions, as sums over the orders of the samples: whole numbers, kept small.

    Attributes:
        grid: The settings, G.
        sum_correct: Orders in which the verdict is right [G, Q]; no readable answer is wrong.
        sum_samples: Samples used [G, Q].
        sum_tokens: Tokens of these samples [G, Q]; None where lengths are unknown or were not asked for.
        num_orders: How many orders were added up.
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
        """Share of the orders in which the verdict is right [G, Q]; made anew by each call."""
        return self.sum_correct / self.num_orders

    @property
    def samples(self) -> Floats:
        """Samples used, the mean over the orders [G, Q]; made anew by each call."""
        return self.sum_samples / self.num_orders

    @property
    def tokens(self) -> Floats | None:
        """Tokens of these samples, the mean over the orders [G, Q], or None; made anew by each call."""
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
    """Adds up what a strategy does over the orders of a pool.

    Args:
        strategy: The strategy.
        grid: Values of its grid parameter, G.
        num_questions: Q.
        num_orders: Orders that will be added.
        width: Samples of each question in an order.
        most_tokens: The most that the samples of one question cost in an order; None where that is unknown.
    """

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
        """Run the strategy on r orders of q questions, one below the other.

        Args:
            pool: The samples [r * q, N].
            right: Whether each answer code is right [r * q, K + 1], see ``orders.right_codes``.
            spent: Tokens of the first n samples [r * q, N + 1]; read where the most of them is known.
            questions: Which of the questions.
        """
        outcome = curve_of(self._strategy, pool, self._grid)
        rows = np.arange(outcome.answer.shape[1])
        _add(self._correct[:, questions], right[rows, outcome.answer])
        _add(self._samples[:, questions], outcome.used)
        if self._tokens is not None and spent is not None:
            _add(self._tokens[:, questions], spent[rows, outcome.used])

    def outcome(self) -> GridOutcome:
        """Return what was added up, all orders having been added."""
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
    """Return what ``strategy`` costs and reaches at every value of ``grid``.

    Args:
        strategy: The strategy; no question may have fewer samples than it draws at any value.
        pool: Questions with references.
        grid: Values of the field ``strategy.grid_parameter``.
        num_reshuffles: Random orders of each question's samples to average over; 0 takes the recorded order.
        seed: Of these orders.
    """
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
    """Return the settings of a strategy that are worth trying, rising.

    Args:
        strategy: The strategy; a number of samples goes up to its budget.
        thresholds: For a strategy whose setting is a threshold.
        values: Values that the confidence takes: further thresholds of the strategy that compares it with one.

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
    """Return fifty quantiles of a confidence, those in [0, 1]: a narrow range needs thresholds of its own."""
    values = [
        value
        for entry in pool
        for sample in entry.samples
        if sample.answer is not None and (value := confidence_of(sample, name)) is not None
    ]
    levels = np.quantile(values, np.linspace(0.01, 0.99, NUM_QUANTILES)) if values else np.zeros(0)
    return tuple(round(float(level), 6) for level in levels if 0.0 <= level <= 1.0)


def as_gridded(strategy: Strategy) -> GridStrategy:
    """Return ``strategy``, which names the field that a grid sets; raise InputError where it names none."""
    if not isinstance(strategy, GridStrategy):
        raise InputError(
            f"Expected {strategy.name} to name the field that its settings are tried by as `grid_parameter`, but got "
            "none. Add one to its class, such as `grid_parameter: ClassVar[str] = 'max_samples'`."
        )
    return strategy
