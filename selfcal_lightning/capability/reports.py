"""Tables of estimates of capability, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich.table import Table

from selfcal_lightning.capability.budgets import MAPS, BudgetRow, MixingRow, PassAtKCurve
from selfcal_lightning.capability.evaluation import (
    AskingRow,
    CapabilityComparison,
    DecompositionRow,
    DefinitionGap,
    EstimatorRow,
    TestQuestions,
)
from selfcal_lightning.evaluation.tables import format_estimate
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.metrics.calibration import reliability_bins
from selfcal_lightning.metrics.discrimination import spearman
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


HEADINGS = ("estimate", "samples", "labels", "MSE", "against the first", "skill", "Spearman", "ECE")
BUDGET_NOTE = (
    "Budgets: expected share of questions with a right sample, at a mean of B samples a question; below the first row "
    "the difference from it. Shared before any is drawn, or one at a time, with a verifier that stops at the first "
    "right one. Samples that an estimate has read are not charged."
)
ASKING_NOTE = (
    "Not asking: share of all right responses that is lost where so many questions of least capability are left out, "
    "and the share of right responses to the others."
)
DECOMPOSITION_HEADINGS = (
    "estimate", "error against responses", "= error of capability", "+ spread of responses",
)  # fmt: skip
CURVE_HEADINGS = ("estimate", "pass@k by", "curve error")


def comparison_cells(row: EstimatorRow) -> list[str]:
    """Return the cells of an estimate, in the order of ``HEADINGS``."""
    return [
        row.name,
        str(row.samples),
        "yes" if row.needs_labels else "no",
        _shown(row.mse),
        _shown(row.difference, signed=True),
        _shown(row.skill),
        _shown(row.spearman),
        _shown(row.ece),
    ]


def curve_cells(curve: PassAtKCurve) -> list[str]:
    """Return the cells of a curve: its error, and the squared error of a question for each k."""
    return [curve.name, curve.way, _shown(curve.curve_error), *map(_shown, curve.instance_mse)]


def decomposition_cells(row: DecompositionRow) -> list[str]:
    """Return the cells of an estimate's error, taken apart."""
    return [row.name, *map(_shown, (row.response, row.capability, row.spread))]


def decomposition_table(rows: Sequence[DecompositionRow], *, title: str = "") -> Table:
    """Return the table of errors taken apart for a terminal."""
    return _table(DECOMPOSITION_HEADINGS, [decomposition_cells(row) for row in rows], title)


def gap_note(gap: DefinitionGap) -> str:
    """Return how far the two targets are apart.

    Example:
        >>> print(gap_note(DefinitionGap(0.25, 0.7, None)))
        The verdict on one response a question differs from capability by .250 on average (Spearman .700, Kendall \
undefined; means over 5 draws).
    """
    correlations = ["undefined" if value is None else _plain(value) for value in (gap.spearman, gap.kendall)]
    return (
        f"The verdict on one response a question differs from capability by {_plain(gap.mae)} on average (Spearman "
        f"{correlations[0]}, Kendall {correlations[1]}; means over {gap.draws} draws)."
    )


def comparison_table(comparison: CapabilityComparison, *, title: str = "") -> Table:
    """Return the table of estimates for a terminal."""
    return _table(HEADINGS, [comparison_cells(row) for row in comparison.rows], title)


def curve_table(curves: Sequence[PassAtKCurve], *, title: str = "") -> Table:
    """Return the table of pass@k for a terminal."""
    return _table(_curve_headings(curves), [curve_cells(curve) for curve in curves], title)


def budget_cells(row: BudgetRow) -> list[str]:
    """Return the cells of a way to share samples: what it solves, or what it solves beyond an even share."""
    return [row.way, *(_shown(e) for e in row.solved)] if row.gain is None else [
        row.way, *(_shown(gain, signed=True) for gain in row.gain)
    ]  # fmt: skip


def budget_table(rows: Sequence[BudgetRow], *, title: str = "") -> Table:
    """Return the table of budgets for a terminal."""
    return _table(_budget_headings(rows), [budget_cells(row) for row in rows], title)


