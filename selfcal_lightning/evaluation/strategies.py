"""Strategies on one test set: its confidences and budget, curves on the sides' own samples, and the report on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from selfcal_lightning.confidence import fusion
from selfcal_lightning.confidence.base import P_TRUE, how_to_get
from selfcal_lightning.confidence.features import ConfidenceScores, ResponseTable, score_confidence
from selfcal_lightning.confidence.registry import recorded_confidences
from selfcal_lightning.confidence.splits import halve_pool
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import Progress, Stage
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.tasks.judging import total_tokens
from selfcal_lightning.evaluation import curves, statistics
from selfcal_lightning.evaluation.metrics import summarise
from selfcal_lightning.evaluation.tables import format_estimate
from selfcal_lightning.inference.thresholds import confidence_quantiles
from selfcal_lightning.metrics.calibration import ReliabilityBins, reliability_bins


@dataclass(frozen=True)
class Calibrated:
    names: tuple[str, ...]
    scorers: tuple[fusion.FittedScorer, ...]
    first_half: fusion.WeighedPool | None
    second_half: fusion.WeighedPool | None


def calibrate_side(
    pool: RecordedPool,
    calibration: RecordedPool | None,
    scorers: Sequence[fusion.FittedScorer],
    settings: curves.StrategySettings,
) -> Calibrated:
    """Fit what is asked for on the first half of the calibration questions, and keep the second for settings."""
    names: Sequence[str] | None = settings.confidences
    if names is None:
        names = fusion.default_confidences(calibration or pool, can_fit=calibration is not None)
        names = [*names, *(scorer.name for scorer in scorers)]
    if calibration is None:
        return Calibrated(tuple(names), tuple(scorers), None, None)
    names = list(dict.fromkeys(names))
    halves = halve_pool(calibration.entries, seed=settings.seed)
    first, second = (calibration.subset({entry.question.id for entry in half}) for half in halves)
    own = fusion.fit_confidences(first, names, target=settings.fusion_target, known=scorers)
    first_half = fusion.weigh_pool(first, names, [*scorers, *own], fitting=[scorer.name for scorer in own])
    second_half = fusion.weigh_pool(second, names, [*scorers, *own])
    return Calibrated(tuple(names), (*scorers, *own), first_half, second_half)


@dataclass(frozen=True)
class EvaluatedTest:
    name: str
    width: int
    pools: Mapping[str, fusion.WeighedPool]


def prepare_test(
    name: str,
    pools: Mapping[str, RecordedPool],
    calibrated: Mapping[str, Calibrated],
    settings: curves.StrategySettings,
) -> EvaluatedTest:
    """Put the confidences on the samples of a test set; its width is what every question of every pool can pay."""
    named = [(f"test set {name!r} ({side})", pool) for side, pool in pools.items()]
    named += [
        (f"the calibration split ({side})", half.pool)
        for side, found in calibrated.items()
        for half in (found.first_half, found.second_half)
        if half is not None
    ]
    width = min(curves.check_pool(pool, what, max_samples=settings.max_samples) for what, pool in named)
    check_budgets(width, budgets=settings.budgets, targets=settings.targets)
    weighed = {
        side: fusion.weigh_pool(pool, calibrated[side].names, calibrated[side].scorers) for side, pool in pools.items()
    }
    return EvaluatedTest(name, width, weighed)


def check_budgets(width: int, **asked: Sequence[int] | None) -> None:
    """Refuse more samples than every question has; keywords are the options' names."""
    for name, values in asked.items():
        if values and max(values) > width:
            has = f"{width}, the samples that every question has"
            raise InputError(f"Expected `{name}` to be at most {has}, but got {max(values)}.")


