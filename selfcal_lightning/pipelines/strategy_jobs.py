"""Which strategies an evaluation runs: by label, with every confidence that they can read, over whole grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.pipelines.strategy_evaluation import Job
from selfcal_lightning.strategies.pool import CurveStrategy
from selfcal_lightning.strategies.registry import ORACLES, make_strategy, setting_names

CONFIDENCE = "confidence"
# Steps of a hundredth, and finer ones at the top, where a confident model has most of its values.
THRESHOLDS = tuple(round(step / 100, 2) for step in range(100)) + tuple(round(0.99 + s / 1000, 3) for s in range(1, 11))


@dataclass(frozen=True)
class Plan:
    """A strategy under a label, with fixed settings.

    Attributes:
        name: The strategy's name in the registry.
        plain: Fields that differ from their defaults in the run without a confidence; None where there is none.
        weighted: Likewise in the runs with each confidence.
    """

    name: str
    plain: Mapping[str, Any] | None = None
    weighted: Mapping[str, Any] | None = None


PLANS: dict[str, Plan] = {
    "self_consistency": Plan("self_consistency", plain={}, weighted={}),
    "adaptive_consistency": Plan(
        "adaptive_consistency", plain={"criterion": "count_ratio"}, weighted={"criterion": "confidence_ratio"}
    ),
    "adaptive_beta": Plan("adaptive_consistency", plain={"criterion": "beta"}),
    "adaptive_dirichlet": Plan("adaptive_consistency", plain={"criterion": "dirichlet"}),
    "adaptive_entropy": Plan("adaptive_consistency", plain={"criterion": "entropy"}),
    "window_stopping": Plan("window_stopping", plain={"mode": "disjoint"}),
    "window_sliding": Plan("window_stopping", plain={"mode": "sliding"}),
    "early_stopping": Plan("early_stopping", weighted={}),
    "best_of_n": Plan("best_of_n", weighted={}),
    "cisc": Plan("cisc", weighted={}),
    "borda": Plan("borda", weighted={}),
    "cges": Plan("cges", weighted={}),
    "pass_at_n": Plan("pass_at_n", plain={}),
}


def check_labels(labels: Sequence[str]) -> None:
    """Raise InputError unless every label is known and none occurs twice."""
    for label in labels:
        if label not in PLANS:
            raise unknown_name("strategies", label, PLANS)
    if len(set(labels)) < len(labels):
        raise InputError(f"Expected `strategies` to be different ones, but got {list(labels)}.")


def check_thresholds(thresholds: Sequence[float]) -> None:
    """Raise InputError unless every threshold lies in [0, 1] and there is one."""
    if not thresholds or not all(0.0 <= value <= 1.0 for value in thresholds):
        raise InputError(f"Expected `thresholds` to lie in [0, 1], but got {list(thresholds)}.")


def needs_confidence(label: str) -> bool:
    """Whether a strategy cannot run without a confidence."""
    return PLANS[label].plain is None


def make_jobs(
    labels: Sequence[str],
    confidences: Sequence[str],
    *,
    width: int,
    thresholds: Sequence[float] = THRESHOLDS,
    tuned: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    values: Mapping[str, Sequence[float]] | None = None,
) -> list[Job]:
    """Return the jobs of an evaluation: each strategy plain, with each confidence, or both.

    Args:
        labels: Keys of ``PLANS``.
        confidences: Names of confidences; without any, the strategies that need one are left out.
        width: Budget in samples.
        thresholds: Grid of the strategies whose parameter is a threshold.
        tuned: Further fields by label and confidence.
        values: Values that each confidence takes: further thresholds of the strategies that compare it with one.

    Raises:
        InputError: A label is unknown, or a threshold lies outside [0, 1].
    """
    check_labels(labels)
    check_thresholds(thresholds)
    jobs = []
    for label in labels:
        plan = PLANS[label]
        runs: list[tuple[str | None, Mapping[str, Any]]] = [] if plan.plain is None else [(None, plan.plain)]
        extra = tuned or {}
        if plan.weighted is not None:
            runs += [(name, {**plan.weighted, **extra.get((label, name), {})}) for name in confidences]
        for name, settings in runs:
            more = (values or {}).get(name or "", ()) if label == "early_stopping" else ()
            jobs.append(_job(label, plan.name, name, settings, width, (*thresholds, *more)))
    return jobs


def _job(
    label: str, name: str, confidence: str | None, fixed: Mapping[str, Any], width: int, thresholds: Sequence[float]
) -> Job:
    settings = {**fixed, "max_samples": width}
    if CONFIDENCE in setting_names(name):
        settings[CONFIDENCE] = confidence
    strategy = cast("CurveStrategy", make_strategy(name, **settings))
    grids = {
        "max_samples": tuple(range(1, width + 1)),
        "window": tuple(range(min(2, width), width + 1)),
        "threshold": tuple(sorted(set(thresholds))),
    }
    return Job(label, strategy, grids[strategy.grid_parameter], is_oracle=name in ORACLES)


def at_setting(job: Job, setting: float) -> CurveStrategy:
    """Return the strategy of a job with its grid parameter set, as ``solve`` runs it."""
    value = setting if job.strategy.grid_parameter == "threshold" else int(setting)
    return cast("CurveStrategy", replace(job.strategy, **{job.strategy.grid_parameter: value}))  # type: ignore[type-var]
