"""The arithmetic of the published comparison, for numbers comparable with the paper's.

It differs from ours in that unreadable responses are dropped before anything is counted, as if they had cost nothing,
questions without a readable response are left out, and there is one order, that of the file. Use it to compare with
published figures, never to judge a method.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from selfcal_lightning.confidence.base import check_confidence
from selfcal_lightning.confidence.fusion import carried_confidences, is_probability
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.evaluation.tables import DASH, csv_text, rich_table
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.stopping import EarlyStopping, WindowStopping
from selfcal_lightning.inference.vectorised import PoolArrays, right_codes
from selfcal_lightning.inference.voting import BestOfN, PassAtN, SelfConsistency
from selfcal_lightning.metrics.arrays import Floats

THRESHOLDS = tuple(step / 100 for step in range(101))
SIZES = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1024)
LEVELS = (2, 4, 16, 64, 256, 1024)
ORACLE = "pass@N"


@dataclass(frozen=True)
class PaperCurve:
    """One method at G settings: accuracy [G] in [0, 1], and mean readable responses used [G]."""

    method: str
    settings: tuple[float, ...]
    accuracy: Floats
    used: Floats


def paper_curves(pool: RecordedPool, confidence: str | None) -> list[PaperCurve]:
    """Run the eight published methods on a pool, in the order of the file.

    A window that never agrees falls back to the vote question by question. (The published code gives up the window, and
    all larger ones, for all questions as soon as one question has none.)
    """
    readable = [replace(entry, samples=tuple(s for s in entry.samples if s.answer)) for entry in pool.entries]
    if not (kept := [entry for entry in readable if entry.samples]):
        raise InputError("Expected at least one readable response, but got none. Check the task of the pool.")
    arrays = PoolArrays.from_samples(kept, confidence=confidence)
    longest = arrays.answer.shape[1]
    sizes = tuple(size for size in SIZES if size <= longest)
    windows = tuple(range(2, longest + 1))
    runs: list[tuple[str, Any, Sequence[float]]] = [  # some strategies take whole numbers only
        ("ASC", AdaptiveConsistency("count_ratio", max_samples=longest), THRESHOLDS),
        ("SC", SelfConsistency(longest), sizes),
    ]
    if confidence is not None:
        stopping = EarlyStopping(max_samples=longest, confidence=confidence)
        weighted = AdaptiveConsistency("confidence_ratio", max_samples=longest, confidence=confidence)
        runs = [
            ("Early stopping", stopping, THRESHOLDS), ("ASC w/ conf.", weighted, THRESHOLDS), *runs,
            ("SC w/ conf.", SelfConsistency(longest, confidence), sizes),
            ("Best-of-n", BestOfN(longest, confidence), sizes),
        ]  # fmt: skip
    runs.append(("ESC", WindowStopping(max_samples=longest, mode="sliding"), windows))
    runs.append((ORACLE, PassAtN(longest), sizes))
    right, rows, curves = right_codes(arrays.answer, arrays.correct), range(len(kept)), []
    for method, strategy, grid in runs:
        if grid:
            outcome = strategy.curve(arrays, grid)
            accuracy = right[rows, outcome.answer].mean(axis=1)
            curves.append(PaperCurve(method, tuple(grid), accuracy, outcome.used.mean(axis=1)))
    return curves


def aggregation_csv(curves: Sequence[PaperCurve]) -> str:
    rows = [[c.method, 100.0 * float(c.accuracy[-1]), float(c.used[-1])] for c in curves]
    return csv_text(["Method", "Accuracy(%)", "Avg_Responses_Used"], rows)


def metric_csv(curves: Sequence[PaperCurve]) -> str:
    """Return :func:`metric_rows` as CSV; empty where a curve has no point within the level."""
    methods = [curve.method for curve in curves if curve.method != ORACLE]
    rows = [
        [level, *(None if row[name] is None else f"{row[name]:g}" for name in methods)]
        for level, row in metric_rows(curves).items()
    ]
    return csv_text(["X", *methods], rows)


def metric_rows(curves: Sequence[PaperCurve]) -> dict[int, dict[str, float | None]]:
    """Return, for each level X, each curve's accuracy in percent at its last point that uses X responses at most.

    A curve is read from its first point and left at the first one that uses more, so that one that is not monotone is
    cut short, as in the published tables, and percentages have two decimals. The oracle is not among them.
    """
    rows: dict[int, dict[str, float | None]] = {level: {} for level in LEVELS}
    for level, row in rows.items():
        for curve in [one for one in curves if one.method != ORACLE]:
            number = int(np.append(curve.used > level, True).argmax())  # of points before the first that uses more
            row[curve.method] = round(100.0 * float(curve.accuracy[number - 1]), 2) if number else None
    return rows


def run_paper(
    tests: Mapping[str, Mapping[str, RecordedPool]], confidences: Sequence[str] | None, folder: Path
) -> dict[str, Any]:
    """Run the published methods on every pool; print and write ``aggregation_results.csv`` and ``metric.csv``."""
    found: dict[str, Any] = {}
    for test, sides in tests.items():
        for side, pool in sides.items():
            carried = carried_confidences(pool)
            name = confidences[0] if confidences else next((n for n in carried if is_probability(pool, n)), None)
            if name is not None:
                check_confidence(pool.entries, name)
            curves = paper_curves(pool, name)
            target = folder / "paper" / test / side
            target.mkdir(parents=True, exist_ok=True)
            write_atomically(target / "aggregation_results.csv", aggregation_csv(curves).encode())
            write_atomically(target / "metric.csv", metric_csv(curves).encode())
            _show(f"{test}, {side}: published protocol, confidence {name}", curves)
            plain = [vars(c) | {"accuracy": c.accuracy.tolist(), "used": c.used.tolist()} for c in curves]
            found.setdefault(test, {})[side] = {"confidence": name, "curves": plain}
    return found


def _show(title: str, curves: Sequence[PaperCurve]) -> None:
    rows = metric_rows(curves)
    levels = [level for level in LEVELS if level == LEVELS[0] or level < 2 * max(curve.used[-1] for curve in curves)]
    heads = ["method", *(f"≤{level}" for level in levels), "last: accuracy %", "responses"]
    lines = []
    for curve in curves:
        values = (rows[level].get(curve.method) for level in levels)
        cells = [DASH if value is None else f"{value:.2f}" for value in values]
        lines.append([curve.method, *cells, f"{100.0 * curve.accuracy[-1]:.2f}", f"{curve.used[-1]:.2f}"])
    console = Console()
    console.print(rich_table(heads, lines, title=title, left=heads[:1]))
    console.print("Unreadable responses are dropped here as if they had cost nothing: for comparison only.\n")
