"""Strategies on one test set: their curves on the sides' own samples, and the report that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE, confidence_of, how_to_get
from selfcal_lightning.confidence.features import ConfidenceScores, ResponseTable, score_confidence
from selfcal_lightning.confidence.fusion import WeighedPool, is_probability
from selfcal_lightning.core.progress import Progress, Stage
from selfcal_lightning.evaluation.curves import (
    Reshuffles,
    StrategyCurve,
    StrategySettings,
    Tuned,
    evaluate_jobs,
    make_jobs,
    needs_confidence,
    powers_of_two,
    tune,
)
from selfcal_lightning.evaluation.metrics import summarise
from selfcal_lightning.evaluation.statistics import (
    REFERENCE,
    BreakEvenRow,
    BudgetRow,
    ConsensusRow,
    Resampled,
    SavingRow,
    break_even_rows,
    budget_rows,
    consensus_rows,
    headline,
    resample_curves,
    saving_rows,
    weighing_confidences,
)
from selfcal_lightning.evaluation.tables import format_estimate
from selfcal_lightning.evaluation.test_set import Calibrated, EvaluatedTest
from selfcal_lightning.inference.threshold_fitting import confidence_quantiles
from selfcal_lightning.metrics.calibration import ReliabilityBins, reliability_bins


class SideStrategies:
    """Runs every strategy on the samples of one side; what comes of its calibration questions is computed once."""

    def __init__(self, side: str, calibrated: Calibrated, settings: StrategySettings) -> None:
        self.side, self.calibrated = side, calibrated
        self._settings = settings
        self._labels = list(dict.fromkeys([REFERENCE, *settings.strategies]))
        self._tuned: dict[int, Tuned] = {}
        self._calibration: dict[int, list[StrategyCurve]] = {}

    def run(self, weighed: WeighedPool, width: int, *, name: str) -> list[StrategyCurve]:
        """Run all strategies on some samples."""
        settings, source = self._settings, self.calibrated.second_half or weighed
        with Stage(f"Tuning strategies for {name}, {self.side}"):
            jobs = make_jobs(
                self._labels,
                weighed.confidences,
                width=width,
                thresholds=settings.thresholds,
                tuned=self._tuned_at(width),
                values={name: confidence_quantiles(source.pool.entries, name) for name in source.confidences},
            )
            if REFERENCE not in settings.strategies:  # nobody asked for votes by what cannot weigh them
                can_weigh = {None, *weighing_confidences(weighed)} & {None, *weighing_confidences(source)}
                jobs = [job for job in jobs if job.label != REFERENCE or job.strategy.confidence in can_weigh]
            reshuffles = Reshuffles(
                weighed.pool,
                [None, *weighed.confidences],
                width=width,
                num_reshuffles=settings.num_reshuffles,
                seed=settings.seed,
                query_tokens=weighed.query_tokens,
            )
        total = len(jobs) * reshuffles.num_orders
        with Progress(total, label=f"Strategies on {name}, {self.side}", unit="orders of a strategy") as progress:
            return evaluate_jobs(reshuffles, jobs, progress=progress.update)

    def on_calibration(self, width: int) -> list[StrategyCurve] | None:
        """Return the curves that settings are chosen on; None without calibration questions."""
        half = self.calibrated.second_half
        if half is None:
            return None
        if width not in self._calibration:
            self._calibration[width] = self.run(half, width, name="calibration")
        return self._calibration[width]

    def _tuned_at(self, width: int) -> Tuned:
        half = self.calibrated.first_half
        if half is None:
            return {}
        if width not in self._tuned:
            self._tuned[width] = tune(
                half.pool.entries, self._labels, self.calibrated.names, max_samples=width, seed=self._settings.seed
            )
        return self._tuned[width]


def confidence_findings(side: str, scores: Sequence[ConfidenceScores], rows: Sequence[BudgetRow]) -> list[str]:
    """Return a sentence for each confidence of a side, on the best strategy at the budget shown in full."""
    if not rows:
        return []
    budget = headline(sorted({row.budget for row in rows}))
    here = [row for row in rows if (row.contender.side, row.budget) == (side, budget)]
    return [_finding(side, one, budget, [r for r in here if r.contender.confidence == one.name]) for one in scores]


def _finding(side: str, score: ConfidenceScores, budget: int, rows: Sequence[BudgetRow]) -> str:
    changes = [row for row in rows if row.change.value is not None]
    within = "unknown" if score.within_question_auroc is None else f"{score.within_question_auroc:.3f}"
    reason = f"AUROC within questions {within} (.5 is chance)"
    if not changes:
        return f"{side}, {score.name}: no strategy that reads it keeps a budget of {budget} samples; {reason}."
    best = max(changes, key=lambda row: row.change.value or 0.0)
    at = f"{best.contender.strategy} at {best.samples.value:.1f} samples"
    change = format_estimate(best.change, signed=True)
    if best.change.is_positive:
        return f"{side}, {score.name}: {at} beats {budget} plain votes by {change}; {reason}."
    return (
        f"{side}, {score.name}: no strategy that reads it beats {budget} plain votes beyond the interval "
        f"(best: {at}, {change}); {reason}."
    )


@dataclass(frozen=True)
class StrategyReport:
    """What strategies do on one test set."""

    test: str
    width: int
    num_questions: int
    unreadable: Mapping[str, float]
    confidences: Mapping[str, list[ConfidenceScores]]
    reliability: Mapping[str, Mapping[str, ReliabilityBins]]
    curves: Sequence[Resampled]
    budgets: list[BudgetRow]
    savings: list[SavingRow]
    consensus: list[ConsensusRow]
    break_even: list[BreakEvenRow]
    findings: list[str]
    notes: list[str]


def run_strategies(
    test: EvaluatedTest, sides: Mapping[str, SideStrategies], settings: StrategySettings
) -> list[Resampled]:
    """Run all strategies on all sides' samples of a test set, and resample its questions."""
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
    """Return what the curves of a test set say."""
    savings = saving_rows(resampled, settings.targets or default_targets(test.width))
    budgets = budget_rows(resampled, settings.budgets or powers_of_two(test.width))
    scores = {side: score_confidences(pool) for side, pool in test.pools.items()}
    has_calibration = all(row.calibration is not None for row in resampled)
    return StrategyReport(
        test=test.name,
        width=test.width,
        num_questions=test.num_questions,
        unreadable={side: summarise(found.pool.entries, name=None).unreadable for side, found in test.pools.items()},
        confidences=scores,
        reliability={side: _reliability(weighed) for side, weighed in test.pools.items()},
        curves=resampled,
        budgets=budgets,
        savings=savings,
        consensus=[row for side, pool in test.pools.items() for row in consensus_rows(side, pool)],
        break_even=[] if settings.cost_tokens is None else break_even_rows(savings, settings.cost_tokens),
        findings=[
            *(text for side, rows in scores.items() for text in confidence_findings(side, rows, budgets)),
            *_bias_notes(scores),
        ],
        notes=_notes(test, settings, has_calibration=has_calibration),
    )


def default_targets(width: int) -> list[int]:
    """Return the sizes of the votes that are to be matched."""
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
    """Say how much of the calibration errors is due to chance."""
    notes = []
    for side, rows in scores.items():
        errors = [f"{row.ece_debiased:.3f} ({row.name})" for row in rows if row.ece_debiased is not None]
        if errors:
            notes.append(f"{side}: ECE without the part that chance alone adds: {', '.join(errors)}.")
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