@dataclass(frozen=True)
class TrainingCost:
    """What calibration cost, once, before the first test question: in tokens, or in seconds.

    Attributes:
        generated_tokens: Tokens generated for training.
        store: Folder of a store whose tokens are added to ``generated_tokens``.
        trained_tokens: Tokens trained on, over all epochs.
        trained_token_price: Cost of a trained token, in generated tokens.
        seconds: The cost in seconds, instead of tokens.
        tokens_per_second: Speed of generation that turns ``seconds`` into tokens.
    """

    generated_tokens: float = 0.0
    store: str | None = None
    trained_tokens: float = 0.0
    trained_token_price: float = 3.0
    seconds: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.generated_tokens, self.trained_tokens, self.trained_token_price, self.seconds or 0.0)
        if min(numbers) < 0.0:
            raise InputError(f"Expected costs of at least 0, but got {self}.")
        if (self.seconds is None) != (self.tokens_per_second is None):
            raise InputError(f"Expected `seconds` and `tokens_per_second` together, but got {self}.")
        if self.seconds is not None and (self.generated_tokens or self.trained_tokens or self.store):
            raise InputError("Expected the cost either in `seconds` or in tokens, but got both.")

    def tokens(self) -> float:
        if self.seconds is not None and self.tokens_per_second is not None:
            return self.seconds * self.tokens_per_second
        stored: int | None = 0
        if self.store is not None:  # all samples of round 0, with their confidence queries
            pool = load_recorded_pool(self.store, texts=False)
            stored = total_tokens((sample for entry in pool.entries for sample in entry.samples), pool.query_tokens)
        if stored is None:
            raise InputError(f"Expected the lengths of all responses in {self.store}, but some are unknown.")
        return self.generated_tokens + stored + self.trained_tokens * self.trained_token_price


class SideStrategies:
    """Runs every strategy on the samples of one side; what comes of its calibration questions is computed once."""

    def __init__(self, side: str, calibrated: Calibrated, settings: curves.StrategySettings) -> None:
        self.side, self.calibrated, self._settings = side, calibrated, settings
        self._labels = list(dict.fromkeys([statistics.REFERENCE, *settings.strategies]))
        self.on_calibration, self._tuned_at = cache(self._run_calibration), cache(self._tune)

    def run(self, weighed: fusion.WeighedPool, width: int, *, name: str) -> list[curves.StrategyCurve]:
        settings, source = self._settings, self.calibrated.second_half or weighed
        with Stage(f"Tuning strategies for {name}, {self.side}"):
            jobs = curves.make_jobs(
                self._labels,
                weighed.confidences,
                width=width,
                thresholds=settings.thresholds,
                tuned=self._tuned_at(width),
                values={name: confidence_quantiles(source.pool.entries, name) for name in source.confidences},
            )
            if statistics.REFERENCE not in settings.strategies:  # nobody asked for votes by what cannot weigh them
                both = (set(statistics.weighing_confidences(one)) for one in (weighed, source))
                can_weigh = {None, *set.intersection(*both)}
                jobs = [
                    job for job in jobs if job.label != statistics.REFERENCE or job.strategy.confidence in can_weigh
                ]
            reshuffles = curves.Reshuffles(
                weighed.pool,
                [None, *weighed.confidences],
                width=width,
                num_reshuffles=settings.num_reshuffles,
                seed=settings.seed,
                query_tokens=weighed.query_tokens,
            )
        total = len(jobs) * reshuffles.orders.num_orders
        with Progress(total, label=f"Strategies on {name}, {self.side}", unit="orders of a strategy") as progress:
            return curves.evaluate_jobs(reshuffles, jobs, progress=progress.update)

    def _run_calibration(self, width: int) -> list[curves.StrategyCurve] | None:
        """Return the curves that settings are chosen on; None without calibration questions."""
        half = self.calibrated.second_half
        return None if half is None else self.run(half, width, name="calibration")

    def _tune(self, width: int) -> curves.Tuned:
        if (half := self.calibrated.first_half) is None:
            return {}
        names, seed = self.calibrated.names, self._settings.seed
        return curves.tune(half.pool.entries, self._labels, names, max_samples=width, seed=seed)


def _finding(side: str, score: ConfidenceScores, budget: int, rows: Sequence[statistics.BudgetRow]) -> str:
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
    test: str
    width: int
    num_questions: int
    unreadable: Mapping[str, float]
    confidences: Mapping[str, list[ConfidenceScores]]
    reliability: Mapping[str, Mapping[str, ReliabilityBins]]
    curves: Sequence[statistics.Resampled]
    budgets: list[statistics.BudgetRow]
    savings: list[statistics.SavingRow]
    consensus: list[statistics.ConsensusRow]
    break_even: list[statistics.BreakEvenRow]
    findings: list[str]
    notes: list[str]


