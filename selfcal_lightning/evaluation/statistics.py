"""From curves to rows: accuracy at a budget, cost at an accuracy, with paired intervals over questions; consensus."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.fusion import WeighedPool
from selfcal_lightning.evaluation.curves import StrategyCurve
from selfcal_lightning.inference.base import leader, weighted_votes
from selfcal_lightning.inference.thresholds import GridOutcome
from selfcal_lightning.metrics import curves
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, estimate_or_never, resample_weights
from selfcal_lightning.metrics.discrimination import aurc
from selfcal_lightning.records import Sample

# Self-consistency without weights, the baseline of every comparison.
REFERENCE = "self_consistency"
NEAR_UNANIMOUS = 0.9


@dataclass(frozen=True)
class Contender:
    side: str
    strategy: str
    confidence: str | None
    is_oracle: bool = False


@dataclass(frozen=True)
class BudgetRow:
    """A contender at its setting for a budget: the best on calibration questions, else the dearest by cost."""

    contender: Contender
    budget: int
    setting: float
    accuracy: Estimate
    samples: Estimate
    tokens: Estimate | None
    change: Estimate
    change_to_full: Estimate


@dataclass(frozen=True)
class ChosenSetting:
    """A setting chosen on the calibration split for an accuracy, and what it does on the test split."""

    setting: float
    change: Estimate
    samples: Estimate
    tokens: Estimate | None
    saving: Estimate


@dataclass(frozen=True)
class SavingRow:
    """What a contender pays for the accuracy of self-consistency (of the first side) with ``target`` samples."""

    contender: Contender
    target: int
    accuracy: float
    samples: Estimate
    tokens: Estimate | None
    saving: Estimate
    saved_tokens: Estimate | None
    rank: float | None
    chosen: ChosenSetting | None


@dataclass(frozen=True)
class ConsensusRow:
    """How often a near-unanimous answer is right: the errors that no vote can mend."""

    side: str
    confidence: str | None
    threshold: float
    share: curves.Proportion
    correct: curves.Proportion
    aurc: float | None
    curve: curves.RiskCoverage = field(repr=False)


@dataclass(frozen=True)
class BreakEvenRow:
    """After how many questions a contender has earned back what calibration cost."""

    contender: Contender
    target: int
    cost: float
    saved: Estimate
    rank: float | None
    questions: int | None
    questions_low: int | None
    questions_high: int | None


@dataclass(frozen=True)
class Resampled:
    """A contender's curve on the questions as they are (the first column) and on R resamples of them [G, 1 + R].

    ``calibration`` is what the same contender costs and reaches on the calibration questions. Lengths that are unknown
    are None.
    """

    contender: Contender
    curve: StrategyCurve
    accuracy: Floats = field(repr=False)
    samples: Floats = field(repr=False)
    tokens: Floats | None = field(repr=False)
    calibration: GridOutcome | None = None

    @property
    def grid(self) -> tuple[float, ...]:
        return self.curve.outcome.grid

    @property
    def interval(self) -> tuple[Floats, Floats]:
        """Ends of the 95 % intervals of the accuracy [G] each; nan without resamples."""
        resamples = self.accuracy[:, 1:]
        if not resamples.size:
            return (nothing := np.full(len(self.grid), np.nan)), nothing
        low, high = np.quantile(resamples, [0.025, 0.975], axis=1)
        return low, high

    def costs(self, setting: int) -> dict[str, Any]:
        tokens = None if self.tokens is None else estimate_of(self.tokens[setting])
        return {"samples": estimate_of(self.samples[setting]), "tokens": tokens}


def resample_curves(
    by_side: Mapping[str, Sequence[StrategyCurve]],
    calibration: Mapping[str, Sequence[StrategyCurve]] | None,
    *,
    num_resamples: int,
    seed: int,
) -> list[Resampled]:
    """Resample the questions of all curves together; those of the calibration questions may be more."""
    found = []
    first = next(iter(by_side.values()))[0].outcome
    weights = resample_weights(first.sum_correct.shape[1], num_resamples=num_resamples, seed=seed)
    for side, rows in by_side.items():
        others = {(curve.strategy, curve.confidence): curve.outcome for curve in (calibration or {}).get(side, ())}
        for curve in rows:
            other = None if calibration is None else others[curve.strategy, curve.confidence]
            contender = Contender(side, curve.strategy, curve.confidence, curve.is_oracle)
            means = curve.outcome
            tokens = None if (spent := means.tokens) is None else spent @ weights
            found.append(Resampled(contender, curve, means.correct @ weights, means.samples @ weights, tokens, other))
    return found


def reference_of(resampled: Sequence[Resampled]) -> Resampled:
    wanted = Contender(resampled[0].contender.side, REFERENCE, None)
    return next(row for row in resampled if row.contender == wanted)


def setting_for(row: Resampled, budget: int) -> int | None:
    """Return the position of the setting that a contender takes at a budget; None where it cannot keep it."""
    if row.curve.parameter == "max_samples":
        return row.grid.index(budget) if budget in row.grid else None
    if row.calibration is None:
        return curves.setting_within(row.curve.outcome.mean_samples, budget)
    return curves.best_setting_within(row.calibration.mean_samples, row.calibration.accuracy, budget)


def budget_rows(resampled: Sequence[Resampled], budgets: Sequence[int]) -> list[BudgetRow]:
    reference = reference_of(resampled)
    full = reference.accuracy[-1]
    rows = []
    for row in resampled:
        for budget in budgets:
            setting = setting_for(row, budget)
            if setting is None:
                continue
            accuracy = row.accuracy[setting]
            rows.append(
                BudgetRow(
                    row.contender,
                    budget,
                    row.grid[setting],
                    accuracy=estimate_of(accuracy),
                    **row.costs(setting),
                    change=estimate_of(accuracy - reference.accuracy[reference.grid.index(budget)]),
                    change_to_full=estimate_of(accuracy - full),
                )
            )
    return rows


def saving_rows(resampled: Sequence[Resampled], targets: Sequence[int]) -> list[SavingRow]:
    reference = reference_of(resampled)
    rows = []
    wanted_positions = [reference.grid.index(target) for target in targets]
    wanted = reference.accuracy[wanted_positions]
    for row in resampled:
        if row.contender.is_oracle:
            continue
        all_samples = curves.costs_to_reach(row.samples.T, row.accuracy.T, wanted)
        all_tokens = None if row.tokens is None else curves.costs_to_reach(row.tokens.T, row.accuracy.T, wanted)
        for position, (target, at) in enumerate(zip(targets, wanted_positions, strict=True)):
            samples = all_samples[position]
            tokens = saved_tokens = None
            if all_tokens is not None and reference.tokens is not None:
                found = all_tokens[position]
                tokens = estimate_or_never(found, never=np.inf)
                saved_tokens = estimate_or_never(reference.tokens[at] - found, never=-np.inf)
            rows.append(
                SavingRow(
                    row.contender,
                    target,
                    float(wanted[position, 0]),
                    samples=estimate_or_never(samples, never=np.inf),
                    tokens=tokens,
                    saving=estimate_or_never(1.0 - samples / target, never=-np.inf),
                    saved_tokens=saved_tokens,
                    rank=_saved(row, reference, at),
                    chosen=_chosen(row, reference, target),
                )
            )
    return rows


def break_even_rows(savings: Sequence[SavingRow], cost: float) -> list[BreakEvenRow]:
    """Return when each contender of the last side, which was calibrated, has earned back ``cost`` tokens."""
    last = savings[-1].contender.side if savings else None
    rows = []
    for row in savings:
        saved = row.saved_tokens
        if saved is None or row.contender.side != last:
            continue
        counts = (curves.break_even(cost, value) for value in (saved.value, saved.high, saved.low))
        rows.append(BreakEvenRow(row.contender, row.target, cost, saved, row.rank, *counts))
    return rows


def _chosen(row: Resampled, reference: Resampled, target: int) -> ChosenSetting | None:
    """Choose on the calibration questions the cheapest setting that is as good as the reference is there."""
    if row.calibration is None or reference.calibration is None:
        return None
    wanted = float(reference.calibration.accuracy[reference.grid.index(target)])
    setting = curves.cheapest_setting_reaching(row.calibration.mean_samples, row.calibration.accuracy, wanted)
    if setting is None:
        return None
    return ChosenSetting(
        row.grid[setting],
        change=estimate_of(row.accuracy[setting] - reference.accuracy[reference.grid.index(target)]),
        **row.costs(setting),
        saving=estimate_of(1.0 - row.samples[setting] / target),
    )


def _saved(row: Resampled, reference: Resampled, at: int) -> float | None:
    """Return the tokens saved where it is as accurate as the reference, on calibration questions if there are any."""
    mine, theirs = (one.calibration or one.curve.outcome for one in (row, reference))
    if mine.mean_tokens is None or theirs.mean_tokens is None:
        return None
    needed = curves.cost_to_reach(mine.mean_tokens, mine.accuracy, float(theirs.accuracy[at]))
    return None if needed is None else float(theirs.mean_tokens[at]) - needed


def consensus_rows(side: str, weighed: WeighedPool) -> list[ConsensusRow]:
    """Return one row without weights and one for each confidence, over all samples of each question.

    The winner's share of the weight is near-unanimous above ``NEAR_UNANIMOUS``; without a vote it is 0 and wrong.
    """
    rows = []
    for name in (None, *weighing_confidences(weighed)):
        verdicts = [winner(entry.samples, name) for entry in weighed.pool.entries]
        shares = [share for share, _ in verdicts]
        correct = [right for _, right in verdicts]
        above = [right for share, right in verdicts if share > NEAR_UNANIMOUS]
        rows.append(
            ConsensusRow(
                side,
                name,
                NEAR_UNANIMOUS,
                share=curves.wilson_interval(len(above), len(verdicts)),
                correct=curves.wilson_interval(sum(above), len(above)),
                aurc=aurc(shares, correct),
                curve=curves.risk_coverage(shares, correct),
            )
        )
    return rows


def weighing_confidences(weighed: WeighedPool) -> tuple[str, ...]:
    """Return the confidences that can weigh votes: a log-probability is below 0, and compares responses only."""
    return tuple(
        name
        for name in weighed.confidences
        if all(
            (confidence_of(sample, name) or 0.0) >= 0.0
            for entry in weighed.pool.entries
            for sample in entry.samples
            if sample.answer is not None
        )
    )


def winner(samples: Sequence[Sample], confidence: str | None) -> tuple[float, bool]:
    """Return the winner's share of the weight and whether it is right."""
    votes = weighted_votes(samples, confidence)
    answer = leader(votes)
    total = math.fsum(votes.values())
    if answer is None:
        return 0.0, False
    right = next(sample.correct for sample in samples if sample.answer == answer)
    return (min(votes[answer] / total, 1.0) if total > 0.0 else 0.0), bool(right)


def headline(budgets: Sequence[int]) -> int:
    """Return the budget whose change is shown in full: the largest up to 4."""
    return max((budget for budget in budgets if budget <= 4), default=min(budgets))
