"""Capability against recorded vectors, exact fractions, enumeration and simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from selfcal_lightning.metrics.capability import (
    agreeing_pairs,
    expected_accuracy,
    pass_at_k,
    simulated_pass_at_k,
    squared_error,
    top_share,
)
from selfcal_lightning.metrics.discrimination import pearson

Vectors = Callable[[str], dict[str, Any]]
ANSWERS = st.lists(st.sampled_from(["7", "8", "9", None]), max_size=9)


def _reference_exact_pass_at_k(num_samples: int, num_correct: int, k: int) -> Fraction:
    return 1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k))


def _reference_listed_pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Look at every way to draw k of the samples."""
    right = [True] * num_correct + [False] * (num_samples - num_correct)
    draws = list(itertools.combinations(right, k))
    return sum(any(draw) for draw in draws) / len(draws)


def _reference_listed_pairs(answers: list[str | None]) -> float | None:
    pairs = list(itertools.combinations(answers, 2))
    return sum(a is not None and a == b for a, b in pairs) / len(pairs) if pairs else None


def test_pass_at_k_equals_the_vectors(vectors: Vectors) -> None:
    refused = 0
    for case in vectors("pass_at_k")["cases"]:
        if case["k"] > case["n"]:
            refused += 1
            with pytest.raises(ValueError, match="Expected `k` to be at most the number of samples"):
                pass_at_k(case["n"], case["c"], case["k"])
        else:
            assert pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["pass_at_k"], abs=1e-9)
    assert refused < len(vectors("pass_at_k")["cases"])


def test_dataset_pass_at_k_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("actual_passk_dataset")["cases"]:
        samples, correct = np.array(list(case["counts"].values())).T
        for k, mean in zip(case["out"]["k_values"], case["out"]["mean"], strict=True):
            assert pass_at_k(samples, correct, k).mean() == pytest.approx(mean, abs=1e-9)
        for k in case["out"]["skipped_k"]:
            with pytest.raises(ValueError, match=f"got k = {k} for {samples.min()}"):
                pass_at_k(samples, correct, k)


def test_simulated_pass_at_k_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("simulate_passk")["cases"]:
        p, out = np.array(list(case["confidences"].values())), case["out"]
        found = simulated_pass_at_k(p[:, None], out["k_values"])
        error = np.sqrt((found * (1.0 - found)).sum(axis=0)) / len(p)
        assert_allclose(found.mean(axis=0), out["mean"], atol=1e-9)
        assert_allclose(error, out["std"], atol=1e-9)
        assert_allclose(found.mean(axis=0) - 1.96 * error, out["ci_lower"], atol=1e-9)
        assert_allclose(found.mean(axis=0) + 1.96 * error, out["ci_upper"], atol=1e-9)


def test_errors_of_instances_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("instance_passk_metrics")["cases"]:
        samples, correct = np.array([case["counts"][name] for name in case["confidence"]]).T
        for k, out in case["out"].items():
            wanted = pass_at_k(samples, correct, int(k))
            found = simulated_pass_at_k(list(case["confidence"].values()), int(k))
            assert np.mean((found - wanted) ** 2) == pytest.approx(out["mse"], abs=1e-9)
            assert np.mean(np.abs(found - wanted)) == pytest.approx(out["mae"], abs=1e-9)
            assert pearson(found, wanted) == pytest.approx(out["pearson_r"], abs=1e-9)


def test_clipped_predictions_equal_the_vectors(vectors: Vectors) -> None:
    """What lies below a threshold counts as hopeless: its pass@k is 0 for every k."""
    for case in vectors("passk_clipping")["cases"]:
        p = np.array(list(case["confidence"].values()))
        kept = np.where(p >= case["threshold"], p, 0.0)
        assert kept.tolist() == list(case["out"].values())
        assert (simulated_pass_at_k(kept, 64)[p < case["threshold"]] == 0.0).all()


def test_many_samples_are_not_cut(vectors: Vectors) -> None:
    """The reference cuts right samples at its limit of 100, so that 150 of 200 become 100 of 100."""
    for case in vectors("load_model_data_cap_bug")["cases"]:
        names, samples, correct = zip(*case["rows"], strict=True)
        wanted = [case["expected_accuracy"][name] for name in names]
        assert_allclose(expected_accuracy(samples, correct), wanted, atol=1e-12)
        assert_allclose(pass_at_k(samples, correct, 1), wanted, atol=1e-12)
        cut = np.array([case["counts_after_cap"][name] for name in names])
        assert (np.abs(cut[:, 1] / cut[:, 0] - wanted) > 0.1).any()
        # Scaled instead of cut, the counts say the same.
        scaled = np.rint(np.array(wanted) * cut[:, 0])
        assert_allclose(expected_accuracy(cut[:, 0], scaled), wanted, atol=1e-12)


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_pass_at_k_equals_all_draws(case: tuple[int, int, int]) -> None:
    assert pass_at_k(*case) == pytest.approx(_reference_listed_pass_at_k(*case), abs=1e-12)
    assert pass_at_k(*case) == pytest.approx(float(_reference_exact_pass_at_k(*case)), abs=1e-12)


