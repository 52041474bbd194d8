"""What a strategy without a vectorised form does over a grid: ``solve`` is replayed, question by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.replay import replay
from selfcal_lightning.strategies.vectorised.arrays import (
    UNREADABLE,
    CurveOutcome,
    CurveStrategy,
    GridStrategy,
    PoolArrays,
)


def curve_of(strategy: GridStrategy, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
    """Return what ``strategy`` does on a pool at each value of a grid: by its ``curve``, or else by replaying it."""
    return strategy.curve(pool, grid) if isinstance(strategy, CurveStrategy) else replayed_curve(strategy, pool, grid)


def replayed_curve(strategy: GridStrategy, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
    """Return what ``solve`` does on the samples of each row of ``pool``, in their order, at each value of the grid.

    It takes a run of the generator for every row and value, where ``curve`` takes a pass over arrays.

    Raises:
        InputError: A verdict's answer is none of the samples', or the pool was not made of samples.
    """
    shape = len(grid), len(pool.length)
    answer = np.full(shape, UNREADABLE, dtype=np.int32)
    used, stopped = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    settings = [with_setting(strategy, value) for value in grid]
    for row in range(shape[1]):
        entry = pool.entry(row)
        codes = _codes(entry, pool, row)
        for place, setting in enumerate(settings):
            verdict = replay(setting, entry)
            if verdict.answer is not None and verdict.answer not in codes:
                raise InputError(
                    f"Expected {strategy.name} to answer with an answer of the samples, but got {verdict.answer!r} to "
                    f"question {entry.question.id!r}."
                )
            answer[place, row] = UNREADABLE if verdict.answer is None else codes[verdict.answer]
            used[place, row], stopped[place, row] = verdict.samples_used, verdict.stopped_early
    return CurveOutcome(answer, used, stopped)


def with_setting(strategy: GridStrategy, value: float) -> GridStrategy:
    """Return ``strategy`` with its grid parameter set, as ``solve`` runs it; what counts samples is a whole number.

    Example:
        >>> from selfcal_lightning.strategies.rules.early_stopping import EarlyStopping
        >>> with_setting(EarlyStopping(), 0.5).threshold
        0.5
    """
    setting = value if strategy.grid_parameter == "threshold" else int(value)
    found: GridStrategy = replace(strategy, **{strategy.grid_parameter: setting})  # type: ignore[type-var]
    return found


def _codes(entry: QuestionSamples, pool: PoolArrays, row: int) -> dict[str, int]:
    """Return the code of each answer among the samples of a row."""
    pairs = zip(entry.samples, pool.answer[row], strict=False)  # the row may end in padding
    return {sample.answer: int(code) for sample, code in pairs if sample.answer is not None}
