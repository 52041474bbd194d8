"""Allocations against recorded vectors, the best of all allocations, a plain loop, and drawn samples."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special

from selfcal_lightning.capability.allocation import (
    beta_allocation,
    expected_solved,
    greedy_allocation,
    interpolated_allocation,
    round_to_total,
    sequential_allocation,
)
from selfcal_lightning.capability.distributions import beta_pass_at_k
from selfcal_lightning.metrics.capability import simulated_pass_at_k

Vectors = Callable[[str], dict[str, Any]]
CHANCES = st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.5, 0.9, 1.0]), min_size=1, max_size=6)


def _reference_loop_allocation(p: list[float], total: int, minimum: int, maximum: int) -> list[int]:
    """Look at every question for every sample."""
    clipped = [min(max(chance, 1e-6), 1.0 - 1e-6) for chance in p]
    given = [minimum] * len(p)
    for _ in range(total - sum(given)):
        gains = [q * (1.0 - q) ** k if k < maximum else -1.0 for q, k in zip(clipped, given, strict=True)]
        if max(gains) < 0.0:
            break
        given[gains.index(max(gains))] += 1
    return given


def _all_allocations(size: int, total: int) -> list[tuple[int, ...]]:
    return [given for given in itertools.product(range(total + 1), repeat=size) if sum(given) == total]


def _reference_drawn_solved(rows: list[list[bool]], total: int) -> tuple[list[int], list[bool]]:
    """Give one sample after another to the open question with the largest 1 / (2 + failures)."""
    drawn, solved = [0] * len(rows), [False] * len(rows)
    for _ in range(total):
        open_ = [i for i, row in enumerate(rows) if not solved[i] and drawn[i] < len(row)]
        if not open_:
            break
        chosen = max(open_, key=lambda i: (1.0 / (2.0 + drawn[i]), -i))
        solved[chosen] = rows[chosen][drawn[chosen]]
        drawn[chosen] += 1
    return drawn, solved


def test_greedy_equals_the_vectors(vectors: Vectors) -> None:
    cases = vectors("greedy_budget_allocation")["cases"]
    for case in cases:
        options = {"minimum": case["min_budget"], "maximum": case["max_budget"]}
        if "raises" in case:
            with pytest.raises(ValueError, match="Expected `total` to be at least"):
                greedy_allocation(case["confidences"], case["total_budget"], **options)
        else:
            found = greedy_allocation(case["confidences"], case["total_budget"], **options)
            assert found.tolist() == case["allocation"]
    assert any("raises" in case for case in cases)


def test_interpolation_keeps_the_total(vectors: Vectors) -> None:
    for case in vectors("interpolated_budget")["cases"]:
        found = interpolated_allocation(case["uniform"], case["greedy"], case["alpha"])
        assert found.sum() == case["total"]
        mixed = case["alpha"] * np.array(case["uniform"]) + (1.0 - case["alpha"]) * np.array(case["greedy"])
        assert (np.abs(found - mixed) < 1.0).all()
    for case in vectors("round_to_integers_bug")["cases"]:
        found = round_to_total(case["x"], case["target"])
        assert found.sum() == case["target"]
        assert (np.abs(found - np.array(case["x"])) < 1.0).all()


def test_expected_solved_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("recommended_closed_forms")["cases"]:
        if "budget" in case:
            samples, correct = np.array(case["counts_n_c"]).T
            found = expected_solved(case["budget"], samples, correct)
            assert_allclose(found, case["per_question"], atol=1e-9)


def test_closed_form_is_the_mean_of_what_the_reference_draws_once(vectors: Vectors) -> None:
    """The reference draws one set of samples with the seed of all questions; the mean over seeds is the closed form."""
    for case in vectors("evaluate_passatk_sampled")["cases"]:
        n, c, budget = case["num_samples"], case["num_correct"], min(case["budget"], case["num_samples"])
        right = np.arange(n) < c
        draws = [np.random.default_rng(seed).choice(n, budget, replace=False) for seed in range(4000)]
        share = np.mean([right[draw].any() for draw in draws])
        assert expected_solved([budget], [n], [c])[0] == pytest.approx(share, abs=0.03)
        if share in (0.0, 1.0):
            assert case["any_correct"] == bool(share)


@settings(deadline=None)
@given(CHANCES, st.integers(0, 30), st.integers(0, 2), st.integers(2, 8))
def test_the_heap_equals_a_loop(p: list[float], total: int, minimum: int, maximum: int) -> None:
    total += minimum * len(p)
    found = greedy_allocation(p, total, minimum=minimum, maximum=maximum)
    assert found.tolist() == _reference_loop_allocation(p, total, minimum, maximum)
    assert found.sum() == min(total, maximum * len(p))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3), st.integers(0, 6), st.floats(0.3, 20.0))
def test_greedy_is_the_best_of_all(p: list[float], total: int, concentration: float) -> None:
    every = np.array(_all_allocations(len(p), total))
    best = simulated_pass_at_k(p, every).sum(axis=1).max()
    found = greedy_allocation(p, total, maximum=100)
    assert simulated_pass_at_k(p, found).sum() == pytest.approx(best, abs=1e-9)
    right, wrong = concentration * np.array(p), concentration * (1.0 - np.array(p))
    best = beta_pass_at_k(p, every, concentration=concentration).sum(axis=1).max()
    found = beta_allocation(right, wrong, total, maximum=100)
    assert beta_pass_at_k(p, found, concentration=concentration).sum() == pytest.approx(best, abs=1e-9)


def test_beta_gains_are_ratios_of_beta_functions() -> None:
    """The order in which samples are given is that of B(a + 1, b + k) / B(a, b)."""
    right, wrong = np.array([0.3, 1.0, 4.0]), np.array([0.7, 2.0, 1.0])
    gains = {
        (i, k): special.beta(right[i] + 1.0, wrong[i] + k) / special.beta(right[i], wrong[i])
        for i in range(3)
        for k in range(12)
    }
    order = sorted(gains, key=gains.__getitem__, reverse=True)
    for total in range(13):
        wanted = np.bincount([i for i, _ in order[:total]], minlength=3)
        assert beta_allocation(right, wrong, total, maximum=100).tolist() == wanted.tolist()


def test_tiny_gains_are_still_ordered() -> None:
    """B(a + 1, b + k) / B(a, b) of a nearly certain question underflows soon; it still goes on getting samples."""
    found = beta_allocation([1e9, 1e9], [1e-3, 1e-3], 80, maximum=50)
    assert found.tolist() == [40, 40]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.floats(0.0, 1.0))
def test_interpolation_lies_between_and_keeps_the_sum(given_: list[int], weight: float) -> None:
    first, second = np.array(given_), np.roll(given_, 1)
    found = interpolated_allocation(first, second, weight)
    assert found.sum() == first.sum()
    assert (found >= np.minimum(first, second)).all()
    assert (found <= np.maximum(first, second)).all()
    assert interpolated_allocation(first, second, 1.0).tolist() == first.tolist()
    assert interpolated_allocation(first, second, 0.0).tolist() == second.tolist()


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=5), st.integers(0, 20))
def test_sequential_equals_a_loop(rows: list[list[bool]], total: int) -> None:
    found = sequential_allocation(rows, total)
    drawn, solved = _reference_drawn_solved(rows, total)
    assert found.allocation.tolist() == drawn
    assert found.solved.tolist() == solved


def test_a_verifier_beats_a_plan() -> None:
    generator = np.random.default_rng(0)
    p = generator.beta(0.6, 0.7, 500)
    rows = generator.random((500, 64)) < p[:, None]
    total = 4 * len(p)
    plan = greedy_allocation(np.full(500, p.mean()), total, maximum=64)
    solved = expected_solved(plan, 64, rows.sum(axis=1)).mean()
    found = sequential_allocation(rows, total)
    assert found.allocation.sum() == total
    assert found.solved.mean() > solved + 0.03


def test_a_prior_goes_first_where_it_is_sure() -> None:
    found = sequential_allocation([[False] * 3, [True] * 3], 1, right=[1.0, 5.0], wrong=[5.0, 1.0])
    assert found.allocation.tolist() == [0, 1]
    assert found.solved.tolist() == [False, True]
