"""Fitted thresholds: files of those that an evaluation chooses, and reports on given ones."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from selfcal_lightning.confidence.base import check_confidence
from selfcal_lightning.confidence.fusion import WeighedPool
from selfcal_lightning.confidence.registry import recorded_confidences, refuse_looking_ahead
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import file_name
from selfcal_lightning.evaluation.curves import Job, Reshuffles, StrategySettings, evaluate_jobs, powers_of_two
from selfcal_lightning.evaluation.statistics import Resampled
from selfcal_lightning.evaluation.strategies import Calibrated, EvaluatedTest
from selfcal_lightning.evaluation.tables import format_estimate
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.thresholds import CalibrationPool, FittedThreshold, as_gridded, choose_threshold
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.metrics.curves import best_setting_within, wilson_interval

THRESHOLD = "threshold"


def save_thresholds(resampled: Sequence[Resampled], calibrated: Mapping[str, Calibrated], folder: Path) -> list[str]:
    """Write the thresholds that calibration questions chose at each budget; return the names of the files."""
    halves = {side: half for side, found in calibrated.items() if (half := found.second_half) is not None}
    questions = {  # checked already
        side: CalibrationPool(half.pool.entries, half.scorers, FittedOn.from_pool(half.pool.entries))
        for side, half in halves.items()
    }
    files = []
    for row in resampled:
        side = row.contender.side
        if row.calibration is None or side not in questions or row.curve.parameter != THRESHOLD:
            continue
        found = row.calibration
        for budget in powers_of_two(row.curve.solver.max_samples)[1:]:
            if best_setting_within(found.mean_samples, found.accuracy, budget) is None:
                continue
            weighted = f"_{row.contender.confidence}" if row.contender.confidence else ""
            fitted = replace(
                choose_threshold(row.curve.solver, questions[side], found, "budget", budget),
                name=f"{row.contender.strategy}{weighted}_budget_{budget}",
                sampled_by=halves[side].pool.sampled_by,
            )
            name = f"{side}/thresholds/{file_name(fitted.name)}.json"
            fitted.save(folder / name)
            files.append(name)
    return files


def evaluate_given(
    test: EvaluatedTest, thresholds: Mapping[str, FittedThreshold], settings: StrategySettings, console: Console
) -> list[dict[str, Any]]:
    """Report on fitted thresholds, by file, on every side whose responses were sampled alike; print a line each."""
    found = []
    for path, fitted in thresholds.items():
        strategy = fitted.configure(make_strategy(fitted.strategy, **fitted.fields))
        sides = _sides_of(fitted, test, console)
        console.print(f"{fitted.name}: {fitted.promise}", highlight=False)
        for side in sides:
            weighed = test.pools[side]
            _check_runnable(fitted, strategy, weighed, test.width)
            judge = _judge_risk if fitted.target == "risk" else _judge_curve
            numbers = judge(fitted, strategy, weighed, test.width, settings)
            facts = {"file": path, "test": test.name, "side": side, "name": fitted.name}
            found.append({**facts, **numbers, "promise": fitted.promise})
            words = ", ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in numbers.items())
            console.print(f"{test.name}, {side}: {fitted.name}: {words}", highlight=False)
    return found


def _sides_of(fitted: FittedThreshold, test: EvaluatedTest, console: Console) -> list[str]:
    """Return the sides whose responses were sampled as at the fit, as far as is known; print who is left out."""
    changed = {side: fitted.sampling_differences(weighed.pool.sampled_by) for side, weighed in test.pools.items()}
    if all(changed.values()):
        first = "; ".join(next(iter(changed.values())))
        raise InputError(f"Expected responses sampled like those that {fitted.name!r} was fitted on, but got {first}.")
    for side, differences in changed.items():
        if differences:
            reason = "; ".join(differences)
            console.print(f"{test.name}, {side}: not judged by {fitted.name}: {reason}", highlight=False)
    return [side for side, differences in changed.items() if not differences]


def _check_runnable(fitted: FittedThreshold, strategy: Strategy, weighed: WeighedPool, width: int) -> None:
    """Raise unless the threshold applies to these samples: the same procedure as in the fit."""
    entries = weighed.pool.entries
    check_not_fitted_on(entries, fitted)
    if strategy.max_samples > width:
        at_most = f"at most the {width} samples that every question has"
        raise InputError(f"Expected the budget of {fitted.name!r} to be {at_most}, but got {strategy.max_samples}.")
    if strategy.confidence is not None:
        fitted.check_scorers(weighed.scorers)
        known = [*recorded_confidences(weighed.pool.estimators), *weighed.scorers]
        refuse_looking_ahead([strategy.confidence], known)
        check_confidence(entries, strategy.confidence)


def _judge_curve(
    fitted: FittedThreshold, strategy: Strategy, weighed: WeighedPool, width: int, settings: StrategySettings
) -> dict[str, Any]:
    seed, num_reshuffles = settings.seed, settings.num_reshuffles
    orders = Reshuffles(weighed.pool, [strategy.confidence], width=width, num_reshuffles=num_reshuffles, seed=seed)
    (curve,) = evaluate_jobs(orders, [Job(fitted.name, as_gridded(strategy), (fitted.threshold,))])
    columns = {"accuracy": curve.outcome.correct, "samples": curve.outcome.samples}
    weights = resample_weights(orders.num_questions, num_resamples=settings.num_resamples, seed=seed)
    return {name: asdict(estimate_of((values @ weights)[0])) for name, values in columns.items()}


def _judge_risk(
    fitted: FittedThreshold, strategy: Strategy, weighed: WeighedPool, width: int, settings: StrategySettings
) -> dict[str, Any]:
    """Judge a threshold with a guarantee on the recorded order, as it was fitted: one verdict a question."""
    verdicts = [replay(strategy, entry) for entry in weighed.pool.entries]
    given = [verdict for verdict in verdicts if fitted.answers(verdict)]
    risk = wilson_interval(sum(not verdict.correct for verdict in given), len(given))
    coverage = wilson_interval(len(given), len(verdicts))
    samples = sum(verdict.samples_used for verdict in verdicts) / len(verdicts)
    return {
        "answered": asdict(coverage),
        "wrong_among_them": asdict(risk),
        "promised_risk": fitted.value,
        "delta": fitted.delta,
        "samples": samples,
    }


def _words(value: Any) -> str:
    if not isinstance(value, dict):
        return "none" if value is None else f"{value:.4g}"
    return format_estimate(Estimate(value["value"], value["low"], value["high"]))