def run_strategies(
    test: EvaluatedTest, sides: Mapping[str, SideStrategies], settings: curves.StrategySettings
) -> list[statistics.Resampled]:
    """Run all strategies on all sides' samples of a test set, and resample its questions."""
    ran = {side: sides[side].run(pool, test.width, name=test.name) for side, pool in test.pools.items()}
    found = {side: sides[side].on_calibration(test.width) for side in test.pools}
    calibration = {side: rows for side, rows in found.items() if rows is not None}
    with Stage(f"Resampling the questions of {test.name}"):
        return statistics.resample_curves(
            ran,
            calibration if len(calibration) == len(ran) else None,
            num_resamples=settings.num_resamples,
            seed=settings.seed,
        )


def report_on(
    test: EvaluatedTest, resampled: Sequence[statistics.Resampled], settings: curves.StrategySettings
) -> StrategyReport:
    targets = settings.targets or [target for target in (4, 8, 16) if target <= test.width] or [test.width]
    savings = statistics.saving_rows(resampled, targets)
    budgets = statistics.budget_rows(resampled, settings.budgets or curves.powers_of_two(test.width))
    tables = {
        side: ResponseTable.from_pool(weighed.pool.entries, weighed.confidences) for side, weighed in test.pools.items()
    }
    scores: dict[str, list[ConfidenceScores]] = {}
    for side, table in tables.items():
        known = recorded_confidences(test.pools[side].pool.estimators)
        columns = zip(test.pools[side].confidences, table.values.T, strict=True)
        scores[side] = [score_confidence(name, v, table.correct, table.question, known) for name, v in columns]
    shown = statistics.headline([row.budget for row in budgets])
    findings = []
    for side, rows in scores.items():
        here = [row for row in budgets if (row.contender.side, row.budget) == (side, shown)]
        findings += [
            _finding(side, one, shown, [r for r in here if r.contender.confidence == one.name]) for one in rows
        ]
    for side, rows in scores.items():
        errors = [f"{row.ece_debiased:.3f} ({row.name})" for row in rows if row.ece_debiased is not None]
        if errors:
            findings.append(f"{side}: ECE without the part that chance alone adds: {', '.join(errors)}.")
    has_calibration = all(row.calibration is not None for row in resampled)
    return StrategyReport(
        test=test.name,
        width=test.width,
        num_questions=len(next(iter(test.pools.values())).pool.entries),
        unreadable={side: summarise(found.pool.entries, name=None)["unreadable"] for side, found in test.pools.items()},
        confidences=scores,
        reliability={side: _reliability(weighed, tables[side]) for side, weighed in test.pools.items()},
        curves=resampled,
        budgets=budgets,
        savings=savings,
        consensus=[row for side, pool in test.pools.items() for row in statistics.consensus_rows(side, pool)],
        break_even=[] if settings.cost_tokens is None else statistics.break_even_rows(savings, settings.cost_tokens),
        findings=findings,
        notes=_notes(test, settings, has_calibration=has_calibration),
    )


def _reliability(weighed: fusion.WeighedPool, table: ResponseTable) -> dict[str, ReliabilityBins]:
    return {
        name: reliability_bins(values[is_there], table.correct[is_there] == 1.0)
        for name, values in zip(weighed.confidences, table.values.T, strict=True)
        if (is_there := ~np.isnan(values)).any() and fusion.is_probability(weighed.pool, name)
    }


def _notes(test: EvaluatedTest, settings: curves.StrategySettings, *, has_calibration: bool) -> list[str]:
    notes, width = [], test.width
    pools = [found.pool for found in test.pools.values()]
    if any(len(entry.samples) > width for pool in pools for entry in pool.entries):
        most = max(len(entry.samples) for pool in pools for entry in pool.entries)
        shortest = min((pool.shortest for pool in pools), key=lambda entry: len(entry.samples))
        reason = "as asked" if settings.max_samples else f"as many as {shortest.question.id!r} has"
        notes.append(
            f"Budgets end at {width} samples, {reason}; questions with more (up to {most}) give random subsets."
        )
    left_out = [label for label in settings.strategies if curves.plan_of(label).plain is None]
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
