"""Figures as ``matplotlib.figure.Figure``: no pyplot, no global state, safe in threads and on servers.

Colours: blue is the model before, orange after; green are right, red wrong responses. Both pairs differ in lightness.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_labels, as_probabilities
from selfcal_lightning.functional.calibration import ReliabilityBins, reliability_bins
from selfcal_lightning.functional.discrimination import auroc, roc_curve
from selfcal_lightning.functional.estimates import ScoredResponses

BEFORE, AFTER = "#4878a8", "#e0813a"
RIGHT, WRONG = "#3d8f5f", "#c2504a"
_GREY = "#8a8a8a"

FEW = 0.01
# Longer headings than this need smaller letters over a panel.
_LONG_HEADING = 34


def reliability_diagram(
    confidence: Array,
    correct: Array,
    *,
    before: tuple[Array, Array] | None = None,
    num_bins: int = 10,
    title: str = "",
) -> Figure:
    """Draw accuracy over confidence as bars, with a histogram of confidence beneath and ECE in the title.

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        before: Confidences and labels of an earlier model, drawn as a line over the bars; or None.
        num_bins: Number of bins of equal width.
        title: What the responses are; ECE follows it.

    Raises:
        ValueError: If a value lies outside [0, 1], is None or NaN, or the lengths differ.

    Example:
        >>> figure = reliability_diagram([0.1, 0.9, 1.0], [False, True, False], title="arithmetic")
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['accuracy', 'share']
    """
    figure = Figure(figsize=(4.2, 5.0), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1.0))
    bins = reliability_bins(confidence, correct, num_bins=num_bins)
    error = f"ECE {_number(bins.expected_error)}"
    if before is None:
        _draw_reliability(upper, bins, colour=BEFORE, label="accuracy")
        _draw_histogram(lower, bins, colour=BEFORE)
    else:
        earlier = reliability_bins(*before, num_bins=num_bins)
        error = f"ECE {_number(earlier.expected_error)} → {_number(bins.expected_error)}"
        _draw_reliability(upper, bins, colour=AFTER, label="after")
        _draw_line(upper, earlier)
        _draw_histogram(lower, bins, colour=AFTER)
        lower.stairs(_shares(earlier.count), np.append(earlier.lower, 1.0), color=BEFORE, linewidth=1.6)
        lower.set_ylim(0.0, _histogram_limit(bins, earlier))
    upper.set_title(f"{title}: {error}" if title else error, fontsize=11)
    upper.set_ylabel("accuracy")
    upper.legend(loc="upper left", fontsize=8, frameon=False)
    lower.set_ylabel("share")
    lower.set_xlabel("confidence")
    return figure


def reliability_comparison(
    before: Mapping[str, ScoredResponses], after: Mapping[str, ScoredResponses], *, num_bins: int = 10, title: str = ""
) -> Figure:
    """Draw before and after side by side: one row per model, one column per split.

    Args:
        before: Responses of the model before, by the name of the split.
        after: Responses of the model after, by the same names.
        num_bins: Number of bins of equal width.
        title: Over the whole figure; empty for none.

    Raises:
        ValueError: If the splits differ or there is none.

    Example:
        >>> pool = ScoredResponses([0.2, 0.9], [False, True], [0, 1])
        >>> len(reliability_comparison({"in-domain": pool}, {"in-domain": pool}).axes)
        4
    """
    if not before or list(before) != list(after):
        raise InputError(
            f"Expected `before` and `after` to hold the same splits, but got {list(before)} and {list(after)}."
        )
    sides = {"before": before, "after": after}
    diagrams = {
        side: {name: reliability_bins(part.confidence, part.correct, num_bins=num_bins) for name, part in pools.items()}
        for side, pools in sides.items()
    }
    return reliability_grid(diagrams, title=title)


def reliability_grid(diagrams: Mapping[str, Mapping[str, ReliabilityBins]], *, title: str = "") -> Figure:
    """Draw reliability diagrams side by side: one row per model, one column per split or confidence.

    Args:
        diagrams: Bins by the name of the row, then by the name of the column; every row has the same columns.
        title: Over the whole figure; empty for none.

    Raises:
        ValueError: If the columns of the rows differ or there is none.

    Example:
        >>> bins = reliability_bins([0.2, 0.9], [False, True])
        >>> len(reliability_grid({"base": {"p_true": bins, "fused": bins}}).axes)
        4
    """
    columns, rows = list(next(iter(diagrams.values()), {})), len(diagrams)
    if not columns or any(list(row) != columns for row in diagrams.values()):
        raise InputError(
            f"Expected every row of `diagrams` to hold the same columns, but got {[*map(list, diagrams.values())]}."
        )
    figure = Figure(figsize=(0.6 + 3.3 * len(columns), 3.5 * rows), layout="constrained")
    grid = figure.subplots(
        2 * rows, len(columns), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 0.8) * rows
    )
    for row, (name, by_column) in enumerate(diagrams.items()):
        all_bins = list(by_column.values())
        for column, (label, bins) in enumerate(zip(columns, all_bins, strict=True)):
            upper, lower = grid[2 * row, column], grid[2 * row + 1, column]
            colour = BEFORE if row % 2 == 0 else AFTER
            _draw_reliability(upper, bins, colour=colour, label="accuracy")
            _draw_histogram(lower, bins, colour=colour)
            heading = f"{label}, {name}: ECE {_number(bins.expected_error)}"
            upper.set_title(heading, fontsize=10.5 if len(heading) < _LONG_HEADING else 8.5)
        grid[2 * row + 1, 0].set_ylim(0.0, _histogram_limit(*all_bins))
        grid[2 * row, 0].set_ylabel("accuracy")
        grid[2 * row + 1, 0].set_ylabel("share")
    grid[0, 0].legend(loc="upper left", fontsize=8, frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("confidence")
    if title:
        figure.suptitle(title, fontsize=12)
    return figure


def roc_figure(curves: Mapping[str, tuple[Array, Array]], *, title: str = "") -> Figure:
    """Draw ROC curves with their areas in the legend.

    Args:
        curves: Confidences [N] and labels [N] by name. One without both classes has no curve; its name stays.
        title: Over the axes; empty for none.

    Example:
        >>> figure = roc_figure({"after": ([0.9, 0.1], [True, False])})
        >>> figure.axes[0].get_legend().get_texts()[0].get_text()
        'after: AUROC 1.000'
    """
    figure = Figure(figsize=(4.2, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = [AFTER] if len(curves) == 1 else [BEFORE, AFTER, RIGHT, WRONG, _GREY]
    for position, (name, (confidence, correct)) in enumerate(curves.items()):
        curve = roc_curve(confidence, correct)
        x, y = ([], []) if curve is None else (curve.false_positive_rate, curve.true_positive_rate)
        label = f"{name}: AUROC {_number(auroc(confidence, correct))}"
        style = "-" if position < len(colours) else "--"
        axes.plot(x, y, style, color=colours[position % len(colours)], linewidth=1.8, label=label)
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    _frame(axes)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    axes.set(xlabel="share of wrong responses accepted", ylabel="share of right responses accepted")
    if title:
        axes.set_title(title, fontsize=11)
    axes.legend(loc="lower right", fontsize=9, frameon=False)
    return figure


def confidence_distribution(confidence: Array, correct: Array, *, num_bins: int = 20, title: str = "") -> Figure:
    """Draw how confidence is distributed over right (upwards) and over wrong responses (downwards).

    Args:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N].
        num_bins: Number of bins of equal width.
        title: Over the axes; empty for none.

    Raises:
        ValueError: If a confidence lies outside [0, 1], a label is not 0 or 1, or the lengths differ.

    Example:
        >>> figure = confidence_distribution([0.9, 0.8, 0.1], [True, True, False])
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['2 right, mean .850', '1 wrong, mean .100']
    """
    probabilities, labels = as_probabilities(confidence), as_labels(correct)
    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.subplots()
    highest = 0.0
    for sign, name, colour, mask in ((1, "right", RIGHT, labels), (-1, "wrong", WRONG, ~labels)):
        bins = reliability_bins(probabilities[mask], labels[mask], num_bins=num_bins)
        share = _shares(bins.count)
        highest = max(highest, float(share.max()))
        mean = float(probabilities[mask].mean()) if mask.any() else None
        label = f"{mask.sum()} {name}, mean {_number(mean).lstrip('0')}"
        axes.bar(_centres(bins), sign * share, width=_widths(bins), color=colour, label=label)
        if mean is not None:
            axes.plot([mean, mean], [0.0, sign * 1.12 * max(share.max(), 0.02)], color="black", linewidth=1.1)
    axes.axhline(0.0, color="black", linewidth=0.8)
    _frame(axes)
    limit = 1.25 * highest or 1.0
    axes.set(xlim=(0.0, 1.0), ylim=(-limit, limit), xlabel="confidence", ylabel="share of responses")
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    if title:
        axes.set_title(title, fontsize=11)
    return figure


def _draw_reliability(axes: Axes, bins: ReliabilityBins, *, colour: str, label: str) -> None:
    """Draw accuracy as bars, pale where a bin holds few responses, and the gap to mean confidence as a hatched box."""
    filled, few = bins.count > 0, _shares(bins.count) < FEW
    kinds = [(filled & ~few, 1.0, label), (filled & few, 0.35, f"fewer than {FEW:.0%} of the responses")]
    for chosen, alpha, name in kinds:
        if chosen.any():
            shape = {"x": _centres(bins)[chosen], "height": bins.accuracy[chosen], "width": _widths(bins)[chosen]}
            axes.bar(**shape, color=to_rgba(colour, alpha), label=name, zorder=2)
    axes.bar(
        _centres(bins)[filled],
        bins.gap[filled],
        bottom=bins.confidence[filled],
        width=_widths(bins)[filled],
        facecolor="none",
        edgecolor="#404040",
        linewidth=0.7,
        hatch="////",
        alpha=0.55,
        label="gap to mean confidence",
        zorder=3,
    )
    axes.plot([0, 1], [0, 1], color="black", linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
    _frame(axes)
    axes.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0))


def _draw_line(axes: Axes, bins: ReliabilityBins) -> None:
    """Draw accuracy over mean confidence of an earlier model as a line with markers."""
    filled = bins.count > 0
    axes.plot(
        bins.confidence[filled],
        bins.accuracy[filled],
        "o-",
        color=BEFORE,
        markeredgecolor="white",
        linewidth=1.6,
        markersize=6,
        label="before",
        zorder=5,
    )


def _draw_histogram(axes: Axes, bins: ReliabilityBins, *, colour: str) -> None:
    """Draw the share of responses in each bin."""
    axes.bar(_centres(bins), _shares(bins.count), width=_widths(bins), color=colour)
    _frame(axes)
    axes.set_ylim(0.0, _histogram_limit(bins))


def _histogram_limit(*all_bins: ReliabilityBins) -> float:
    """Return the upper end of an axis that holds every share."""
    return max(0.1, *(1.1 * float(_shares(bins.count).max()) for bins in all_bins))


def _frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def _shares(count: NDArray[np.int64]) -> Floats:
    return count / max(int(count.sum()), 1)


def _centres(bins: ReliabilityBins) -> Floats:
    return (bins.lower + bins.upper) / 2.0


def _widths(bins: ReliabilityBins) -> Floats:
    return 0.94 * (bins.upper - bins.lower)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
