"""Strategies on one test set, from pools to rows: the sides' own samples, settings chosen on calibration questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE, confidence_of, how_to_get
from selfcal_lightning.confidence.features import ResponseTable
from selfcal_lightning.confidence.scores import ConfidenceScores, score_confidence
from selfcal_lightning.confidence.splits import check_not_fitted_on
from selfcal_lightning.pipelines.calibrated_sides import Calibrated
from selfcal_lightning.pipelines.consensus import consensus_rows
from selfcal_lightning.pipelines.findings import confidence_findings
from selfcal_lightning.pipelines.fitted_confidences import WeighedPool, weigh_pool
from selfcal_lightning.pipelines.pools import RecordedPool
from selfcal_lightning.pipelines.progress import Progress
from selfcal_lightning.pipelines.reshuffles import Reshuffles
from selfcal_lightning.pipelines.strategy_evaluation import StrategyCurve, check_pool, evaluate_jobs
from selfcal_lightning.pipelines.strategy_jobs import make_jobs, needs_confidence
from selfcal_lightning.pipelines.strategy_settings import StrategySettings
from selfcal_lightning.pipelines.strategy_statistics import (
    Resampled,
    break_even_rows,
    budget_rows,
    resample_curves,
    saving_rows,
)
from selfcal_lightning.pipelines.tuning import Tuned, tune
from selfcal_lightning.reports.strategy_rows import BreakEvenRow, BudgetRow, ConsensusRow, CurveRow, SavingRow


@dataclass(frozen=True)
class StrategyReport:
    """What strategies do on one test set.

    Attributes:
        test: Name of the test set.
        width: Samples of each question that were used.
        num_questions: Questions.
        unreadable: Share of responses without a readable answer, by side; they count as wrong.
        confidences: By side, what each confidence is worth on the single responses.
        curves: Every contender at every setting.
        budgets: Accuracy at a budget.
        savings: Cost at an accuracy.
        consensus: Near-unanimous answers, and risk against coverage.
        break_even: Questions until calibration has paid; empty where no cost was given or tokens are unknown.
        findings: Whether each confidence beats plain votes, and what that rests on.
        notes: What a reader must know.
        resampled: The curves on resamples, for further comparisons.
        pools: The samples with their confidences, by side.
    """

    test: str
    width: int
    num_questions: int
    unreadable: Mapping[str, float]
    confidences: Mapping[str, list[ConfidenceScores]]
    curves: list[CurveRow]
    budgets: list[BudgetRow]
    savings: list[SavingRow]
    consensus: list[ConsensusRow]
    break_even: list[BreakEvenRow]
    findings: list[str]
    notes: list[str]
    resampled: list[Resampled] = field(repr=False)
    pools: Mapping[str, WeighedPool] = field(repr=False)


class StrategyEvaluation:
    """Evaluates test sets one after the other; what comes of the calibration questions is computed once.

    Args:
        calibrated: By side.
        settings: How.
    """

    def __init__(self, calibrated: Mapping[str, Calibrated], settings: StrategySettings) -> None:
        self._calibrated, self._settings = calibrated, settings
        self._chosen_on: dict[tuple[str, int], list[StrategyCurve]] = {}
        self._tuned: dict[tuple[str, int], Tuned] = {}
        self._values: dict[str, Mapping[str, tuple[float, ...]]] = {}

    def evaluate(self, test: str, pools: Mapping[str, RecordedPool]) -> StrategyReport:
        """Evaluate all strategies on all sides' samples of one test set.

        Args:
            test: Its name.
            pools: By side; the first side's self-consistency is what the others are held against.

        Raises:
            MissingConfidenceError: A confidence asked for is absent; names the estimator to run.
            ValueError: The sides have different questions, some of them were calibrated on, or a pool cannot be
                evaluated as asked.
        """
        settings = self._settings
        for side, pool in pools.items():
            found = self._calibrated[side]
            if found.fitted_on is not None:
                check_not_fitted_on(pool.entries, found)  # type: ignore[arg-type]
        pools = _same_questions(test, pools)
        width = _width(test, pools, self._calibrated, settings)
        weighed = {
            side: weigh_pool(pool, self._calibrated[side].names, self._calibrated[side].scorers)
            for side, pool in pools.items()
        }
        curves = {side: self._run(side, pool, width, f"{test}, {side}") for side, pool in weighed.items()}
        resampled = resample_curves(
            curves, self._calibration_curves(list(pools), width), num_resamples=settings.num_resamples,
            seed=settings.seed,
        )  # fmt: skip
        savings = saving_rows(resampled, settings.targets or default_targets(width))
        budgets = budget_rows(resampled, settings.budgets or default_budgets(width))
        scores = {side: score_confidences(pool) for side, pool in weighed.items()}
        return StrategyReport(
            test=test,
            width=width,
            num_questions=len(next(iter(pools.values())).entries),
            unreadable={side: _unreadable(pool) for side, pool in pools.items()},
            confidences=scores,
            curves=[row.row() for row in resampled],
            budgets=budgets,
            savings=savings,
            consensus=[row for side, pool in weighed.items() for row in consensus_rows(side, pool)],
            break_even=[] if settings.cost_tokens is None else break_even_rows(savings, settings.cost_tokens),
            findings=[text for side, rows in scores.items() for text in confidence_findings(side, rows, budgets)],
            notes=_notes(weighed, {side: self._calibrated[side] for side in pools}, width, settings),
            resampled=resampled,
            pools=weighed,
        )

    def _calibration_curves(self, sides: Sequence[str], width: int) -> dict[str, list[StrategyCurve]] | None:
        """Return the curves that settings are chosen on; None unless every side has calibration questions."""
        for side in sides:
            half = self._calibrated[side].second_half
            if half is None:
                return None
            if (side, width) not in self._chosen_on:
                self._chosen_on[side, width] = self._run(side, half, width, f"calibration, {side}")
        return {side: self._chosen_on[side, width] for side in sides}

    def _run(self, side: str, weighed: WeighedPool, width: int, label: str) -> list[StrategyCurve]:
        settings = self._settings
        labels = list(dict.fromkeys(["self_consistency", *settings.strategies]))
        jobs = make_jobs(
            labels,
            weighed.confidences,
            width=width,
            thresholds=settings.thresholds,
            tuned=self._tuned_settings(side, labels, width),
            values=self._values.setdefault(side, _quantiles(self._calibrated[side].second_half or weighed)),
        )
        reshuffles = Reshuffles(
            weighed.pool,
            [None, *weighed.confidences],
            width=width,
            num_reshuffles=settings.num_reshuffles,
            seed=settings.seed,
            query_tokens=weighed.query_tokens,
        )
        total = len(jobs) * reshuffles.num_orders
        with Progress(total, label=f"Strategies on {label}", unit="orders of a strategy") as progress:
            return evaluate_jobs(reshuffles, jobs, progress=progress.update)

    def _tuned_settings(self, side: str, labels: Sequence[str], width: int) -> Tuned:
        half = self._calibrated[side].first_half
        if half is None:
            return {}
        if (side, width) not in self._tuned:
            names = self._calibrated[side].names
            self._tuned[side, width] = tune(half.pool.entries, labels, names, max_samples=width)
        return self._tuned[side, width]


def _quantiles(weighed: WeighedPool) -> dict[str, tuple[float, ...]]:
    """Return fifty quantiles of each confidence that lies in [0, 1]: a narrow range needs thresholds of its own."""
    found = {}
    for name in weighed.confidences:
        values = [
            value
            for entry in weighed.pool.entries
            for sample in entry.samples
            if sample.answer is not None and (value := confidence_of(sample, name)) is not None
        ]
        levels = np.quantile(values, np.linspace(0.01, 0.99, 50)) if values else np.zeros(0)
        found[name] = tuple(round(float(level), 6) for level in levels if 0.0 <= level <= 1.0)
    return found


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


def _same_questions(test: str, pools: Mapping[str, RecordedPool]) -> dict[str, RecordedPool]:
    """Return the pools with their questions in the order of the first side; pairs need the same ones."""
    order = {entry.question.id: position for position, entry in enumerate(next(iter(pools.values())).entries)}
    aligned = {}
    for side, pool in pools.items():
        ids = {entry.question.id for entry in pool.entries}
        if ids != set(order):
            unshared = sorted(ids ^ set(order))
            raise ValueError(
                f"Expected all sides of test set {test!r} to answer the same questions, but got {len(unshared)} that "
                f"{side!r} or {next(iter(pools))!r} lacks, such as {unshared[0]!r}. Evaluate them apart, or sample "
                "the rest."
            )
        entries = sorted(pool.entries, key=lambda entry: order[entry.question.id])
        aligned[side] = replace(pool, entries=tuple(entries))
    return aligned


def _width(
    test: str, pools: Mapping[str, RecordedPool], calibrated: Mapping[str, Calibrated], settings: StrategySettings
) -> int:
    """Return the budget that every question of every pool can pay."""
    named = [(f"test set {test!r} ({side})", pool) for side, pool in pools.items()]
    named += [
        (f"the calibration split ({side})", found.second_half.pool)
        for side, found in calibrated.items()
        if found.second_half is not None
    ]
    return min(check_pool(pool, name, max_samples=settings.max_samples) for name, pool in named)


def _unreadable(pool: RecordedPool) -> float:
    samples = [sample for entry in pool.entries for sample in entry.samples]
    return sum(sample.answer is None for sample in samples) / len(samples)


def _notes(
    weighed: Mapping[str, WeighedPool], calibrated: Mapping[str, Calibrated], width: int, settings: StrategySettings
) -> list[str]:
    """Say what a reader of the numbers must know."""
    notes = []
    pools = [found.pool for found in weighed.values()]
    if any(len(entry.samples) > width for pool in pools for entry in pool.entries):
        most = max(len(entry.samples) for pool in pools for entry in pool.entries)
        shortest = min((pool.shortest for pool in pools), key=lambda entry: len(entry.samples))
        reason = "as asked" if settings.max_samples else f"as many as {shortest.question.id!r} has"
        notes.append(
            f"Budgets end at {width} samples, {reason}; questions with more (up to {most}) give random subsets."
        )
    left_out = [label for label in settings.strategies if needs_confidence(label)]
    for side, found in weighed.items():
        if not found.confidences and left_out:
            notes.append(f"{side}: not run for want of a confidence: {', '.join(left_out)}. {how_to_get(P_TRUE)}")
        if not found.pool.has_lengths:
            notes.append(f"{side}: the lengths of responses are unknown, so costs in tokens are not stated.")
        elif P_TRUE in found.confidences and not found.pool.query_tokens:
            notes.append(f"{side}: the length of the confidence query is unknown, so tokens are those of responses.")
    if any(found.second_half is None for found in calibrated.values()):
        notes.append(
            "No calibration split: settings at a budget are chosen on these questions by their cost alone, and the "
            "samples needed for an accuracy are read off these curves."
        )
    if settings.num_reshuffles == 0:
        notes.append("The recorded order alone: curves carry the luck of one order.")
    if len(pools[0].entries) < 2:
        notes.append("One question only: there is nothing to resample, so no number has an interval.")
    return notes
