"""Tables of estimates of capability, for the terminal and in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from selfcal_lightning.capability import evaluation
from selfcal_lightning.capability.budgets import MAPS, BudgetRow, MixingRow, PassAtKCurve
from selfcal_lightning.evaluation.tables import format_estimate, markdown_table, rich_table
from selfcal_lightning.metrics import drawing
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.metrics.calibration import reliability_bins
from selfcal_lightning.metrics.discrimination import spearman

_COLOURS = (drawing.AFTER, drawing.BEFORE, drawing.RIGHT, drawing.WRONG, drawing.GREY)


def capability_reliability(test: evaluation.TestQuestions) -> Figure:
    drawn = test.probabilities
    figure = Figure(figsize=(0.6 + 3.6 * max(len(drawn), 1), 4.2), layout="constrained")
    panels = figure.subplots(1, max(len(drawn), 1), squeeze=False)[0]
    for axes, (name, values) in zip(panels, drawn.items(), strict=False):
        bins = reliability_bins(values, test.truth.expected_accuracy)
        drawing.draw_reliability_of(axes, bins, outcome="share of right responses")
        axes.set_xlabel("predicted capability")
        axes.set_title(f"{name}: {axes.get_title()}", fontsize=10)
    return figure


def capability_scatter(predicted: Floats, share: Floats, *, title: str) -> Figure:
    """Draw a point for every question; ``predicted`` and ``share`` lie in [0, 1] [Q]."""
    figure, axes = drawing.axes_to_draw_on(None)
    axes.scatter(predicted, share, s=10, color=drawing.BEFORE, alpha=0.4, linewidths=0)
    axes.plot([0, 1], [0, 1], color="black", linewidth=1.0, linestyle=(0, (4, 3)))
    drawing.frame(axes)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axes.set(xlabel="predicted capability", ylabel="share of right responses")
    axes.set_title(f"{title}: Spearman {drawing.number(spearman(predicted, share))}", fontsize=11)
    return figure


def budget_figure(rows: Sequence[BudgetRow]) -> Figure:
    """Draw what allocating samples by an estimate solves beyond a uniform allocation, over the budget."""
    gains = {row.way: row.gain for row in rows if row.gain is not None}
    figure, axes = _gains_figure(gains, rows[0].budgets)
    axes.set_xscale("log", base=2)
    axes.set_xticks(rows[0].budgets, [str(budget) for budget in rows[0].budgets])
    axes.set_xlabel("mean samples a question")
    return figure


def mixing_figure(rows: Sequence[MixingRow]) -> Figure:
    """Draw what plans solve beyond a uniform allocation, over how much of that is mixed in."""
    figure, axes = _gains_figure({row.way: row.gain for row in rows}, rows[0].uniform_shares)
    axes.set_xlabel(f"share of a uniform allocation mixed in, {rows[0].budget} samples a question")
    return figure


def _gains_figure(gains: Mapping[str, Sequence[Estimate]], places: Sequence[float]) -> tuple[Figure, Axes]:
    figure, axes = drawing.axes_to_draw_on(None, size=(5.6, 4.2))
    for position, (way, estimates) in enumerate(gains.items()):
        values = [float(estimate.value or 0.0) for estimate in estimates]
        colour, style = _COLOURS[position % len(_COLOURS)], "-" if position < len(_COLOURS) else "--"
        axes.plot(places, values, style, marker="o", markersize=4, color=colour, linewidth=1.6, label=way)
    axes.axhline(0.0, color="black", linewidth=0.8)
    drawing.frame(axes)
    axes.set_ylabel("share of questions solved,\nbeyond a uniform allocation")
    axes.legend(fontsize=8, frameon=False, handlelength=4.0)
    return figure, axes


def pass_at_k_figure(curves: Sequence[PassAtKCurve]) -> Figure:
    figure, axes = drawing.axes_to_draw_on(None, size=(5.6, 4.2))
    names = list(dict.fromkeys(curve.name for curve in curves))
    for curve in curves:
        colour = _COLOURS[names.index(curve.name) % len(_COLOURS)]
        style = "--" if curve.way == MAPS else "-"
        axes.plot(curve.k, curve.predicted, style, color=colour, linewidth=1.6, label=f"{curve.name}, {curve.way}")
    if curves:
        axes.plot(curves[0].k, curves[0].actual, "o-", color="black", linewidth=1.8, markersize=4, label="responses")
        axes.set_xscale("log", base=2)
        axes.set_xticks(curves[0].k, [str(k) for k in curves[0].k])
    drawing.frame(axes)
    axes.set(xlabel="samples k", ylabel="pass@k", ylim=(0.0, 1.0))
    axes.legend(loc="lower right", fontsize=8, frameon=False)
    return figure


BUDGET_NOTE = (
    "Budgets: expected share of questions with a right sample, at a mean of B samples a question; below the first row "
    "the difference from it. Shared before any is drawn, or one at a time, with a verifier that stops at the first "
    "right one. Samples that an estimate has read are not charged."
)
ABSTENTION_NOTE = (
    "Abstention: share of all right responses that is lost where so many questions of least capability are left out, "
    "and the share of right responses to the others."
)


class ReportTable(NamedTuple):
    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def for_terminal(self) -> Table:
        return rich_table(self.headings, self.rows, title=self.title, left=self.headings[:1])


def decomposition_table(rows: Sequence[evaluation.DecompositionRow]) -> ReportTable:
    headings = ("estimate", "error against responses", "= error of capability", "+ spread of responses")
    cells = [[one.name, *map(_shown, (one.response, one.capability, one.spread))] for one in rows]
    return ReportTable("errors against single responses, taken apart", headings, cells)


def gap_note(gap: evaluation.DefinitionGap) -> str:
    plain = (gap.mae, gap.spearman, gap.kendall)
    mae, spearman, kendall = ("undefined" if v is None else f"{v:.3f}".replace("0.", ".", 1) for v in plain)
    return (
        f"The verdict on one response a question differs from capability by {mae} on average (Spearman {spearman}, "
        f"Kendall {kendall}; means over {gap.draws} draws)."
    )


def comparison_table(comparison: evaluation.CapabilityComparison) -> ReportTable:
    headings = ("estimate", "samples", "labels", "MSE", "against the first", "skill", "Spearman", "ECE")
    rows = []
    for row in comparison.rows:
        plain = [row.name, str(row.samples), "yes" if row.needs_labels else "no", _shown(row.mse)]
        rows.append([*plain, _shown(row.difference, signed=True), *map(_shown, (row.skill, row.spearman, row.ece))])
    return ReportTable("estimates of capability", headings, rows)


def curve_table(curves: Sequence[PassAtKCurve]) -> ReportTable:
    headings = ["estimate", "pass@k by", "curve error", *(f"MSE at {k}" for k in (curves[0].k if curves else ()))]
    cells = [[c.name, c.way, _shown(c.curve_error), *map(_shown, c.instance_mse)] for c in curves]
    return ReportTable("pass@k", headings, cells)


def budget_table(rows: Sequence[BudgetRow]) -> ReportTable:
    headings = ["samples shared", *(f"B = {budget}" for budget in rows[0].budgets)]
    cells = [[row.way, *(_shown(one, signed=row.gain is not None) for one in row.gain or row.solved)] for row in rows]
    return ReportTable("budgets", headings, cells)


def mixing_table(rows: Sequence[MixingRow]) -> ReportTable:
    shares = (f"{share:.0%} uniform" for share in rows[0].uniform_shares)
    headings = [f"beyond a uniform allocation, B = {rows[0].budget}", *shares]
    cells = [[row.way, *(_shown(gain, signed=True) for gain in row.gain)] for row in rows]
    return ReportTable("a uniform allocation mixed in", headings, cells)


def abstention_table(rows: Sequence[evaluation.AbstentionRow]) -> ReportTable:
    shares = [f"{share:.0%} left out" for share in rows[0].left_out]
    headings = ["left out by", *(f"lost, {share}" for share in shares), *(f"pass@1, {share}" for share in shares)]
    cells = [[row.name, *map(_shown, row.lost), *map(_shown, row.pass_at_1)] for row in rows]
    return ReportTable("abstention", headings, cells)


@dataclass(frozen=True)
class CapabilityReport:
    """All that an evaluation finds, by its keys in capability.json."""

    comparison: evaluation.CapabilityComparison
    decomposition: Sequence[evaluation.DecompositionRow]
    definition_gap: evaluation.DefinitionGap
    pass_at_k: Sequence[PassAtKCurve]
    budgets: Sequence[BudgetRow]
    abstention: Sequence[evaluation.AbstentionRow]
    mixing: Sequence[MixingRow]

    def parts(self) -> list[ReportTable | str]:
        """Return the tables that have rows, and what is said below them."""
        parts: list[ReportTable | str] = [
            comparison_table(self.comparison),
            what_to_know(self.comparison),
            decomposition_table(self.decomposition),
            gap_note(self.definition_gap),
            curve_table(self.pass_at_k),
            budget_table(self.budgets),
            BUDGET_NOTE,
            mixing_table(self.mixing),
            abstention_table(self.abstention),
            ABSTENTION_NOTE,
        ]
        return [part for part in parts if isinstance(part, str) or part.rows]

    def as_markdown(self) -> str:
        texts = (part if isinstance(part, str) else markdown_table(part.headings, part.rows) for part in self.parts())
        return "\n\n".join(texts) + "\n"


def what_to_know(comparison: evaluation.CapabilityComparison) -> str:
    constant = "unknown (no spread beyond the noise)" if comparison.constant is None else f"{comparison.constant:.3f}"
    return (
        f"{comparison.num_questions:,} questions, judged by at least {comparison.num_samples} responses each, whose "
        f"noise is taken out of MSE and skill; mean capability {comparison.mean:.3f}. The best constant has an MSE of "
        f"{constant}, a random number {comparison.random:.3f}, and the verdict on one response, taken "
        f"as the capability, {comparison.single:.3f}. Intervals: 95 %, resampled over questions, paired."
    )


def _shown(estimate: Estimate | None, *, signed: bool = False) -> str:
    return "" if estimate is None else format_estimate(estimate, signed=signed)