def test_large_counts_keep_their_digits() -> None:
    # 1 - C(10^6 - 1, 1) / C(10^6, 1) = 10^-6; and one right among 5000, of which 4999 are drawn.
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-12)
    assert pass_at_k(5000, 1, 4999) == pytest.approx(0.9998, rel=1e-12)
    assert pass_at_k(5000, 2500, 64) == pytest.approx(float(_reference_exact_pass_at_k(5000, 2500, 64)), rel=1e-12)
    assert simulated_pass_at_k(1e-12, 100) == pytest.approx(1e-10, rel=1e-9)


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.integers(0, 200))
def test_simulated_pass_at_k_equals_the_power(p: float, k: int) -> None:
    assert simulated_pass_at_k(p, k) == pytest.approx(1.0 - (1.0 - p) ** k, abs=1e-12)


def test_shapes_broadcast() -> None:
    found = pass_at_k(np.full((3, 1), 8), [[1], [2], [8]], [1, 2, 4, 8])
    assert found.shape == (3, 4)
    assert found[2].tolist() == [1.0] * 4
    assert (np.diff(found, axis=1) >= 0.0).all()
    assert pass_at_k(torch.tensor([4]), torch.tensor([1.0]), 2).tolist() == pytest.approx([0.5])
    assert pass_at_k([], [], 1).shape == (0,)


@settings(deadline=None)
@given(ANSWERS)
def test_agreeing_pairs_equal_all_pairs(answers: list[str | None]) -> None:
    found, wanted = agreeing_pairs(answers), _reference_listed_pairs(answers)
    assert found == (None if wanted is None else pytest.approx(wanted, abs=1e-12))
    assert agreeing_pairs(answers[::-1]) == found
    if found is not None:
        assert found <= top_share(answers) <= 1.0


def test_agreeing_pairs_have_no_bias_and_the_top_share_has_one() -> None:
    """Answers with chances .5, .3, .2 agree with chance .38; three samples of them are listed with their chances."""
    chances = {"a": 0.5, "b": 0.3, "c": 0.2}
    drawn = list(itertools.product(chances, repeat=3))
    weights = [math.prod(chances[answer] for answer in answers) for answers in drawn]
    pairs = sum(w * agreeing_pairs(answers) for w, answers in zip(weights, drawn, strict=True))
    top = sum(w * top_share(answers) for w, answers in zip(weights, drawn, strict=True))
    assert pairs == pytest.approx(0.38, abs=1e-12)
    assert top > 0.6


def test_unreadable_answers_count_but_never_agree() -> None:
    assert agreeing_pairs([None, None, None]) == 0.0
    assert agreeing_pairs(["7", "7", None]) == pytest.approx(1.0 / 3.0)
    assert top_share(["7", None, None]) == pytest.approx(1.0 / 3.0)
    assert top_share([]) is None
    assert agreeing_pairs(["7"]) is None


def test_raw_errors_equal_the_vectors(vectors: Vectors) -> None:
    """Counts of 100 samples; correlations of a constant, which the reference calls 0, are None here."""
    for case in vectors("capability_metrics")["cases"]:
        correct, out = np.rint(np.array(case["c_star"]) * 100), case["out"]
        assert squared_error(case["c"], correct, 100, debiased=False) == pytest.approx(out["mse"], abs=1e-9)
        assert (pearson(case["c"], case["c_star"]) or 0.0) == pytest.approx(out["pearson_r"], abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [0], 0), "Expected `num_samples` to be at least 1 everywhere, but got 0"),
        (([4], [5], 1), "Expected `num_correct` to be at most `num_samples`, but got 5 of 4"),
        (([4], [-1], 1), "Expected `num_correct` to hold whole numbers of at least 0, but got -1"),
        (([4], [1.5], 1), "Expected `num_correct` to hold whole numbers of at least 0, but got 1.5"),
        (([4], [None], 1), "Expected `num_correct` to be known"),
        (([4, 2], [1, 1], 3), "Expected `k` to be at most the number of samples, but got k = 3 for 2"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


def test_wrong_chances_are_named() -> None:
    with pytest.raises(ValueError, match=r"Expected `p` to lie in \[0, 1\]"):
        simulated_pass_at_k([1.5], 2)
    with pytest.raises(ValueError, match="Expected `k` to hold whole numbers"):
        simulated_pass_at_k([0.5], -1)
