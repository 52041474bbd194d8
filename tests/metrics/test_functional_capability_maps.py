"""Maps of scores against recorded vectors, the minimax formula, order statistics and simulated questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from selfcal_lightning.capability.distributions import fit_pass_at_k_maps, isotonic_knots, quantile_mapping
from selfcal_lightning.metrics.capability import pass_at_k, simulated_pass_at_k

Vectors = Callable[[str], dict[str, Any]]
QUESTIONS = st.lists(st.tuples(st.integers(0, 10).map(lambda n: n / 10), st.integers(0, 8)), min_size=1, max_size=12)


def _reference_minimax_isotonic(targets: list[float]) -> list[float]:
    """Return the isotonic fit by its minimax formula: ``max_{s <= i} min_{e >= i} mean(targets[s..e])``."""
    size = len(targets)
    means = {(s, e): sum(targets[s : e + 1]) / (e + 1 - s) for s in range(size) for e in range(s, size)}
    return [max(min(means[s, e] for e in range(i, size)) for s in range(i + 1)) for i in range(size)]


def _reference_listed_quantile(distribution: list[float], level: float) -> float:
    """Return the quantile between order statistics, by hand."""
    ordered, at = sorted(distribution), level * (len(distribution) - 1)
    below = min(int(at), len(ordered) - 2) if len(ordered) > 1 else 0
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def test_isotonic_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("isotonic_posthoc")["cases"]:
        knots = isotonic_knots(case["x_val"], case["y_val"])
        assert_allclose(np.interp(case["x_test"], *knots), case["out"], atol=1e-9)


def test_quantile_mapping_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("quantile_mapping_posthoc")["cases"]:
        found = quantile_mapping(case["confidence"], case["target_distribution"], ties="first")
        assert_allclose(found, case["out"], atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_isotonic_equals_its_minimax_formula(targets: list[float]) -> None:
    scores = np.arange(len(targets)) / 7.0
    x, y = isotonic_knots(scores, targets)
    assert_allclose(np.interp(scores, x, y), _reference_minimax_isotonic(targets), atol=1e-9)


@settings(deadline=None)
@given(QUESTIONS, st.lists(st.floats(-1.0, 2.0), min_size=1, max_size=6))
def test_maps_rise_with_the_score_and_with_k(questions: list[tuple[float, int]], asked: list[float]) -> None:
    scores, correct = zip(*questions, strict=True)
    maps = fit_pass_at_k_maps(scores, correct, 8, ks=[4, 1, 2, 8])
    assert maps.k == (1, 2, 4, 8)
    found = maps.transform(sorted(asked))
    assert (np.diff(found, axis=0) >= -1e-9).all()
    assert (np.diff(found, axis=1) >= -1e-12).all()
    assert ((found >= 0.0) & (found <= 1.0)).all()
    # What the map says of the questions that it was fitted to is right on average.
    means = [pass_at_k(8, correct, k).mean() for k in maps.k]
    assert_allclose(maps.transform(scores).mean(axis=1), means, atol=1e-9)


def test_maps_mend_the_curve_of_a_point() -> None:
    generator = np.random.default_rng(0)
    p = generator.random(2000)
    theta = generator.beta(1.2 * p, 1.2 * (1.0 - p))
    correct = generator.binomial(64, theta)
    maps = fit_pass_at_k_maps(p[:1000], correct[:1000], 64, ks=[1, 4, 16])
    found = maps.transform(p[1000:])
    for k, predicted in zip(maps.k, found, strict=True):
        truth = simulated_pass_at_k(theta[1000:], k)
        assert predicted.mean() == pytest.approx(truth.mean(), abs=0.03)
        if k > 1:
            assert simulated_pass_at_k(p[1000:], k).mean() > truth.mean() + 0.08


@settings(deadline=None)
@given(
    st.lists(st.integers(-5, 5), min_size=2, max_size=8, unique=True),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
)
def test_quantile_mapping_equals_order_statistics(scores: list[int], distribution: list[float]) -> None:
    found = quantile_mapping(scores, distribution)
    order = sorted(scores)
    wanted = [_reference_listed_quantile(distribution, order.index(score) / (len(scores) - 1)) for score in scores]
    assert_allclose(found, wanted, atol=1e-9)
    assert_allclose(quantile_mapping(scores, distribution, ties="first"), wanted, atol=1e-9)


def test_equal_scores_get_equal_values_in_any_order() -> None:
    assert quantile_mapping([0.3, 0.3, 0.7, 0.1], [0.0, 0.5, 1.0]).tolist() == [0.5, 0.5, 1.0, 0.0]
    assert quantile_mapping([0.7, 0.1, 0.3, 0.3], [0.0, 0.5, 1.0]).tolist() == [1.0, 0.0, 0.5, 0.5]
    assert quantile_mapping([0.4], [0.0, 0.2, 1.0]).tolist() == [0.2]
    assert quantile_mapping([], [0.5]).tolist() == []
