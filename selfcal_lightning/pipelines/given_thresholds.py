"""Fitted thresholds: those that an evaluation chooses, as files, and those that are given to it to report on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from selfcal_lightning.confidence.splits import check_not_fitted_on
from selfcal_lightning.functional.bootstrap import Estimate
from selfcal_lightning.functional.curves import wilson_interval
from selfcal_lightning.functional.question_means import estimate_of, resample_weights
from selfcal_lightning.path_names import file_name
from selfcal_lightning.pipelines.calibrated_sides import Calibrated
from selfcal_lightning.pipelines.fitted_confidences import WeighedPool
from selfcal_lightning.pipelines.reshuffles import Reshuffles
from selfcal_lightning.pipelines.strategy_evaluation import Job, evaluate_jobs
from selfcal_lightning.pipelines.strategy_results import StrategyReport
from selfcal_lightning.pipelines.strategy_settings import StrategySettings
from selfcal_lightning.pipelines.strategy_statistics import Resampled, setting_for
from selfcal_lightning.reports.tables import format_estimate
from selfcal_lightning.strategies.fitted_threshold import FittedThreshold, fields_of, split_hashes
from selfcal_lightning.strategies.pool import CurveStrategy
from selfcal_lightning.strategies.registry import make_strategy
from selfcal_lightning.strategies.replay import replay

THRESHOLD = "threshold"


def save_thresholds(resampled: Sequence[Resampled], calibrated: dict[str, Calibrated], folder: Path) -> list[str]:
    """Write the threshold that each contender takes at each budget; return the names of the files.

    Only thresholds that calibration questions chose are written.

    Args:
        resampled: The contenders with their calibration curves.
        calibrated: By side.
        folder: The files go under ``folder/SIDE/thresholds``.
    """
    files = []
    for row in resampled:
        side = calibrated[row.contender.side]
        half = side.second_half
        if row.calibration is None or half is None or row.curve.parameter != THRESHOLD:
            continue
        for budget in range(2, int(row.curve.solver.max_samples) + 1):
            if budget & (budget - 1):
                continue
            at = setting_for(row, budget)
            if at is None:
                continue
            fitted = _fitted(row, side, half, at, budget)
            name = f"{row.contender.side}/thresholds/{file_name(fitted.name)}.json"
            fitted.save(folder / name)
            files.append(name)
    return files


def evaluate_given(
    report: StrategyReport, paths: Sequence[str], settings: StrategySettings, console: Console
) -> list[dict[str, Any]]:
    """Report on fitted thresholds from files, on every side; print a line each.

    Args:
        report: The evaluation of the same questions.
        paths: The files.
        settings: Orders, resamples and seed.
        console: Where to print.

    Raises:
        ValueError: A threshold was fitted on one of these questions, or its budget is larger than the pool.
    """
    found = []
    for path in paths:
        fitted = FittedThreshold.load(path)
        for side, weighed in report.pools.items():
            check_not_fitted_on(weighed.pool.entries, fitted)
            judge = _judge_risk if fitted.target == "risk" else _judge_curve
            numbers = judge(fitted, weighed, report.width, settings)
            found.append({"file": str(path), "test": report.test, "side": side, "name": fitted.name} | numbers)
            words = ", ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in numbers.items())
            console.print(f"{report.test}, {side}: {fitted.name}: {words}", highlight=False)
    return found


def _judge_curve(
    fitted: FittedThreshold, weighed: WeighedPool, width: int, settings: StrategySettings
) -> dict[str, Any]:
    strategy = _strategy(fitted)
    if fitted.threshold is None:
        raise ValueError(f"Expected {fitted.name!r} to have a threshold, but got none.")
    reshuffles = Reshuffles(
        weighed.pool,
        [strategy.confidence],
        width=width,
        num_reshuffles=settings.num_reshuffles,
        seed=settings.seed,
        query_tokens=weighed.query_tokens,
    )
    (curve,) = evaluate_jobs(reshuffles, [Job(fitted.name, strategy, (fitted.threshold,))])
    weights = resample_weights(curve.correct.shape[1], num_resamples=settings.num_resamples, seed=settings.seed)
    accuracy, samples = (estimate_of((values @ weights)[0]) for values in (curve.correct, curve.samples))
    return {"accuracy": asdict(accuracy), "samples": asdict(samples)}


def _judge_risk(
    fitted: FittedThreshold, weighed: WeighedPool, width: int, settings: StrategySettings
) -> dict[str, Any]:
    """Judge a threshold with a guarantee on the recorded order, as it was fitted: one verdict a question."""
    strategy = _strategy(fitted)
    if strategy.max_samples > width:
        raise ValueError(
            f"Expected the budget of {fitted.name!r} to be at most the {width} samples that every question has, but "
            f"got {strategy.max_samples}."
        )
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


def _strategy(fitted: FittedThreshold) -> CurveStrategy:
    return cast("CurveStrategy", make_strategy(fitted.strategy, **fitted.fields))


def _words(value: Any) -> str:
    """Return a number, or a value with its interval, as text."""
    if not isinstance(value, dict):
        return "none" if value is None else f"{value:.4g}"
    return format_estimate(Estimate(value["value"], value["low"], value["high"]))


def _fitted(row: Resampled, side: Calibrated, half: WeighedPool, at: int, budget: int) -> FittedThreshold:
    """Return the threshold of one contender at one budget as a record of its own."""
    curve = row.choosing()
    threshold = row.curve.grid[at]
    accuracy, samples = float(curve.accuracy[at]), float(curve.mean_samples[at])
    weighted = f"_{row.contender.confidence}" if row.contender.confidence else ""
    return FittedThreshold(
        name=f"{row.contender.strategy}{weighted}_budget_{budget}",
        strategy=row.curve.solver.name,
        fields=fields_of(row.curve.solver) | {THRESHOLD: threshold},
        parameter=THRESHOLD,
        threshold=threshold,
        target="budget",
        value=float(budget),
        delta=None,
        scorers=split_hashes(side.scorers),
        fitted_on=half.fitted_on(),
        achieved={"accuracy": accuracy, "mean_samples": samples},
        message=f"{THRESHOLD} {threshold:g} reaches accuracy {accuracy:.4f} at {samples:.2f} samples on the "
        "calibration questions that it was chosen on.",
    )
