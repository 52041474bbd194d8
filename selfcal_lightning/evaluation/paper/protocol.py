"""The arithmetic of the published comparison, for numbers that can be held against the paper's.

It differs from ours in that unreadable responses are dropped before anything is counted, as if they had cost nothing,
questions without a readable response are left out, and there is one order, that of the file. Use it to compare with
published figures, never to judge a method.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.strategies.rules.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.strategies.rules.best_of_n import BestOfN
from selfcal_lightning.strategies.rules.early_stopping import EarlyStopping
from selfcal_lightning.strategies.rules.pass_at_n import PassAtN
from selfcal_lightning.strategies.rules.self_consistency import SelfConsistency
from selfcal_lightning.strategies.rules.window_stopping import WindowStopping
from selfcal_lightning.strategies.vectorised.arrays import CurveStrategy, PoolArrays
from selfcal_lightning.strategies.vectorised.orders import right_codes

THRESHOLDS = tuple(step / 100 for step in range(101))
SIZES = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1024)
LEVELS = (2, 4, 16, 64, 256, 1024)
ORACLE = "pass@N"


@dataclass(frozen=True)
class PaperCurve:
    """One method at all its settings.

    Attributes:
        method: Its name in the published tables.
        settings: Thresholds, numbers of samples or windows [G], as they were run.
        accuracy: Share of right answers [G] in [0, 1].
        used: Mean readable responses used [G].
    """

    method: str
    settings: tuple[float, ...]
    accuracy: Floats
    used: Floats


def paper_curves(pool: RecordedPool, confidence: str | None) -> list[PaperCurve]:
    """Run the eight published methods on a pool, in the order of the file.

    A window that never agrees falls back to the vote question by question. (The published code gives up the window, and
    all larger ones, for all questions as soon as one question has none.)

    Args:
        pool: The samples.
        confidence: What weighs and stops; None runs the methods that only count.

    Raises:
        ValueError: No response can be read.
    """
    arrays = PoolArrays.from_samples(_readable(pool), confidence=confidence)
    longest = arrays.answer.shape[1]
    sizes = tuple(size for size in SIZES if size <= longest)
    windows = tuple(range(2, longest + 1))
    runs: list[tuple[str, CurveStrategy, tuple[float, ...]]] = []
    if confidence is not None:
        weighted = {"max_samples": longest, "confidence": confidence}
        runs += [
            ("Early stopping", EarlyStopping(**weighted), THRESHOLDS),
            ("ASC w/ conf.", AdaptiveConsistency("confidence_ratio", **weighted), THRESHOLDS),
        ]
    runs += [
        ("ASC", AdaptiveConsistency("count_ratio", max_samples=longest), THRESHOLDS),
        ("SC", SelfConsistency(longest), sizes),
    ]
    if confidence is not None:
        runs += [
            ("SC w/ conf.", SelfConsistency(longest, confidence), sizes),
            ("Best-of-n", BestOfN(longest, confidence), sizes),
        ]
    runs += [
        ("ESC", WindowStopping(max_samples=longest, mode="sliding"), windows),
        (ORACLE, PassAtN(longest), sizes),
    ]
    return [_curve(method, strategy, arrays, grid) for method, strategy, grid in runs if grid]


def aggregation_csv(curves: Sequence[PaperCurve]) -> str:
    """Return the last point of each curve: accuracy in percent and mean responses used."""
    rows = [[c.method, repr(100.0 * float(c.accuracy[-1])), repr(float(c.used[-1]))] for c in curves]
    return _csv(["Method", "Accuracy(%)", "Avg_Responses_Used"], rows)


def metric_csv(curves: Sequence[PaperCurve]) -> str:
    """Return :func:`metric_rows` as CSV; empty where a curve has no point within the level."""
    methods = [curve.method for curve in curves if curve.method != ORACLE]
    rows = [
        [str(level), *("" if row[name] is None else f"{row[name]:g}" for name in methods)]
        for level, row in metric_rows(curves).items()
    ]
    return _csv(["X", *methods], rows)


def metric_rows(curves: Sequence[PaperCurve]) -> dict[int, Mapping[str, float | None]]:
    """Return, for each level X, each curve's accuracy in percent at its last point that uses X responses at most.

    A curve is read from its first point and left at the first one that uses more, so that one that is not monotone is
    cut short, as in the published tables, and percentages have two decimals. The oracle is not among them.
    """
    return {level: {c.method: _last_within(c, level) for c in curves if c.method != ORACLE} for level in LEVELS}


def _last_within(curve: PaperCurve, level: int) -> float | None:
    found = None
    for accuracy, used in zip(curve.accuracy, curve.used, strict=True):
        if used > level:
            break
        found = _percent(accuracy)
    return found


def _percent(share: float) -> float:
    return round(100.0 * float(share), 2)


def _readable(pool: RecordedPool) -> list:
    """Return the questions with their readable responses only; those without any are left out."""
    entries = [
        replace(entry, samples=tuple(sample for sample in entry.samples if sample.answer)) for entry in pool.entries
    ]
    kept = [entry for entry in entries if entry.samples]
    if not kept:
        raise InputError("Expected at least one readable response, but got none. Check the task of the pool.")
    return kept


def _curve(method: str, strategy: CurveStrategy, arrays: PoolArrays, grid: tuple[float, ...]) -> PaperCurve:
    outcome = strategy.curve(arrays, grid)
    right = right_codes(arrays.answer, arrays.correct)
    rows = range(len(arrays.length))
    return PaperCurve(method, grid, right[rows, outcome.answer].mean(axis=1), outcome.used.mean(axis=1))


def _csv(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()
