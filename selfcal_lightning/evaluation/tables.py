"""Tables of metrics before and after, with intervals: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

_HEADER = ("metric", "split", "before", "after", "change")


@dataclass(frozen=True)
class ComparisonRow:
    """One line of a comparison."""

    metric: str
    split: str
    before: Estimate
    after: Estimate
    change: Estimate

    @property
    def is_better(self) -> bool | None:
        """Whether the whole interval of the change lies on the good (True) or bad side (False); None otherwise."""
        low, high = self.change.low, self.change.high
        if low is None or high is None or self.metric not in METRIC_NAMES or low <= 0.0 <= high:
            return None
        return (low > 0.0) == METRIC_NAMES[self.metric][1]


def comparison_rows(changes: Mapping[str, Mapping[str, MetricChange]]) -> list[ComparisonRow]:
    """Return one row per metric and split, metric by metric, from ``{split: {metric: change}}``."""
    metrics = dict.fromkeys(metric for by_metric in changes.values() for metric in by_metric)
    return [
        ComparisonRow(metric, split, by_metric[metric].before, by_metric[metric].after, by_metric[metric].change)
        for metric in metrics
        for split, by_metric in changes.items()
        if metric in by_metric
    ]


def comparison_table(rows: Sequence[ComparisonRow], *, title: str = "") -> Table:
    """Return the rows for the terminal: green where better beyond its interval, red where worse."""
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in _HEADER:
        table.add_column(name, justify="left" if name in ("metric", "split") else "right", overflow="fold")
    styles = {True: "green", False: "red", None: ""}
    last_metric = None
    for row in rows:
        is_first = row.metric != last_metric
        if is_first and last_metric is not None:
            table.add_section()
        last_metric = row.metric
        # Without the space inside the interval, a narrow terminal breaks the line between value and interval.
        before, after, change = (cell.replace(", ", ",") for cell in _estimates(row))
        label = metric_label(row.metric) if is_first else ""
        table.add_row(label, row.split, before, after, Text(change, style=styles[row.is_better]))
    return table


def comparison_markdown(rows: Sequence[ComparisonRow]) -> str:
    """Return the rows as a Markdown table; changes beyond their interval are bold."""
    lines = [_line(_HEADER), "|---|---|---:|---:|---:|"]
    for row in rows:
        before, after, change = _estimates(row)
        emphasised = change if row.is_better is None else f"**{change}**"
        lines.append(_line((metric_label(row.metric), row.split, before, after, emphasised)))
    return "\n".join(lines)


def comparison_csv(rows: Sequence[ComparisonRow]) -> str:
    """Return the rows as CSV with a header, full precision, and empty cells where a value is not defined."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [f"{name}{end}" for name in _HEADER[2:] for end in ("", "_low", "_high")]
    writer.writerow([*_HEADER[:2], *columns])
    for row in rows:
        numbers = [(e.value, e.low, e.high) for e in (row.before, row.after, row.change)]
        writer.writerow([row.metric, row.split, *(number for estimate in numbers for number in estimate)])
    return text.getvalue()


def metric_label(metric: str) -> str:
    """Return what people call a metric, with an arrow to its better side; an unknown key stands for itself.

    Example:
        >>> metric_label("calibration/ECE"), metric_label("accuracy/PassAt1"), metric_label("own/Thing")
        ('ECE ↓', 'pass@1 ↑', 'own/Thing')
    """
    if metric not in METRIC_NAMES:
        return metric
    name, higher_is_better = METRIC_NAMES[metric]
    return f"{name} {'↑' if higher_is_better else '↓'}"


def format_estimate(estimate: Estimate, *, signed: bool = False) -> str:
    """Return a value and its interval to three decimals; a dash where it is not defined."""
    if estimate.value is None:
        return "–"
    sign = "+" if signed else ""
    value = f"{estimate.value:{sign}.3f}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def _estimates(row: ComparisonRow) -> tuple[str, str, str]:
    return format_estimate(row.before), format_estimate(row.after), format_estimate(row.change, signed=True)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
