"""Tables of estimates of capability, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from selfcal_lightning.evaluation.capability.asking import AskingRow
from selfcal_lightning.evaluation.capability.budgets import BudgetRow
from selfcal_lightning.evaluation.capability.comparison import CapabilityComparison, EstimatorRow
from selfcal_lightning.evaluation.capability.decomposition import DecompositionRow, DefinitionGap
from selfcal_lightning.evaluation.capability.mixing import MixingRow
from selfcal_lightning.evaluation.capability.pass_at_k import PassAtKCurve
from selfcal_lightning.evaluation.reports.calibration_tables import format_estimate
from selfcal_lightning.functional.estimates import Estimate

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
