"""What an estimate of capability costs, in responses that it reads, and what it is worth."""

from __future__ import annotations

from collections import Counter

from matplotlib.figure import Figure

from selfcal_lightning.evaluation.capability.comparison import CapabilityComparison
from selfcal_lightning.metrics.drawing import AFTER, BEFORE, GREY, frame


def cost_figure(comparison: CapabilityComparison, *, title: str = "") -> Figure:
    """Draw the squared error of each estimate over the responses that it reads of a question, with intervals.

    Lines show what costs nothing, the best constant, and what one judged response gives.
    """
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    seen: Counter[int] = Counter()
    for row in comparison.rows:
        if row.mse is None or row.mse.value is None:
            continue
        at = row.samples + 0.06 * seen[row.samples]  # estimates of one cost stand side by side
        seen[row.samples] += 1
        value = float(row.mse.value)
        if row.mse.low is not None and row.mse.high is not None:
            axes.plot([at, at], [row.mse.low, row.mse.high], color=GREY, linewidth=1.2)
        axes.plot(at, value, "o", markersize=5, color=BEFORE if row.needs_labels else AFTER)
        axes.annotate(row.name, (at, value), xytext=(5, 3), textcoords="offset points", fontsize=7)
    for level, name in ((comparison.constant, "the best constant"), (comparison.single, "one judged response")):
        axes.axhline(level, color="black", linewidth=0.8, linestyle="--")
        axes.annotate(name, (1.0, level), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
    axes.set(xlabel="responses read of a question", ylabel="squared error of capability")
    axes.set_xlim(-0.3, max(seen, default=0) + 1.5)
    frame(axes)
    if title:
        axes.set_title(title, fontsize=11)
    return figure
