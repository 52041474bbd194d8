"""Strategies on one test set: their curves on the sides' own samples, and the report that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE, confidence_of, how_to_get
from selfcal_lightning.confidence.fitting.features import ResponseTable
from selfcal_lightning.confidence.fitting.scores import ConfidenceScores, score_confidence
from selfcal_lightning.confidence.fitting.weighed_pool import WeighedPool, is_probability
from selfcal_lightning.evaluation.reports.strategy_rows import (
    BreakEvenRow,
    BudgetRow,
    ConsensusRow,
    CurveRow,
    SavingRow,
)
from selfcal_lightning.evaluation.strategies.consensus import consensus_rows
from selfcal_lightning.evaluation.strategies.findings import confidence_findings
from selfcal_lightning.evaluation.strategies.plans import needs_confidence
from selfcal_lightning.evaluation.strategies.settings import StrategySettings
from selfcal_lightning.evaluation.strategies.side import SideStrategies
from selfcal_lightning.evaluation.strategies.statistics import (
    Resampled,
    break_even_rows,
    budget_rows,
    resample_curves,
    saving_rows,
)
from selfcal_lightning.evaluation.test_set import EvaluatedTest
from selfcal_lightning.functional.calibration import ReliabilityBins, reliability_bins
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.runtime.progress import Stage


@dataclass(frozen=True)
class StrategyReport:
    """What strategies do on one test set.

    Attributes:
        test: Name of the test set.
        width: Samples of each question that were used.
        num_questions: Questions.
        unreadable: Share of responses without a readable answer, by side; they count as wrong.
        confidences: By side, what each confidence is worth on the single responses.
        reliability: By side, the reliability diagram of each confidence that is a probability.
        curves: Every contender at every setting.
        budgets: Accuracy at a budget.
        savings: Cost at an accuracy.
        consensus: Near-unanimous answers, and risk against coverage.
        break_even: Questions until calibration has paid; empty where no cost was given or tokens are unknown.
        findings: Whether each confidence beats plain votes, and what that rests on.
        notes: What a reader must know.
    """

    test: str
    width: int
    num_questions: int
    unreadable: Mapping[str, float]
    confidences: Mapping[str, list[ConfidenceScores]]
    reliability: Mapping[str, Mapping[str, ReliabilityBins]]
    curves: list[CurveRow]
    budgets: list[BudgetRow]
    savings: list[SavingRow]
    consensus: list[ConsensusRow]
    break_even: list[BreakEvenRow]
    findings: list[str]
    notes: list[str]


def run_strategies(
    test: EvaluatedTest, sides: Mapping[str, SideStrategies], settings: StrategySettings
) -> list[Resampled]:
    """Run all strategies on all sides' samples of a test set, and resample its questions.

    Args:
        test: The samples.
        sides: What runs each side, with the settings that its calibration questions choose.
        settings: How.
    """
    curves = {side: sides[side].run(pool, test.width, name=test.name) for side, pool in test.pools.items()}
    found = {side: sides[side].on_calibration(test.width) for side in test.pools}
    calibration = {side: rows for side, rows in found.items() if rows is not None}
    with Stage(f"Resampling the questions of {test.name}"):
        return resample_curves(
            curves,
            calibration if len(calibration) == len(curves) else None,
            num_resamples=settings.num_resamples,
            seed=settings.seed,
        )


def report_on(test: EvaluatedTest, resampled: Sequence[Resampled], settings: StrategySettings) -> StrategyReport:
    """Return what the curves of a test set say.

    Args:
        test: The samples.
        resampled: See :func:`run_strategies`.
        settings: How.
    """
    savings = saving_rows(resampled, settings.targets or default_targets(test.width))
    budgets = budget_rows(resampled, settings.budgets or default_budgets(test.width))
    scores = {side: score_confidences(pool) for side, pool in test.pools.items()}
    has_calibration = all(row.calibration is not None for row in resampled)
    return StrategyReport(
        test=test.name,
        width=test.width,
        num_questions=test.num_questions,
        unreadable={side: _unreadable(weighed.pool) for side, weighed in test.pools.items()},
        confidences=scores,
        reliability={side: _reliability(weighed) for side, weighed in test.pools.items()},
        curves=[row.row() for row in resampled],
        budgets=budgets,
        savings=savings,
        consensus=[row for side, pool in test.pools.items() for row in consensus_rows(side, pool)],
        break_even=[] if settings.cost_tokens is None else break_even_rows(savings, settings.cost_tokens),
        findings=[text for side, rows in scores.items() for text in confidence_findings(side, rows, budgets)],
        notes=[*_bias_notes(scores), *_notes(test, settings, has_calibration=has_calibration)],
    )


def default_budgets(width: int) -> list[int]:
    """Return the powers of two up to ``width``.

    Example:
        >>> default_budgets(16), default_budgets(1)
        ([1, 2, 4, 8, 16], [1])
    """
    return [2**power for power in range(width.bit_length()) if 2**power <= width]


def default_targets(width: int) -> list[int]:
    """Return the sizes of the votes that are to be matched.

    Example:
        >>> default_targets(16), default_targets(8), default_targets(3)
        ([4, 8, 16], [4, 8], [3])
    """
    return [target for target in (4, 8, 16) if target <= width] or [width]


def score_confidences(weighed: WeighedPool) -> list[ConfidenceScores]:
    """Return AUROC, AUROC within questions and ECE of each confidence on the single responses."""
    if not weighed.confidences:
        return []
    table = ResponseTable.from_pool(weighed.pool.entries, weighed.confidences)
    return [
        score_confidence(name, table.values[:, column], table.correct, table.question)
        for column, name in enumerate(weighed.confidences)
    ]


def _unreadable(pool: RecordedPool) -> float:
    samples = [sample for entry in pool.entries for sample in entry.samples]
    return sum(sample.answer is None for sample in samples) / len(samples)


def _reliability(weighed: WeighedPool) -> dict[str, ReliabilityBins]:
    """Return the diagram of each confidence that is a probability, over the responses that have it."""
    found = {}
    samples = [sample for entry in weighed.pool.entries for sample in entry.samples]
    correct = np.fromiter((bool(sample.correct) for sample in samples), dtype=bool, count=len(samples))
    for name in weighed.confidences:
        values = (confidence_of(sample, name) for sample in samples)
        column = np.fromiter((math.nan if value is None else value for value in values), np.float64, len(samples))
        is_there = ~np.isnan(column)
        if is_there.any() and is_probability(weighed.pool, name):
            found[name] = reliability_bins(column[is_there], correct[is_there])
    return found


def _bias_notes(scores: Mapping[str, Sequence[ConfidenceScores]]) -> list[str]:
    """Say beside the calibration errors how much of them is chance."""
    notes = []
    for side, rows in scores.items():
        errors = [f"{row.ece_debiased:.3f} ({row.name})" for row in rows if row.ece_debiased is not None]
        if errors:
            notes.append(f"{side}: chance alone makes an ECE; less what it adds: {', '.join(errors)}.")
    return notes


def _notes(test: EvaluatedTest, settings: StrategySettings, *, has_calibration: bool) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes, width = [], test.width
    pools = [found.pool for found in test.pools.values()]
    if any(len(entry.samples) > width for pool in pools for entry in pool.entries):
        most = max(len(entry.samples) for pool in pools for entry in pool.entries)
        shortest = min((pool.shortest for pool in pools), key=lambda entry: len(entry.samples))
        reason = "as asked" if settings.max_samples else f"as many as {shortest.question.id!r} has"
        notes.append(
            f"Budgets end at {width} samples, {reason}; questions with more (up to {most}) give random subsets."
        )
    left_out = [label for label in settings.strategies if needs_confidence(label)]
    for side, found in test.pools.items():
        if not found.confidences and left_out:
            notes.append(f"{side}: not run for want of a confidence: {', '.join(left_out)}. {how_to_get(P_TRUE)}")
        if not found.pool.has_lengths:
            notes.append(f"{side}: the lengths of responses are unknown, so costs in tokens are not stated.")
        elif P_TRUE in found.confidences and not found.pool.query_tokens:
            notes.append(f"{side}: the length of the confidence query is unknown, so tokens are those of responses.")
    if not has_calibration:
        notes.append(
            "No calibration split: settings at a budget are chosen on these questions by their cost alone, and the "
            "samples needed for an accuracy are read off these curves."
        )
    if settings.num_reshuffles == 0:
        notes.append("The recorded order alone: curves carry the luck of one order.")
    if len(pools[0].entries) < 2:
        notes.append("One question only: there is nothing to resample, so no number has an interval.")
    return notes
