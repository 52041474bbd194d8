"""Figures of capability: predicted against shown, pass@k over the number of samples, and what budgets solve."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from selfcal_lightning.evaluation.capability.budgets import BudgetRow
from selfcal_lightning.evaluation.capability.estimates import TestQuestions
from selfcal_lightning.evaluation.capability.mixing import MixingRow
from selfcal_lightning.evaluation.capability.pass_at_k import MAPS, PassAtKCurve
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.functional.calibration import reliability_bins
from selfcal_lightning.functional.discrimination import spearman
from selfcal_lightning.metrics.drawing import AFTER, BEFORE, GREY, RIGHT, WRONG, draw_reliability_of, frame, number

_COLOURS = (AFTER, BEFORE, RIGHT, WRONG, GREY)


def capability_reliability(test: TestQuestions, *, title: str = "") -> Figure:
    """Draw the share of right responses over the predicted capability, one panel an estimate that is a probability."""
    drawn = {name: v for name, v in test.estimates.items() if ((v >= 0.0) & (v <= 1.0)).all()}
    figure = Figure(figsize=(0.6 + 3.6 * max(len(drawn), 1), 4.2), layout="constrained")
    panels = figure.subplots(1, max(len(drawn), 1), squeeze=False)[0]
    for axes, (name, values) in zip(panels, drawn.items(), strict=False):
        draw_reliability_of(
            axes, reliability_bins(values, test.truth.expected_accuracy), outcome="share of right responses"
        )
        axes.set_xlabel("predicted capability")
        axes.set_title(f"{name}: {axes.get_title()}", fontsize=10)
    if title:
        figure.suptitle(title, fontsize=11)
    return figure


def capability_scatter(predicted: Floats, share: Floats, *, title: str = "") -> Figure:
    """Draw every question: the share of right responses over the predicted capability, both in [0, 1] [Q]."""
    figure = Figure(figsize=(4.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.scatter(predicted, share, s=10, color=BEFORE, alpha=0.4, linewidths=0)
    axes.plot([0, 1], [0, 1], color="black", linewidth=1.0, linestyle=(0, (4, 3)))
    frame(axes)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axes.set(xlabel="predicted capability", ylabel="share of right responses")
    axes.set_title(f"{title}: Spearman {number(spearman(predicted, share))}", fontsize=11)
    return figure


def budget_figure(rows: Sequence[BudgetRow], *, title: str = "") -> Figure:
    """Draw what sharing samples by an estimate solves beyond an even share, over the budget."""
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(each for each in rows if each.gain is not None):
        gains = [float(estimate.value or 0.0) for estimate in row.gain or ()]
        style = "-" if position < len(_COLOURS) else "--"
        axes.plot(row.budgets, gains, style, marker="o", markersize=4, color=_COLOURS[position % len(_COLOURS)],
                  linewidth=1.6, label=row.way)  # fmt: skip
    axes.axhline(0.0, color="black", linewidth=0.8)
    if rows:
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows[0].budgets, [str(budget) for budget in rows[0].budgets])
    frame(axes)
    axes.set(xlabel="mean samples a question", ylabel="share of questions solved, beyond an even share")
    axes.legend(loc="upper left", fontsize=8, frameon=False)
    if title:
        axes.set_title(title, fontsize=11)
    return figure


def mixing_figure(rows: Sequence[MixingRow], *, title: str = "") -> Figure:
    """Draw what plans solve beyond an even share, over how much of it is mixed in."""
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for position, row in enumerate(rows):
        colour, style = _COLOURS[position % len(_COLOURS)], "-" if position < len(_COLOURS) else "--"
        gains = [float(estimate.value or 0.0) for estimate in row.gain]
        axes.plot(row.even_shares, gains, style, marker="o", markersize=4, color=colour, linewidth=1.6, label=row.way)
    axes.axhline(0.0, color="black", linewidth=0.8)
    frame(axes)
    budget = f", {rows[0].budget} samples a question" if rows else ""
    axes.set(xlabel=f"even share mixed in{budget}", ylabel="share of questions solved, beyond an even share")
    axes.legend(fontsize=8, frameon=False)
    if title:
        axes.set_title(title, fontsize=11)
    return figure


def pass_at_k_figure(curves: Sequence[PassAtKCurve], *, title: str = "") -> Figure:
    """Draw pass@k as the responses show it, and as each estimate predicts it."""
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(curve.name for curve in curves))
    for curve in curves:
        colour = _COLOURS[names.index(curve.name) % len(_COLOURS)]
        style = "--" if curve.way == MAPS else "-"
        axes.plot(curve.k, curve.predicted, style, color=colour, linewidth=1.6, label=f"{curve.name}, {curve.way}")
    if curves:
        axes.plot(curves[0].k, curves[0].actual, "o-", color="black", linewidth=1.8, markersize=4, label="responses")
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves[0].k, [str(k) for k in curves[0].k])
    frame(axes)
    axes.set(xlabel="samples k", ylabel="pass@k", ylim=(0.0, 1.0))
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    if title:
        axes.set_title(title, fontsize=11)
    return figure
