"""Which strategies an evaluation runs: by label, with every confidence that they can read, over whole grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.strategies.curves import Job
from selfcal_lightning.strategies.registry import ORACLES, STRATEGIES, make_strategy, setting_names, unknown_strategy
from selfcal_lightning.strategies.thresholds.grids import THRESHOLDS, as_gridded, grid_of
from selfcal_lightning.strategies.vectorised.arrays import CurveStrategy, GridStrategy

CONFIDENCE = "confidence"


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
    "standardised": Plan("standardised", weighted={}),
    "cges": Plan("cges", weighted={}),
    "pass_at_n": Plan("pass_at_n", plain={}),
}


def plan_of(label: str) -> Plan:
    """Return the plan of a label; any other strategy by its name in the registry runs plainly, and with confidences.

    Raises:
        InputError: There is no such label or strategy.
    """
    if label in PLANS:
        return PLANS[label]
    if label not in STRATEGIES:
        raise unknown_strategy("strategies", label, [*PLANS, *STRATEGIES])
    if CONFIDENCE not in setting_names(label):
        return Plan(label, plain={})
    return Plan(label, plain={} if make_strategy(label).confidence is None else None, weighted={})


def known_labels() -> list[str]:
    """Return all labels: those above, and the names of the strategies that plug-ins registered."""
    names = {plan.name for plan in PLANS.values()}
    return [*PLANS, *(name for name in STRATEGIES if name not in names)]


def check_labels(labels: Sequence[str]) -> None:
    """Raise InputError unless every label is known and none occurs twice."""
    for label in labels:
        plan_of(label)
    if len(set(labels)) < len(labels):
        raise InputError(f"Expected `strategies` to be different ones, but got {list(labels)}.")


def check_thresholds(thresholds: Sequence[float]) -> None:
    """Raise InputError unless every threshold lies in [0, 1] and there is one."""
    if not thresholds or not all(0.0 <= value <= 1.0 for value in thresholds):
        raise InputError(f"Expected `thresholds` to lie in [0, 1], but got {list(thresholds)}.")


def reads_texts(labels: Sequence[str]) -> bool:
    """Whether a strategy may look at texts: one without a vectorised form is replayed on whole samples."""
    return not all(isinstance(make_strategy(plan_of(label).name), CurveStrategy) for label in labels)


def needs_confidence(label: str) -> bool:
    """Whether a strategy cannot run without a confidence."""
    return plan_of(label).plain is None


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
        labels: Keys of ``PLANS``, or names of strategies.
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
        plan = plan_of(label)
        runs: list[tuple[str | None, Mapping[str, Any]]] = [] if plan.plain is None else [(None, plan.plain)]
        extra = tuned or {}
        if plan.weighted is not None:
            runs += [(name, {**plan.weighted, **extra.get((label, name), {})}) for name in confidences]
        for name, settings in runs:
            strategy = _strategy(plan.name, name, {**settings, "max_samples": width})
            grid = grid_of(strategy, thresholds=thresholds, values=(values or {}).get(name or "", ()))
            jobs.append(Job(label, strategy, grid, is_oracle=plan.name in ORACLES))
    return jobs


def _strategy(name: str, confidence: str | None, settings: Mapping[str, Any]) -> GridStrategy:
    reads = {CONFIDENCE: confidence} if CONFIDENCE in setting_names(name) else {}
    return as_gridded(make_strategy(name, **settings, **reads))
