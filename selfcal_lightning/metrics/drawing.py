"""Style of all figures, and the reliability diagram and ROC curve that metrics and reports draw.

Colours: blue is before, orange after; green is right, red wrong. Both pairs also differ in lightness.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import NDArray

from selfcal_lightning.metrics.arrays import Array, Floats
from selfcal_lightning.metrics.calibration import ReliabilityBins
from selfcal_lightning.metrics.discrimination import auroc, roc_curve

BEFORE, AFTER = "#4878a8", "#e0813a"
RIGHT, WRONG = "#3d8f5f", "#c2504a"
GREY = "#8a8a8a"

FEW = 0.01


def axes_to_draw_on(axes: Axes | None, *, size: tuple[float, float] = (4.2, 4.2)) -> tuple[Figure, Axes]:
    """Return the given axes and their figure, or new ones of ``size`` inches made without pyplot."""
    if axes is None:
        figure = Figure(figsize=size, layout="constrained")
        return figure, figure.subplots()
    return cast("Figure", axes.get_figure(root=True)), axes


def draw_values(axes: Axes, values: Mapping[str, float]) -> None:
    """Draw named numbers as horizontal bars, top to bottom; undefined ones have no bar."""
    names = list(values)
    places = np.arange(len(names))
    axes.barh(places, [values[name] for name in names], color=BEFORE, height=0.7)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    for place, name in zip(places, names, strict=True):
        shown = number(None if np.isnan(values[name]) else values[name])
        axes.annotate(shown, (np.nan_to_num(values[name]), place), xytext=(3, 0), textcoords="offset points",
                      va="center", fontsize=8)  # fmt: skip
    frame(axes)
    axes.grid(axis="y", visible=False)


def draw_steps(axes: Axes, values: Sequence[float], *, name: str) -> None:
    axes.plot(np.arange(len(values)), values, "o-", color=BEFORE, linewidth=1.6, markersize=4)
    axes.set(xlabel="step", ylabel=name)
    frame(axes)


def draw_reliability(axes: Axes, bins: ReliabilityBins, *, colour: str, label: str) -> None:
    """Draw accuracy as bars, pale where a bin holds few responses, and the gap to mean confidence as a hatched box."""
    filled, few = bins.count > 0, shares(bins.count) < FEW
    kinds = [(filled & ~few, 1.0, label), (filled & few, 0.35, f"fewer than {FEW:.0%} of the responses")]
    for chosen, alpha, name in kinds:
        if chosen.any():
            x, height, width = centres(bins)[chosen], bins.accuracy[chosen], widths(bins)[chosen]
            axes.bar(x, height, width, color=to_rgba(colour, alpha), label=name, zorder=2)
    axes.bar(
        centres(bins)[filled], bins.gap[filled], bottom=bins.confidence[filled], width=widths(bins)[filled],
        facecolor="none", edgecolor="#404040", linewidth=0.7, hatch="////", alpha=0.55, label="gap to mean confidence",
        zorder=3,
    )  # fmt: skip
    axes.plot([0, 1], [0, 1], color="black", linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
    frame(axes)
    axes.set(xlim=(0.0, 1.0), ylim=(0.0, 1.0))


def draw_reliability_of(axes: Axes, bins: ReliabilityBins, *, outcome: str = "accuracy") -> None:
    if bins.count.sum():
        draw_reliability(axes, bins, colour=BEFORE, label=outcome)
        axes.legend(loc="upper left", fontsize=8, frameon=False)
    axes.set(xlabel="confidence", ylabel=outcome)
    axes.set_title(f"ECE {number(bins.expected_error)}", fontsize=11)


def draw_roc(axes: Axes, confidence: Array, correct: Array) -> None:
    """Draw a ROC curve with its area in the title; no curve without both classes."""
    curve = roc_curve(confidence, correct)
    if curve is not None:
        axes.plot(*curve[:2], color=AFTER, linewidth=1.8)
    frame_roc(axes)
    axes.set_title(f"AUROC {number(auroc(confidence, correct))}", fontsize=11)


def frame_roc(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    frame(axes)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    axes.set(xlabel="share of wrong responses accepted", ylabel="share of right responses accepted")


def draw_histogram(axes: Axes, bins: ReliabilityBins, *, colour: str) -> None:
    axes.bar(centres(bins), shares(bins.count), width=widths(bins), color=colour)
    frame(axes)
    axes.set_ylim(0.0, histogram_limit(bins))


def histogram_limit(*all_bins: ReliabilityBins) -> float:
    return max(0.1, *(1.1 * float(shares(bins.count).max()) for bins in all_bins))


def frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)


def shares(count: NDArray[np.int64]) -> Floats:
    return count / max(int(count.sum()), 1)


def centres(bins: ReliabilityBins) -> Floats:
    return (bins.lower + bins.upper) / 2.0


def widths(bins: ReliabilityBins) -> Floats:
    return 0.94 * (bins.upper - bins.lower)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
