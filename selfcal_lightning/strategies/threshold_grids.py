"""What a strategy costs and reaches at each value of a grid, averaged over reshuffles of recorded samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.functional.base import Floats, check_positive
from selfcal_lightning.records import QuestionSamples, Verdict
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.pool import UNREADABLE, CurveStrategy, PoolArrays
from selfcal_lightning.strategies.replay import replay


@dataclass(frozen=True)
class GridOutcome:
    """Means over questions and reshuffles at each of G values.

    Attributes:
        grid: The values [G].
        accuracy: Share of right verdicts [G]; no answer is a wrong one.
        samples: Samples used [G].
    """

    grid: Floats
    accuracy: Floats
    samples: Floats


def grid_outcome(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    grid: Sequence[float],
    *,
    num_reshuffles: int = 20,
    seed: int = 0,
    parameter: str | None = None,
) -> GridOutcome:
    """Return accuracy and cost of ``strategy`` at every value of ``grid``; see ``thresholds.fit_budget_threshold``."""
    check_positive(num_reshuffles, "num_reshuffles")
    if not len(grid):
        raise ValueError("Expected `grid` to hold at least one value, but got none.")
    arrays = PoolArrays.from_samples(pool, confidence=strategy.confidence)
    generator = np.random.default_rng(seed)
    accuracy, samples = np.zeros(len(grid)), np.zeros(len(grid))
    for _ in range(num_reshuffles):
        order = _random_order(arrays, generator)
        if parameter is None:
            outcome = as_curved(strategy).curve(arrays.reordered(order), grid)
            right = verdict_correct(arrays, outcome.answer)
            accuracy += right.mean(axis=1)
            samples += outcome.used.mean(axis=1)
        else:
            for row, value in enumerate(grid):
                verdicts = _replays(replace(strategy, **{parameter: value}), pool, order)  # type: ignore[type-var]
                accuracy[row] += sum(bool(verdict.correct) for verdict in verdicts) / len(pool)
                samples[row] += sum(verdict.samples_used for verdict in verdicts) / len(pool)
    values = np.asarray(grid, dtype=np.float64)
    return GridOutcome(values, accuracy / num_reshuffles, samples / num_reshuffles)


def verdict_correct(pool: PoolArrays, answer: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return whether the chosen answers [G, Q] are right [G, Q]; no answer is wrong."""
    num_codes = max(int(pool.answer.max(initial=UNREADABLE)), int(answer.max(initial=UNREADABLE))) + 1
    right = np.zeros((len(pool.answer), num_codes + 1), dtype=bool)
    rows = np.repeat(np.arange(len(pool.answer)), pool.answer.shape[1])
    # Column num_codes holds the unreadable, which are never right. Equal answers have equal correctness.
    np.logical_or.at(right, (rows, pool.answer.ravel()), pool.correct.ravel())
    right[:, num_codes] = False
    return np.asarray(right[np.arange(len(right)), answer])


def _replays(strategy: Strategy, pool: Sequence[QuestionSamples], order: NDArray[np.int64]) -> list[Verdict]:
    """Return the verdicts on the samples in another order."""
    return [
        replay(strategy, replace(entry, samples=tuple(entry.samples[i] for i in row[: len(entry.samples)])))
        for entry, row in zip(pool, order.tolist(), strict=True)
    ]


def as_curved(strategy: Strategy) -> CurveStrategy:
    """Return ``strategy``, which has a vectorised form; raise ValueError where it has none."""
    if not isinstance(strategy, CurveStrategy):
        raise ValueError(
            f"Expected {strategy.name} to have a vectorised `curve`, but got none. Name the field as `parameter`; "
            "then it is replayed."
        )
    return strategy


def _random_order(pool: PoolArrays, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return a random order of the samples of each question [Q, N], padding last."""
    keys = generator.random(pool.answer.shape)
    keys[np.arange(pool.answer.shape[1])[None, :] >= pool.length[:, None]] = 2.0
    return np.argsort(keys, axis=1, kind="stable")
