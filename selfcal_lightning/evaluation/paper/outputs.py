"""``selfcal evaluate --protocol paper``: the published tables of each pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from selfcal_lightning.confidence.base import check_confidence
from selfcal_lightning.confidence.fitting.weighed_pool import carried_confidences, is_probability
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.paper.protocol import (
    LEVELS,
    ORACLE,
    PaperCurve,
    aggregation_csv,
    metric_csv,
    metric_rows,
    paper_curves,
)
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.runtime.files import write_atomically


def run_paper(
    tests: Mapping[str, Mapping[str, RecordedPool]], confidences: Sequence[str] | None, folder: Path
) -> dict[str, Any]:
    """Run the published methods on every pool; print and write ``aggregation_results.csv`` and ``metric.csv``.

    Args:
        tests: Samples by test set, then by side.
        confidences: The one confidence to use; None takes the first probability that a pool carries, if any.
        folder: The files go under ``folder/paper/TEST/SIDE``.

    Returns:
        All curves as plain JSON types, by test set and side.
    """
    check_one_confidence(confidences)
    found: dict[str, Any] = {}
    for test, sides in tests.items():
        for side, pool in sides.items():
            name = confidences[0] if confidences else _first_probability(pool)
            if name is not None:
                check_confidence(pool.entries, name)
            curves = paper_curves(pool, name)
            target = folder / "paper" / test / side
            target.mkdir(parents=True, exist_ok=True)
            write_atomically(target / "aggregation_results.csv", aggregation_csv(curves).encode())
            write_atomically(target / "metric.csv", metric_csv(curves).encode())
            _show(f"{test}, {side}: published protocol, confidence {name}", curves)
            found.setdefault(test, {})[side] = {"confidence": name, "curves": [_as_json(curve) for curve in curves]}
    return found


def check_one_confidence(confidences: Sequence[str] | None) -> None:
    """Raise InputError where several confidences are named, or an empty list: the published protocol takes one."""
    if confidences is not None and len(confidences) != 1:
        raise InputError(f"Expected one of `confidences` for the published protocol, but got {list(confidences)}.")


def _first_probability(pool: RecordedPool) -> str | None:
    return next((name for name in carried_confidences(pool) if is_probability(pool, name)), None)


def _as_json(curve: PaperCurve) -> dict[str, Any]:
    return {
        "method": curve.method,
        "settings": list(curve.settings),
        "accuracy": curve.accuracy.tolist(),
        "used": curve.used.tolist(),
    }


def _show(title: str, curves: Sequence[PaperCurve]) -> None:
    """Print, for every method, the accuracy within each level and the end of its curve."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    rows = metric_rows(curves)
    levels = [level for level in LEVELS if level == LEVELS[0] or level < 2 * max(curve.used[-1] for curve in curves)]
    for name in ("method", *(f"≤{level}" for level in levels), "last: accuracy %", "responses"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for curve in curves:
        cells = ["–"] * len(levels)
        if curve.method != ORACLE:
            values = [rows[level][curve.method] for level in levels]
            cells = ["–" if value is None else f"{value:.2f}" for value in values]
        table.add_row(curve.method, *cells, f"{100.0 * curve.accuracy[-1]:.2f}", f"{curve.used[-1]:.2f}")
    console = Console()
    console.print(table)
    console.print("Unreadable responses are dropped here as if they had cost nothing: for comparison only.\n")
