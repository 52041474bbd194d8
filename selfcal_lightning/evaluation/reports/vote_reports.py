"""Tables and a figure of votes before and after, counted and weighted by confidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from rich import box
from rich.table import Table

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.reports.calibration_tables import format_estimate
from selfcal_lightning.functional.estimates import Estimate
from selfcal_lightning.metrics.drawing import AFTER, BEFORE

COLOURS = {"before": BEFORE, "after": AFTER}
_WIDTH, _HEIGHT = 4.2, 3.4
_SHIFT = 1.03  # intervals of several lines would lie on one another


@dataclass(frozen=True)
class VoteRow:
    """The votes of one side of a test set.

    Attributes:
        test: Name of the test set.
        side: "before" or "after", or in tables "change": what the second differs by from the first.
        is_weighted: Whether votes are weighed by the side's confidence.
        widths: Numbers of samples that vote.
        accuracy: Share of the questions that each of them answers rightly, over random orders.
    """

    test: str
    side: str
    is_weighted: bool
    widths: tuple[int, ...]
    accuracy: tuple[Estimate, ...]

    @property
    def label(self) -> str:
        """What the row is called, such as "after, weighted"."""
        return f"{self.side}, {'weighted' if self.is_weighted else 'counted'}"


def votes_table(rows: Sequence[VoteRow]) -> Table:
    """Return the rows for the terminal: a line for each number of samples, a column for each side and weighing."""
    table = Table(
        title="Accuracy of votes; 95 % bootstrap over questions", title_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    labels, lines = _cells(rows)
    for name in ("samples", "split", *labels):
        table.add_column(name, justify="left" if name == "split" else "right", overflow="fold")
    for cells in lines:
        table.add_row(*(cell.replace(", ", ",") for cell in cells))
    return table


def votes_markdown(rows: Sequence[VoteRow]) -> str:
    """Return the rows as a Markdown table.

    Example:
        >>> print(votes_markdown([VoteRow("id", "before", False, (1, 2), (Estimate(0.5, 0.4, 0.6),) * 2)]))
        | samples | split | before, counted |
        |---:|---|---:|
        | 1 | id | 0.500 [0.400, 0.600] |
        | 2 | id | 0.500 [0.400, 0.600] |
    """
    labels, lines = _cells(rows)
    header = [f"| {' | '.join(('samples', 'split', *labels))} |", f"|---:|---|{'---:|' * len(labels)}"]
    return "\n".join([*header, *(f"| {' | '.join(cells)} |" for cells in lines)])


def votes_figure(rows: Sequence[VoteRow]) -> Figure:
    """Draw accuracy over the number of samples, one panel a test set: solid lines are weighted, dashed ones counted.

    Raises:
        ValueError: There is no row.
    """
    if not rows:
        raise InputError("Expected at least one row to draw, but got none.")
    tests = list(dict.fromkeys(row.test for row in rows))
    figure = Figure(figsize=(0.4 + _WIDTH * len(tests), 0.7 + _HEIGHT), layout="constrained")
    panels = figure.subplots(1, len(tests), sharey=True, squeeze=False)[0]
    for axes, test in zip(panels, tests, strict=True):
        _draw(axes, [row for row in rows if row.test == test])
        axes.set_title(test, fontsize=11)
        axes.set_xlabel("samples a question")
    panels[0].set_ylabel("accuracy of the vote")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, rows: Sequence[VoteRow]) -> None:
    for place, row in enumerate(rows):
        ends = [(one.value, one.low, one.high) for one in row.accuracy]
        values = [float(value or 0.0) for value, _, _ in ends]
        below = [0.0 if low is None else value - low for value, (_, low, _) in zip(values, ends, strict=True)]
        above = [0.0 if high is None else high - value for value, (_, _, high) in zip(values, ends, strict=True)]
        shift = _SHIFT ** (place - (len(rows) - 1) / 2)
        axes.errorbar(
            [width * shift for width in row.widths], values, yerr=[below, above], label=row.label, capsize=2,
            color=COLOURS.get(row.side), linestyle="-" if row.is_weighted else "--", marker="o", markersize=3,
            linewidth=1.4, elinewidth=0.7, alpha=1.0 if row.is_weighted else 0.8,
        )  # fmt: skip
    widths = sorted({width for row in rows for width in row.widths})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(widths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)


def _cells(rows: Sequence[VoteRow]) -> tuple[list[str], list[list[str]]]:
    """Return the labels of the columns, and the cells of every line."""
    labels = list(dict.fromkeys(row.label for row in rows))
    lines = []
    for test in dict.fromkeys(row.test for row in rows):
        here = {row.label: row for row in rows if row.test == test}
        for place, width in enumerate(next(iter(here.values())).widths):
            found = [format_estimate(here[label].accuracy[place]) if label in here else "–" for label in labels]
            lines.append([str(width), test, *found])
    return labels, lines
