"""Accuracy against cost: the accuracy within a budget, and the cost of reaching an accuracy."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, as_labels, as_scores, check_same_length


@dataclass(frozen=True)
class RiskCoverage:
    """Error rate among the most confident answers, by coverage."""

    coverage: Floats  # share of the questions that are answered [K], rising to 1
    risk: Floats  # share of wrong answers among them [K]
    threshold: Floats  # lowest confidence that is answered [K], falling


@dataclass(frozen=True)
class Proportion:
    """A share of ``count`` trials with its Wilson interval; all None where nothing was counted."""

    value: float | None
    low: float | None
    high: float | None
    count: int


def cost_to_reach(cost: Floats, value: Floats, target: float) -> float | None:
    """Return the least cost at which a curve reaches ``target``; None where it never does.

    The cost is interpolated between neighbours on the upper envelope: picking one of the two settings at random for
    each question reaches any point on the line between them.
    """
    found = costs_to_reach(cost[None], value[None], np.array([[target]]))[0, 0]
    return None if np.isnan(found) else float(found)


def costs_to_reach(cost: Floats, value: Floats, target: Floats) -> Floats:
    """Return :func:`cost_to_reach` of R curves [R, G] at T targets each [T, R]: costs [T, R], NaN for never."""
    order = np.lexsort((-value, cost), axis=1)
    cost, value = np.take_along_axis(cost, order, axis=1), np.take_along_axis(value, order, axis=1)
    best = np.maximum.accumulate(value, axis=1)
    before = np.concatenate([np.full((len(value), 1), -np.inf), best[:, :-1]], axis=1)
    columns = np.arange(value.shape[1])
    # Column of the latest envelope point up to each column.
    record = np.maximum.accumulate(np.where(value > before, columns, 0), axis=1)
    rows = np.arange(len(value))
    costs = []
    for wanted in target:
        reached = best >= wanted[:, None]
        above = record[rows, reached.argmax(axis=1)]
        below = record[rows, np.maximum(above - 1, 0)]
        step = value[rows, above] - value[rows, below]
        part = np.divide(wanted - value[rows, below], step, out=np.ones_like(step), where=step > 0.0)
        found = cost[rows, below] + np.clip(part, 0.0, 1.0) * (cost[rows, above] - cost[rows, below])
        costs.append(np.where(reached.any(axis=1), found, np.nan))
    return np.stack(costs)


def setting_within(cost: Floats, budget: float) -> int | None:
    """Return the index of the most expensive setting that costs no more than ``budget`` on average, the first on ties.

    It looks at cost alone, so choosing on the reported questions does not inflate accuracy.
    """
    allowed = np.where(cost <= budget + 1e-9, cost, -np.inf)
    return int(allowed.argmax()) if np.isfinite(allowed).any() else None


def best_setting_within(cost: Floats, value: Floats, budget: float) -> int | None:
    """Return the index of the best setting that costs no more than ``budget`` on average, the cheapest on ties.

    Choose on questions other than the reported ones: the best of many settings looks better than it is.
    """
    return _first(cost <= budget + 1e-9, -value, cost)


def cheapest_setting_reaching(cost: Floats, value: Floats, target: float) -> int | None:
    """Return the index of the cheapest setting whose value is at least ``target``, the better on ties.

    Choose on questions other than the reported ones: some settings reach the target by luck.
    """
    return _first(value >= target - 1e-12, cost, -value)


def _first(allowed: NDArray[np.bool_], order: Floats, tie: Floats) -> int | None:
    """Return the index of the first allowed setting by ``order``, then by ``tie``; None if none is allowed."""
    found = np.flatnonzero(allowed)
    return int(found[np.lexsort((tie[found], order[found]))[0]]) if len(found) else None


def risk_coverage(confidence: Array, correct: Array) -> RiskCoverage:
    """Compute the risk among the answers whose confidence is at least t, for each distinct t.

    Reference:
        El-Yaniv and Wiener, On the Foundations of Noise-free Selective Classification, 2010, section 2.
    """
    scores, labels = as_scores(confidence), as_labels(correct)
    check_same_length(confidence=scores, correct=labels)
    order = np.argsort(-scores, kind="stable")
    ordered, wrong = scores[order], np.cumsum(~labels[order])
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.zeros(0, dtype=int)
    return RiskCoverage((last + 1) / max(len(ordered), 1), wrong[last] / (last + 1), ordered[last])


def wilson_interval(successes: int, total: int) -> Proportion:
    """Return the share of ``successes`` in ``total`` trials with its 95 % Wilson score interval.

    Example:
        >>> share = wilson_interval(9, 10)
        >>> share.value, round(share.low, 3), round(share.high, 3)
        (0.9, 0.596, 0.982)

    Reference:
        Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
    """
    from scipy.stats import binomtest

    if not 0 <= successes <= total:
        raise InputError(f"Expected `successes` to lie between 0 and {total}, but got {successes}.")
    if total == 0:
        return Proportion(None, None, None, 0)
    ends = binomtest(successes, total).proportion_ci(0.95, method="wilson")
    return Proportion(successes / total, float(ends.low), float(ends.high), total)


def break_even(cost: float, saved: float | None) -> int | None:
    """Return after how many questions a one-off ``cost`` pays off; None if never, or if ``saved`` is unknown."""
    if cost < 0.0:
        raise InputError(f"Expected `cost` to be at least 0, but got {cost}.")
    if saved is None or math.isnan(saved) or saved <= 0.0:
        return None
    return math.ceil(cost / saved)
