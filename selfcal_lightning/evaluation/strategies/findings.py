"""What the numbers say about each confidence, in a sentence: whether it beats plain votes, and if not, why."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.confidence.fitting.scores import ConfidenceScores
from selfcal_lightning.evaluation.reports.calibration_tables import format_estimate
from selfcal_lightning.evaluation.reports.strategy_rows import BudgetRow
from selfcal_lightning.evaluation.reports.strategy_tables import headline


def confidence_findings(side: str, scores: Sequence[ConfidenceScores], rows: Sequence[BudgetRow]) -> list[str]:
    """Return one sentence for each confidence of a side.

    It speaks of the budget that the tables show in full, and of the best strategy that reads the confidence there: the
    best of several on these questions, which flatters it a little.

    Args:
        side: Whose samples.
        scores: What each confidence is worth on single responses.
        rows: Accuracy at a budget, of all sides.
    """
    if not rows:
        return []
    budget = headline(sorted({row.budget for row in rows}))
    return [_finding(side, score, budget, [r for r in rows if _reads(r, side, score.name, budget)]) for score in scores]


def _reads(row: BudgetRow, side: str, confidence: str, budget: int) -> bool:
    return (row.contender.side, row.contender.confidence, row.budget) == (side, confidence, budget)


def _finding(side: str, score: ConfidenceScores, budget: int, rows: Sequence[BudgetRow]) -> str:
    changes = [row for row in rows if row.change.value is not None]
    within = "unknown" if score.within_question_auroc is None else f"{score.within_question_auroc:.3f}"
    reason = f"AUROC within questions {within} (.5 is chance)"
    if not changes:
        return f"{side}, {score.name}: no strategy that reads it keeps a budget of {budget} samples; {reason}."
    best = max(changes, key=lambda row: row.change.value or 0.0)
    at = f"{best.contender.strategy} at {best.samples.value:.1f} samples"
    change = format_estimate(best.change, signed=True)
    if best.is_better:
        return f"{side}, {score.name}: {at} beats {budget} plain votes by {change}; {reason}."
    return (
        f"{side}, {score.name}: no strategy that reads it beats {budget} plain votes beyond the interval "
        f"(best: {at}, {change}); {reason}."
    )
