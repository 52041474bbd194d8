"""Figures as ``matplotlib.figure.Figure``: no pyplot, no global state, safe in threads and on servers."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.evaluation.statistics import ConsensusRow, Resampled
from selfcal_lightning.metrics import drawing
from selfcal_lightning.metrics.arrays import Array, Floats, as_labels, as_probabilities
from selfcal_lightning.metrics.calibration import ReliabilityBins, reliability_bins
from selfcal_lightning.metrics.discrimination import auroc, roc_curve

PNG_START = b"\x89PNG\r\n\x1a\n"
MARK = "selfcal_lightning"
_HEAD = 1024  # texts of a PNG stand at its beginning, as matplotlib writes them


def save_figure(figure: Figure, path: Path, *, dpi: int) -> None:
    """Write ``figure`` to a PNG file, which appears when it is complete; its folder must exist."""
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=dpi, metadata={"Software": MARK})
    write_atomically(path, sink.getvalue())


def is_own_figure(path: Path) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return head.startswith(PNG_START) and MARK.encode() in head


# Longer headings than this need smaller letters over a panel.
_LONG_HEADING = 34


def reliability_diagram(
    confidence: Array, correct: Array, *, before: tuple[Array, Array] | None = None, num_bins: int = 10, title: str = ""
) -> Figure:
    """Draw accuracy over confidence as bars, with a histogram of confidence beneath and ECE in the title."""
    figure = Figure(figsize=(4.2, 5.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1.0))
    bins = reliability_bins(confidence, correct, num_bins=num_bins)
    error = f"ECE {drawing.number(bins.expected_error)}"
    if before is None:
        drawing.draw_reliability(upper, bins, colour=drawing.BEFORE, label="accuracy")
        drawing.draw_histogram(lower, bins, colour=drawing.BEFORE)
    else:
        earlier = reliability_bins(*before, num_bins=num_bins)
        error = f"ECE {drawing.number(earlier.expected_error)} → {drawing.number(bins.expected_error)}"
        drawing.draw_reliability(upper, bins, colour=drawing.AFTER, label="after")
        filled = earlier.count > 0  # a line over the mean confidence of each bin
        upper.plot(
            earlier.confidence[filled], earlier.accuracy[filled], "o-", color=drawing.BEFORE, markeredgecolor="white",
            linewidth=1.6, markersize=6, label="before", zorder=5,
        )  # fmt: skip
        drawing.draw_histogram(lower, bins, colour=drawing.AFTER)
        lower.stairs(drawing.shares(earlier.count), np.append(earlier.lower, 1.0), color=drawing.BEFORE, linewidth=1.6)
        lower.set_ylim(0.0, drawing.histogram_limit(bins, earlier))
    upper.set_title(f"{title}: {error}" if title else error, fontsize=11)
    upper.set_ylabel("accuracy")
    upper.legend(loc="upper left", fontsize=8, frameon=False)
    lower.set_ylabel("share")
    lower.set_xlabel("confidence")
    return figure


def reliability_grid(diagrams: Mapping[str, Mapping[str, ReliabilityBins]], *, title: str = "") -> Figure:
    """Draw reliability diagrams side by side: one row per model, one column per split or confidence."""
    columns, rows = list(next(iter(diagrams.values()), {})), len(diagrams)
    if not columns or any(list(row) != columns for row in diagrams.values()):
        found = [*map(list, diagrams.values())]
        raise InputError(f"Expected every row of `diagrams` to hold the same columns, but got {found}.")
    figure = Figure(figsize=(0.6 + 3.3 * len(columns), 3.5 * rows), layout="constrained")
    grid = figure.subplots(
        2 * rows, len(columns), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 0.8) * rows
    )
    for row, (name, by_column) in enumerate(diagrams.items()):
        all_bins = list(by_column.values())
        for column, (label, bins) in enumerate(zip(columns, all_bins, strict=True)):
            upper, lower = grid[2 * row, column], grid[2 * row + 1, column]
            colour = drawing.BEFORE if row % 2 == 0 else drawing.AFTER
            drawing.draw_reliability(upper, bins, colour=colour, label="accuracy")
            drawing.draw_histogram(lower, bins, colour=colour)
            heading = f"{label}, {name}: ECE {drawing.number(bins.expected_error)}"
            upper.set_title(heading, fontsize=10.5 if len(heading) < _LONG_HEADING else 8.5)
        grid[2 * row + 1, 0].set_ylim(0.0, drawing.histogram_limit(*all_bins))
        grid[2 * row, 0].set_ylabel("accuracy")
        grid[2 * row + 1, 0].set_ylabel("share")
    grid[0, 0].legend(loc="upper left", fontsize=8, frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("confidence")
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def roc_figure(curves: Mapping[str, tuple[Array, Array]], *, title: str = "") -> Figure:
    figure = Figure(figsize=(4.2, 4.2), layout="constrained")
    axes = figure.subplots()
    several = [drawing.BEFORE, drawing.AFTER, drawing.RIGHT, drawing.WRONG, drawing.GREY]
    colours = [drawing.AFTER] if len(curves) == 1 else several
    for position, (name, (confidence, correct)) in enumerate(curves.items()):
        curve = roc_curve(confidence, correct)
        points: Any = ([], []) if curve is None else curve[:2]
        label = f"{name}: AUROC {drawing.number(auroc(confidence, correct))}"
        style = "-" if position < len(colours) else "--"
        axes.plot(*points, style, color=colours[position % len(colours)], linewidth=1.8, label=label)
    drawing.frame_roc(axes)
    axes.set_title(title, fontsize=11)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    return figure


def confidence_distribution(confidence: Array, correct: Array, *, num_bins: int = 20, title: str = "") -> Figure:
    probabilities, labels = as_probabilities(confidence), as_labels(correct)
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.subplots()
    highest = 0.0
    for sign, name, colour, mask in ((1, "right", drawing.RIGHT, labels), (-1, "wrong", drawing.WRONG, ~labels)):
        bins = reliability_bins(probabilities[mask], labels[mask], num_bins=num_bins)
        share = drawing.shares(bins.count)
        highest = max(highest, float(share.max()))
        mean = float(probabilities[mask].mean()) if mask.any() else None
        label = f"{mask.sum()} {name}, mean {drawing.number(mean).lstrip('0')}"
        axes.bar(drawing.centres(bins), sign * share, width=drawing.widths(bins), color=colour, label=label)
        if mean is not None:
            axes.plot([mean, mean], [0.0, sign * 1.12 * max(share.max(), 0.02)], color="black", linewidth=1.1)
    axes.axhline(0.0, color="black", linewidth=0.8)
    drawing.frame(axes)
    limit = 1.25 * highest or 1.0
    axes.set(xlim=(0.0, 1.0), ylim=(-limit, limit), xlabel="confidence", ylabel="share of responses")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    axes.set_title(title, fontsize=11)
    return figure


Cost = Literal["samples", "tokens"]
# One look for each strategy, in every panel; lightness and marks differ too, so that grey prints can be read.
LOOKS: dict[str, tuple[str, Any]] = {
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
_OTHER: tuple[str, Any] = ("#8a8a8a", "-")
_GREY = "#b0b0b0"
_WIDTH, _HEIGHT = 3.3, 2.9


def accuracy_figure(rows: Sequence[Resampled], *, cost: Cost = "samples", title: str = "") -> Figure:
    """Draw accuracy over mean cost: one row of panels for each side, one column for each confidence.

    A grey line in every panel is plain self-consistency of the first side; bands are 95 % intervals. Oracles are left
    out, since they would stretch the axis.
    """
    drawn = [row for row in rows if not row.contender.is_oracle and _cost(row, cost) is not None]
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
    handles = []
    for strategy in dict.fromkeys(row.contender.strategy for row in drawn):
        colour, style = LOOKS.get(strategy, _OTHER)
        handles.append(Line2D([], [], color=colour, linestyle=style, label=strategy))
    if reference is not None:
        handles.append(Line2D([], [], color=_GREY, linewidth=3.2, alpha=0.6, label="self_consistency by votes alone"))
    columns = max(1, min(len(handles), int(figure.get_size_inches()[0] // 1.9)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def risk_coverage_figure(rows: Sequence[ConsensusRow], *, title: str = "") -> Figure:
    """Draw the share of wrong answers among the questions whose vote is clearest; one panel a side."""
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
        drawing.frame(axes)
        axes.set(xlim=(0.0, 1.0), xlabel="share of the questions answered")
        axes.set_title(side, fontsize=10)
        axes.legend(loc="upper left", fontsize=7.5, frameon=False)
    panels[0].set_ylabel("share of wrong answers among them")
    panels[0].set_ylim(bottom=0.0)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def _draw_panel(axes: Axes, rows: Sequence[Resampled], reference: Resampled | None, cost: Cost) -> None:
    if reference is not None:
        x, y, _, _ = _points(reference, cost)
        axes.plot(x, y, color=_GREY, linewidth=3.2, alpha=0.6, zorder=1)
    for row in rows:
        colour, style = LOOKS.get(row.contender.strategy, _OTHER)
        x, y, low, high = _points(row, cost)
        # A setting a sample shows as points; a hundred thresholds show as a line.
        marker = "." if len(x) <= 24 else ""
        axes.plot(x, y, style, color=colour, marker=marker, markersize=4, linewidth=1.4, zorder=2)
        axes.fill_between(x, low, high, color=colour, alpha=0.08, linewidth=0, zorder=1)
    axes.set_xscale("log")
    # Panels share their axis, so the ticks hold for all of them.
    first, last = axes.get_xlim()
    if cost == "samples":
        ticks = [2**power for power in range(12)]
    else:
        ticks = [base * 10**power for power in range(7) for base in (1, 2, 5)]
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if 0.9 * first <= tick <= 1.1 * last]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    drawing.frame(axes)


def _points(row: Resampled, cost: Cost) -> list[Floats]:
    """Return cost, accuracy and the ends of its intervals in the order of the cost; nan is not drawn."""
    x = _cost(row, cost)
    assert x is not None  # noqa: S101 - `accuracy_figure` leaves the others out
    order = np.argsort(x, kind="stable")
    return [column[order] for column in (x, row.curve.outcome.accuracy, *row.interval)]


def _cost(row: Resampled, cost: Cost) -> Floats | None:
    return row.curve.outcome.mean_samples if cost == "samples" else row.curve.outcome.mean_tokens
