"""Accuracy against cost: envelopes, costs of an accuracy, risk against coverage, shares with intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from selfcal_lightning.metrics.bootstrap import estimate_of, estimate_or_never, resample_counts, resample_weights
from selfcal_lightning.metrics.curves import (
    best_setting_within,
    break_even,
    cost_to_reach,
    costs_to_reach,
    risk_coverage,
    setting_within,
    wilson_interval,
)
from selfcal_lightning.metrics.discrimination import aurc


def _reference_mixture_cost(cost: np.ndarray, value: np.ndarray, target: float) -> float | None:
    """Cheapest setting that is good enough, or mixture of two settings that follow each other on the envelope."""
    points: list[tuple[float, float]] = []
    for price, reached in sorted(zip(cost, value, strict=True), key=lambda p: (p[0], -p[1])):
        if not points or reached > points[-1][1]:
            points.append((price, reached))
    if points[0][1] >= target:
        return points[0][0]
    for (c0, v0), (c1, v1) in itertools.pairwise(points):
        if v1 >= target:
            share = (target - v0) / (v1 - v0)
            return (1 - share) * c0 + share * c1
    return None


@pytest.mark.parametrize("seed", range(30))
def test_cost_to_reach_against_a_plain_walk(seed: int) -> None:
    generator = np.random.default_rng(seed)
    # Coarse numbers make equal costs and equal values.
    cost, value = generator.integers(1, 9, size=12) / 2.0, generator.integers(0, 7, size=12) / 8.0
    for target in np.linspace(0.0, 1.0, 21):
        expected = _reference_mixture_cost(cost, value, target)
        found = cost_to_reach(cost, value, float(target))
        assert found == (None if expected is None else pytest.approx(expected)), target


def test_many_curves_at_once_are_the_single_ones() -> None:
    generator = np.random.default_rng(1)
    cost, value = generator.random((40, 9)), generator.random((40, 9))
    targets = generator.random((3, 40))
    found = costs_to_reach(cost, value, targets)
    for number in range(3):
        singles = [cost_to_reach(c, v, t) for c, v, t in zip(cost, value, targets[number], strict=True)]
        expected = [math.nan if single is None else single for single in singles]
        np.testing.assert_allclose(found[number], expected)
    assert np.isnan(found).any()


def test_settings_within_a_budget() -> None:
    cost, value = np.array([1.0, 2.0, 4.0, 3.0]), np.array([0.5, 0.75, 1.0, 0.75])
    assert setting_within(cost, 3.5) == 3  # the dearest, whatever it reaches
    assert best_setting_within(cost, value, 3.5) == 1  # the best, the cheaper of two equals
    assert best_setting_within(cost, value, 0.5) is setting_within(cost, 0.5) is None


@pytest.mark.parametrize("seed", range(5))
def test_risk_coverage_without_ties_has_the_area_of_aurc(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores, labels = generator.permutation(50) / 50.0, generator.random(50) < 0.6
    curve = risk_coverage(scores, labels)
    assert curve.risk.mean() == pytest.approx(aurc(scores, labels))
    assert curve.coverage[-1] == 1.0
    assert curve.risk[-1] == pytest.approx(1.0 - labels.mean())


@pytest.mark.parametrize(("successes", "total"), [(0, 5), (5, 5), (3, 7), (90, 100)])
def test_wilson_interval_against_scipy(successes: int, total: int) -> None:
    found, expected = wilson_interval(successes, total), binomtest(successes, total).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_shares_of_nothing_and_impossible_counts() -> None:
    assert wilson_interval(0, 0).value is None
    with pytest.raises(ValueError, match="between 0 and 2, but got 3"):
        wilson_interval(3, 2)


def test_break_even_by_hand() -> None:
    assert break_even(10.0, 4.0) == 3  # after two questions 8 are earned, after three 12
    assert break_even(10.0, 0.0) is break_even(10.0, None) is break_even(10.0, math.nan) is None
    with pytest.raises(ValueError, match="`cost` to be at least 0"):
        break_even(-1.0, 1.0)


def test_resample_weights_are_the_draws_of_the_other_bootstraps() -> None:
    values = np.random.default_rng(0).random((2, 7))
    found = values @ resample_weights(7, num_resamples=100, seed=3)
    counts = np.concatenate(list(resample_counts(7, num_resamples=100, seed=3)))
    np.testing.assert_allclose(found[:, 0], values.mean(axis=1))
    np.testing.assert_allclose(found[0, 1:], [np.repeat(values[0], row.astype(int)).mean() for row in counts])


def test_one_question_has_no_interval() -> None:
    column = (np.array([[0.25]]) @ resample_weights(1))[0]
    estimate = estimate_of(column)
    assert (estimate.value, estimate.low, estimate.high) == (0.25, None, None)


def test_an_interval_that_reaches_into_never_is_open() -> None:
    column = np.array([3.0, *np.arange(1.0, 98.0), np.nan, np.nan, np.nan])
    cost = estimate_or_never(column, never=math.inf)
    assert (cost.low, cost.high, cost.num_undefined) == (3.0, None, 3)
    saving = estimate_or_never(-column, never=-math.inf)
    assert (saving.low, saving.high) == (None, -3.0)
    nothing = estimate_or_never(np.array([np.nan, 1.0]), never=math.inf)
    assert (nothing.value, nothing.low, nothing.high) == (None, None, None)
