"""Figures of strategies: accuracy against samples and tokens, and risk against coverage. Nothing is smoothed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.reports.strategy_rows import ConsensusRow, CurveRow
from selfcal_lightning.functional.base import Floats

Cost = Literal["samples", "tokens"]
# One look for each strategy, in every panel; lightness and marks differ too, so that grey prints can be read.
LOOKS: dict[str, tuple[str, str]] = {
    "self_consistency": ("#000000", "-"),
    "adaptive_consistency": ("#4878a8", "-"),
    "adaptive_beta": ("#4878a8", "--"),
    "adaptive_dirichlet": ("#4878a8", ":"),
    "adaptive_entropy": ("#86b0d8", "-."),
    "window_stopping": ("#3d8f5f", "-"),
    "window_sliding": ("#3d8f5f", "--"),
    "early_stopping": ("#e0813a", "-"),
    "best_of_n": ("#c2504a", "-"),
    "cisc": ("#7b5ea7", "-"),
    "borda": ("#7b5ea7", "--"),
    "standardised": ("#7b5ea7", ":"),
    "cges": ("#d4a72c", "-"),
}
_OTHER = ("#8a8a8a", "-")
_GREY = "#b0b0b0"
_WIDTH, _HEIGHT = 3.3, 2.9


def accuracy_figure(rows: Sequence[CurveRow], *, cost: Cost = "samples", title: str = "") -> Figure:
    """Draw accuracy over mean cost: one row of panels for each side, one column for each confidence.

    A grey line in every panel is plain self-consistency of the first side; bands are 95 % intervals. Points of a curve
    are joined in the order of their cost. Oracles are left out, since they would stretch the axis.

    Args:
        rows: The curves.
        cost: What the x axis shows, on a logarithmic scale; curves whose tokens are unknown are left out.
        title: Over the figure; empty for none.

    Raises:
        ValueError: There is no curve to draw.
    """
    drawn = [row for row in rows if not row.contender.is_oracle and _cost(row, cost) is not None]
    if not drawn:
        raise InputError(f"Expected at least one curve whose {cost} are known, but got none.")
    sides = list(dict.fromkeys(row.contender.side for row in drawn))
    names = list(dict.fromkeys(row.contender.confidence for row in drawn))
    figure = Figure(figsize=(0.7 + _WIDTH * len(names), 1.1 + _HEIGHT * len(sides)), layout="constrained")
    grid = figure.subplots(len(sides), len(names), sharex=True, sharey=True, squeeze=False)
    reference = next((row for row in drawn if row.contender.strategy == "self_consistency"), None)
    for line, side in zip(grid, sides, strict=True):
        for axes, name in zip(line, names, strict=True):
            here = [row for row in drawn if (row.contender.side, row.contender.confidence) == (side, name)]
            _draw_panel(axes, here, reference, cost)
            weighted = "by votes alone" if name is None else f"by {name}"
            axes.set_title(weighted if len(sides) == 1 else f"{side}: {weighted}", fontsize=10)
        line[0].set_ylabel("accuracy")
    for axes in grid[-1]:
        axes.set_xlabel(f"mean {cost} a question")
    _legend(figure, [row.contender.strategy for row in drawn], has_reference=reference is not None)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def risk_coverage_figure(rows: Sequence[ConsensusRow], *, title: str = "") -> Figure:
    """Draw the share of wrong answers among the most confident questions; one panel a side.

    The confidence of a question is the winner's share of the weight over all samples.

    Args:
        rows: The curves.
        title: Over the figure; empty for none.

    Raises:
        ValueError: There is no curve to draw.
    """
    if not rows:
        raise InputError("Expected at least one curve, but got none.")
    sides = list(dict.fromkeys(row.side for row in rows))
    figure = Figure(figsize=(0.7 + 4.0 * len(sides), 3.9), layout="constrained")
    panels = figure.subplots(1, len(sides), sharex=True, sharey=True, squeeze=False)[0]
    palette = ["#000000", "#4878a8", "#e0813a", "#3d8f5f", "#7b5ea7", "#c2504a", "#d4a72c"]
    for axes, side in zip(panels, sides, strict=True):
        for position, row in enumerate(row for row in rows if row.side == side):
            label = f"{row.confidence or 'votes alone'}: AURC {'–' if row.aurc is None else f'{row.aurc:.3f}'}"
            style = "-" if position < len(palette) else "--"
            axes.plot(
                row.curve.coverage, row.curve.risk, style, marker=".", markersize=3, linewidth=1.4,
                color=palette[position % len(palette)], label=label,
            )  # fmt: skip
        _frame(axes)
        axes.set(xlim=(0.0, 1.0), xlabel="share of the questions answered")
        axes.set_title(side, fontsize=10)
        axes.legend(loc="upper left", fontsize=7.5, frameon=False)
    panels[0].set_ylabel("share of wrong answers among them")
    panels[0].set_ylim(bottom=0.0)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[CurveRow], reference: CurveRow | None, cost: Cost) -> None:
    if reference is not None:
        x, y = _points(reference, cost)
        axes.plot(x, y, color=_GREY, linewidth=3.2, alpha=0.6, zorder=1)
    for row in rows:
        colour, style = LOOKS.get(row.contender.strategy, _OTHER)
        x, y = _points(row, cost)
        # A setting a sample shows as points; a hundred thresholds show as a line.
        marker = "." if len(x) <= 24 else ""
        axes.plot(x, y, style, color=colour, marker=marker, markersize=4, linewidth=1.4, zorder=2)
        low, high = _ends(row, cost)
        axes.fill_between(x, low, high, color=colour, alpha=0.08, linewidth=0, zorder=1)
    axes.set_xscale("log")
    # Panels share their axis, so the ticks hold for all of them.
    low, high = axes.get_xlim()
    if cost == "samples":
        ticks = [2**power for power in range(12)]
    else:
        ticks = [base * 10**power for power in range(7) for base in (1, 2, 5)]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if 0.9 * low <= tick <= 1.1 * high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _frame(axes)


def _points(row: CurveRow, cost: Cost) -> tuple[Floats, Floats]:
    """Return the points in the order of their cost."""
    x = _cost(row, cost)
    if x is None:
        return np.zeros(0), np.zeros(0)
    order = np.argsort(x, kind="stable")
    return x[order], row.accuracy[order]


def _ends(row: CurveRow, cost: Cost) -> tuple[Floats, Floats]:
    """Return the ends of the intervals in the order of the cost; nan, which is not drawn, where there are none."""
    x = _cost(row, cost)
    if x is None:
        return np.zeros(0), np.zeros(0)
    order = np.argsort(x, kind="stable")
    return row.accuracy_low[order], row.accuracy_high[order]


def _cost(row: CurveRow, cost: Cost) -> Floats | None:
    return row.samples if cost == "samples" else row.tokens


def _legend(figure: Figure, strategies: Sequence[str], *, has_reference: bool) -> None:
    handles = [
        Line2D([], [], color=LOOKS.get(name, _OTHER)[0], linestyle=LOOKS.get(name, _OTHER)[1], label=name)
        for name in dict.fromkeys(strategies)
    ]
    if has_reference:
        handles.append(Line2D([], [], color=_GREY, linewidth=3.2, alpha=0.6, label="self_consistency by votes alone"))
    columns = max(1, min(len(handles), int(figure.get_size_inches()[0] // 1.9)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
