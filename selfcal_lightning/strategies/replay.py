"""Run a strategy on recorded samples with the code that runs it live."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.records import Question, QuestionSamples, Sample, Verdict
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.pool import UNREADABLE, CurveOutcome, CurveStrategy, PoolArrays
from selfcal_lightning.strategies.threshold_grids import with_setting


def replay(strategy: Strategy, entry: QuestionSamples) -> Verdict:
    """Return the verdict of ``strategy`` on the samples of ``entry``, in their order; tokens are not counted.

    Each Ask is answered with the next samples, fewer of them (at last none) where the record ends.
    """
    solving = strategy.solve(entry.question)
    position = 0
    try:
        ask = next(solving)
        while True:
            batch = list(entry.samples[position : position + ask.num_samples])
            position += len(batch)
            ask = solving.send(batch)
    except StopIteration as stop:
        verdict: Verdict = stop.value
        return verdict


def replayed_curve(strategy: CurveStrategy, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
    """Return what ``solve`` does on each question at each value of the grid, by running it: the plain form of a curve.

    ``curve = replayed_curve`` in the class of a strategy gives it a curve. It takes G x Q runs of ``solve`` for each
    order of the samples, and ``solve`` sees of a sample what the arrays hold: its answer, whether it is right, and the
    confidence that the strategy reads.

    Args:
        strategy: A frozen dataclass.
        pool: The samples of Q questions.
        grid: G values of the field ``strategy.grid_parameter``; all but thresholds are whole numbers.
    """
    entries = [_entry(pool, row, strategy.confidence) for row in range(len(pool.length))]
    verdicts = [[replay(with_setting(strategy, value), entry) for entry in entries] for value in grid]
    shape = len(verdicts), len(entries)
    codes = [UNREADABLE if one.answer is None else int(one.answer) for row in verdicts for one in row]
    used = [one.samples_used for row in verdicts for one in row]
    stopped = [one.stopped_early for row in verdicts for one in row]
    return CurveOutcome(
        np.array(codes, dtype=np.int32).reshape(shape),
        np.array(used, dtype=np.int64).reshape(shape),
        np.array(stopped, dtype=bool).reshape(shape),
    )


def _entry(pool: PoolArrays, row: int, confidence: str | None) -> QuestionSamples:
    """Return the samples of one question; an answer is named by its code."""
    question = Question(pool.question_ids[row], "", ())
    samples = [_sample(pool, row, column, confidence) for column in range(int(pool.length[row]))]
    return QuestionSamples(question, tuple(samples), "")


def _sample(pool: PoolArrays, row: int, column: int, confidence: str | None) -> Sample:
    code, value, tokens = pool.answer[row, column], pool.confidence[row, column], pool.tokens[row, column]
    known = confidence is not None and not np.isnan(value)
    return Sample(
        pool.question_ids[row],
        column,
        0,
        "",
        None,
        None,
        None if code == UNREADABLE else str(code),
        bool(pool.correct[row, column]),
        yes_mass=float(value) if known and confidence == P_TRUE else None,
        no_mass=1.0 - float(value) if known and confidence == P_TRUE else None,
        confidences={confidence: float(value)} if known and confidence not in (None, P_TRUE) else {},
        num_tokens=None if np.isnan(tokens) else int(tokens),
    )
