"""Writers of tables (terminal, Markdown, CSV), and the comparison of metrics before and after."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, MCE, PASS_AT_1, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import Estimate, MetricChange

# Metric key -> (what people call it, whether higher is better).
METRIC_NAMES: dict[str, tuple[str, bool]] = {
    ECE: ("ECE", False),
    MCE: ("MCE", False),
    BRIER: ("Brier", False),
    AUROC: ("AUROC", True),
    WITHIN_QUESTION_AUROC: ("AUROC within questions", True),
    PASS_AT_1: ("pass@1", True),
}
DASH = "–"
STYLES = {True: "green", False: "red", None: ""}
_HEADER = ("metric", "split", "before", "after", "change")


def rich_table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]] = (),
    *,
    title: str = "",
    left: Sequence[str] = (),
    no_wrap: bool = False,
) -> Table:
    """Return cells as a table for the terminal; columns ``left`` hold words, and break no line with ``no_wrap``."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in heads:
        is_left = name in left
        table.add_column(name, justify="left" if is_left else "right", overflow="fold", no_wrap=no_wrap and is_left)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, rule: str | None = None) -> str:
    """Return cells as a Markdown table; ``rule`` is the line under the heads."""
    first, *lines = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in (heads, *rows))
    return "\n".join([first, rule or f"| {' | '.join(['---'] * len(heads))} |", *lines])


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV in full precision; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


def format_estimate(estimate: Estimate, *, signed: bool = False, tight: bool = False) -> str:
    """Return a value and its interval to three decimals, ``tight`` without a space; a dash where undefined."""
    if estimate.value is None:
        return DASH
    form = "+z.3f" if signed else "z.3f"  # z: no -0.000
    value = f"{estimate.value:{form}}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low:{form}},{'' if tight else ' '}{estimate.high:{form}}]"


def metric_label(metric: str) -> str:
    if metric not in METRIC_NAMES:
        return metric
    name, higher_is_better = METRIC_NAMES[metric]
    return f"{name} {'↑' if higher_is_better else '↓'}"


def is_better(row: MetricChange) -> bool | None:
    """Whether the whole interval of the change lies on the good (True) or bad side (False); None otherwise."""
    if row.metric not in METRIC_NAMES or row.change.is_positive is None:
        return None
    return row.change.is_positive == METRIC_NAMES[row.metric][1]


def comparison_table(rows: Sequence[tuple[str, MetricChange]], *, title: str = "") -> Table:
    """Return the rows for the terminal, each on one line: green where better beyond its interval, red where worse."""
    lines: list[list[str | Text]] = []
    last_metric = None
    for split, row in rows:
        label = metric_label(row.metric) if row.metric != last_metric else ""
        last_metric = row.metric
        before, after = (DASH if end.value is None else f"{end.value:.3f}" for end in (row.before, row.after))
        change = Text(format_estimate(row.change, signed=True), style=STYLES[is_better(row)])
        lines.append([label, split, before, after, change])
    return rich_table(_HEADER, lines, title=title, left=_HEADER[:2])


def comparison_markdown(rows: Sequence[tuple[str, MetricChange]]) -> str:
    lines = []
    for split, row in rows:
        before, after = format_estimate(row.before), format_estimate(row.after)
        change = format_estimate(row.change, signed=True)
        emphasised = change if is_better(row) is None else f"**{change}**"
        lines.append((metric_label(row.metric), split, before, after, emphasised))
    return markdown_table(_HEADER, lines, rule="|---|---|---:|---:|---:|")


def comparison_csv(rows: Sequence[tuple[str, MetricChange]]) -> str:
    """Return the rows as CSV with a header, full precision, and empty cells where a value is not defined."""
    columns = [f"{name}{end}" for name in _HEADER[2:] for end in ("", "_low", "_high")]
    lines = [
        [row.metric, split, *(n for e in (row.before, row.after, row.change) for n in (e.value, e.low, e.high))]
        for split, row in rows
    ]
    return csv_text([*_HEADER[:2], *columns], lines)
