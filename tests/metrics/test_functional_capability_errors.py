"""Errors of predicted capability: unbiased by enumeration, exact identities, recorded vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from selfcal_lightning.metrics.capability import error_parts, random_brier, skill, squared_error, squared_errors

Vectors = Callable[[str], dict[str, Any]]
COUNTS = st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.floats(0.0, 1.0)))


def _reference_listed_response_error(p: float, num_correct: int, num_samples: int) -> float:
    labels = [1.0] * num_correct + [0.0] * (num_samples - num_correct)
    return sum((p - label) ** 2 for label in labels) / num_samples


def _reference_integrated_brier(mu: float) -> float:
    return integrate.quad(lambda u: (u - mu) ** 2, 0.0, 1.0)[0]


def test_random_brier_equals_the_vectors_and_the_integral(vectors: Vectors) -> None:
    for case in vectors("random_brier_baseline")["cases"]:
        assert random_brier(case["expected_accuracy"]) == pytest.approx(case["random_brier"], abs=1e-9)
        assert 1.0 - random_brier(case["expected_accuracy"]) == pytest.approx(case["performance_1_minus"], abs=1e-9)
        wanted = np.mean([_reference_integrated_brier(mu) for mu in case["expected_accuracy"]])
        assert random_brier(case["expected_accuracy"]) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("num_samples", [2, 3, 8])
@pytest.mark.parametrize("truth", [0.0, 0.1, 0.5, 0.93])
def test_debiased_error_has_the_right_expectation(num_samples: int, truth: float) -> None:
    """The error of every possible count, weighted by its binomial chance, is (p - c*)^2 whatever n is."""
    counts = np.arange(num_samples + 1)
    weights = stats.binom.pmf(counts, num_samples, truth)
    predicted = np.full(len(counts), 0.3)
    found = weights @ squared_errors(predicted, counts, num_samples)
    assert found == pytest.approx((0.3 - truth) ** 2, abs=1e-12)
    raw = weights @ squared_errors(predicted, counts, num_samples, debiased=False)
    assert raw == pytest.approx((0.3 - truth) ** 2 + truth * (1.0 - truth) / num_samples, abs=1e-12)


def test_few_samples_say_what_many_say() -> None:
    generator = np.random.default_rng(0)
    truth = generator.beta(0.5, 0.5, 20_000)
    predicted = np.clip(truth + generator.normal(0.0, 0.2, len(truth)), 0.0, 1.0)
    few, many = generator.binomial(8, truth), generator.binomial(100, truth)
    true_error = np.mean((predicted - truth) ** 2)
    assert squared_error(predicted, few, 8) == pytest.approx(true_error, abs=0.002)
    assert squared_error(predicted, many, 100) == pytest.approx(true_error, abs=0.002)
    assert squared_error(predicted, few, 8, debiased=False) > true_error + 0.01
    true_skill = 1.0 - true_error / np.var(truth)
    assert skill(predicted, few, 8) == pytest.approx(true_skill, abs=0.02)
    assert skill(predicted, few, 8, debiased=False) < true_skill - 0.05


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=1, max_size=8))
def test_parts_add_up_and_equal_single_responses(cases: list[tuple[int, int, float]]) -> None:
    samples, correct, predicted = (list(column) for column in zip(*cases, strict=True))
    parts = error_parts(predicted, correct, samples)
    assert parts.response == pytest.approx(parts.capability + parts.spread, abs=1e-12)
    listed = [_reference_listed_response_error(p, c, n) for p, c, n in zip(predicted, correct, samples, strict=True)]
    assert parts.response == pytest.approx(np.mean(listed), abs=1e-12)
    assert parts.capability == pytest.approx(squared_error(predicted, correct, samples), abs=1e-12)


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=2, max_size=8))
def test_a_constant_has_no_skill_and_the_truth_has_all(cases: list[tuple[int, int, float]]) -> None:
    samples, correct, _ = (np.array(column) for column in zip(*cases, strict=True))
    share = correct / samples
    constant = skill(np.full(len(share), share.mean()), correct, samples)
    assert constant is None or constant == pytest.approx(0.0, abs=1e-6)
    whole = skill(share, correct, samples, debiased=False)
    assert whole is None or whole == pytest.approx(1.0)


def test_nothing_gives_none() -> None:
    assert squared_error([], [], 4) is None
    assert skill([], [], 4) is None
    assert error_parts([], [], 4) is None
    assert random_brier([]) is None
    assert skill([0.1, 0.9], [2, 2], 4) is None  # the capabilities do not differ


@pytest.mark.parametrize("function", [squared_errors, squared_error, skill, error_parts])
def test_wrong_arguments_are_named(function: Callable[..., Any]) -> None:
    for arguments, message in (
        (([0.5], [1], 1), "Expected `num_samples` to be at least 2 where the noise of the samples is taken out"),
        (([1.5], [1], 2), r"Expected `predicted` to lie in \[0, 1\]"),
        (([0.5, 0.5], [1], 2), "Expected `predicted`, `num_correct` to have the same length"),
        (([[0.5]], [1], 2), "Expected `predicted` to be one-dimensional"),
        (([0.5], [3], 2), "Expected `num_correct` to be at most `num_samples`, but got 3 of 2"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*arguments)


def test_one_sample_is_enough_for_the_raw_error() -> None:
    assert squared_error([0.5, 1.0], [1, 0], 1, debiased=False) == pytest.approx((0.25 + 1.0) / 2)