def mixing_cells(row: MixingRow) -> list[str]:
    """Return the cells of a way to share samples, by how much of an even share is mixed in."""
    return [row.way, *(_shown(gain, signed=True) for gain in row.gain)]


def mixing_table(rows: Sequence[MixingRow], *, title: str = "") -> Table:
    """Return the table of mixing an even share in for a terminal."""
    return _table(_mixing_headings(rows), [mixing_cells(row) for row in rows], title)


def asking_cells(row: AskingRow) -> list[str]:
    """Return the cells of an estimate by which questions are left out: what is lost, then how right the others are."""
    return [row.name, *map(_shown, row.lost), *map(_shown, row.pass_at_1)]


def asking_table(rows: Sequence[AskingRow], *, title: str = "") -> Table:
    """Return the table of leaving questions out for a terminal."""
    return _table(_asking_headings(rows), [asking_cells(row) for row in rows], title)


def comparison_markdown(
    comparison: CapabilityComparison,
    curves: Sequence[PassAtKCurve],
    budgets: Sequence[BudgetRow] = (),
    *,
    parts: Sequence[DecompositionRow] = (),
    gap: DefinitionGap | None = None,
    asking: Sequence[AskingRow] = (),
    mixing: Sequence[MixingRow] = (),
) -> str:
    """Return all tables in Markdown, with what a reader must know."""
    tables = [
        _markdown(HEADINGS, [comparison_cells(row) for row in comparison.rows]),
        what_to_know(comparison),
        _markdown(DECOMPOSITION_HEADINGS, [decomposition_cells(row) for row in parts]) if parts else "",
        "" if gap is None else gap_note(gap),
        _markdown(_curve_headings(curves), [curve_cells(curve) for curve in curves]) if curves else "",
        _markdown(_budget_headings(budgets), [budget_cells(row) for row in budgets]) if budgets else "",
        BUDGET_NOTE if budgets else "",
        _markdown(_mixing_headings(mixing), [mixing_cells(row) for row in mixing]) if mixing else "",
        _markdown(_asking_headings(asking), [asking_cells(row) for row in asking]) if asking else "",
        ASKING_NOTE if asking else "",
    ]
    return "\n\n".join(table for table in tables if table) + "\n"


def what_to_know(comparison: CapabilityComparison) -> str:
    """Return what the numbers are held against."""
    return (
        f"{comparison.num_questions:,} questions, judged by at least {comparison.num_samples} responses each, whose "
        f"noise is taken out of MSE and skill; mean capability {comparison.mean:.3f}. The best constant has an MSE of "
        f"{comparison.constant:.3f}, a random number {comparison.random:.3f}, and the verdict on one response, taken "
        f"as the capability, {comparison.single:.3f}. Intervals: 95 %, resampled over questions, paired."
    )


def _budget_headings(rows: Sequence[BudgetRow]) -> list[str]:
    return ["samples shared", *(f"B = {budget}" for budget in (rows[0].budgets if rows else ()))]


def _mixing_headings(rows: Sequence[MixingRow]) -> list[str]:
    """Return the headings; the differences are from the even share alone."""
    shares = [f"{share:.0%} even" for share in (rows[0].even_shares if rows else ())]
    return [f"beyond an even share, B = {rows[0].budget}" if rows else "", *shares]


def _asking_headings(rows: Sequence[AskingRow]) -> list[str]:
    shares = [f"{share:.0%} left out" for share in (rows[0].left_out if rows else ())]
    return ["left out by", *(f"lost, {share}" for share in shares), *(f"pass@1, {share}" for share in shares)]


def _curve_headings(curves: Sequence[PassAtKCurve]) -> list[str]:
    return [*CURVE_HEADINGS, *(f"MSE at {k}" for k in (curves[0].k if curves else ()))]


def _plain(value: float) -> str:
    return f"{value:.3f}".replace("0.", ".", 1)


def _shown(estimate: Estimate | None, *, signed: bool = False) -> str:
    return "" if estimate is None else format_estimate(estimate, signed=signed)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> Table:
    table = Table(title=title or None)
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
