import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats
from support.house import Vectors

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.metrics import capability
from selfcal_lightning.metrics.discrimination import kendall, pearson

ANSWERS = st.lists(st.sampled_from(["7", "8", "9", None]), max_size=9)


def _reference_exact_pass_at_k(num_samples: int, num_correct: int, k: int) -> Fraction:
    return 1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k))


def _reference_listed_pairs(answers: list[str | None]) -> float | None:
    pairs = list(itertools.combinations(answers, 2))
    return sum(a is not None and a == b for a, b in pairs) / len(pairs) if pairs else None


def test_pass_at_k_equals_the_vectors(vectors: Vectors) -> None:
    refused = 0
    for case in vectors("pass_at_k")["cases"]:
        if case["k"] > case["n"]:
            refused += 1
            with pytest.raises(ValueError, match="Expected `k` to be at most the number of samples"):
                capability.pass_at_k(case["n"], case["c"], case["k"])
        else:
            assert capability.pass_at_k(case["n"], case["c"], case["k"]) == pytest.approx(case["pass_at_k"], abs=1e-9)
    assert refused < len(vectors("pass_at_k")["cases"])


def test_simulated_pass_at_k_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("simulate_passk")["cases"]:
        p, out = np.array(list(case["confidences"].values())), case["out"]
        found = capability.simulated_pass_at_k(p[:, None], out["k_values"])
        error = np.sqrt((found * (1.0 - found)).sum(axis=0)) / len(p)
        assert_allclose(found.mean(axis=0), out["mean"], atol=1e-9)
        assert_allclose(error, out["std"], atol=1e-9)
        assert_allclose(found.mean(axis=0) - 1.96 * error, out["ci_lower"], atol=1e-9)
        assert_allclose(found.mean(axis=0) + 1.96 * error, out["ci_upper"], atol=1e-9)


def test_errors_of_instances_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("instance_passk_metrics")["cases"]:
        samples, correct = np.array([case["counts"][name] for name in case["confidence"]]).T
        for k, out in case["out"].items():
            wanted = capability.pass_at_k(samples, correct, int(k))
            found = capability.simulated_pass_at_k(list(case["confidence"].values()), int(k))
            assert np.mean((found - wanted) ** 2) == pytest.approx(out["mse"], abs=1e-9)
            assert np.mean(np.abs(found - wanted)) == pytest.approx(out["mae"], abs=1e-9)
            assert pearson(found, wanted) == pytest.approx(out["pearson_r"], abs=1e-9)


@settings(deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_pass_at_k_equals_exact_fractions(case: tuple[int, int, int]) -> None:
    assert capability.pass_at_k(*case) == pytest.approx(float(_reference_exact_pass_at_k(*case)), abs=1e-12)


def test_large_counts_keep_their_digits() -> None:
    # 1 - C(10^6 - 1, 1) / C(10^6, 1) = 10^-6; and one right among 5000, of which 4999 are drawn.
    assert capability.pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-12)
    assert capability.pass_at_k(5000, 1, 4999) == pytest.approx(0.9998, rel=1e-12)
    assert capability.pass_at_k(5000, 2500, 64) == pytest.approx(
        float(_reference_exact_pass_at_k(5000, 2500, 64)), rel=1e-12
    )
    assert capability.simulated_pass_at_k(1e-12, 100) == pytest.approx(1e-10, rel=1e-9)


@settings(deadline=None)
@given(ANSWERS)
def test_agreeing_pairs_equal_all_pairs(answers: list[str | None]) -> None:
    found, wanted = capability.agreeing_pairs(answers), _reference_listed_pairs(answers)
    assert found == (None if wanted is None else pytest.approx(wanted, abs=1e-12))
    assert capability.agreeing_pairs(answers[::-1]) == found
    if found is not None:
        assert found <= capability.top_share(answers) <= 1.0


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (capability.pass_at_k, ([0], [0], 0), "`num_samples` .* got 0"),
        (capability.pass_at_k, ([4], [5], 1), "`num_correct` .* got 5 of 4"),
        (capability.pass_at_k, ([4], [-1], 1), "`num_correct` .* got -1"),
        (capability.pass_at_k, ([4], [1.5], 1), "`num_correct` .* got 1.5"),
        (capability.pass_at_k, ([4], [None], 1), "`num_correct`"),
        (capability.pass_at_k, ([4, 2], [1, 1], 3), "`k` .* got k = 3 for 2"),
        (capability.simulated_pass_at_k, ([1.5], 2), "`p`"),
        (capability.simulated_pass_at_k, ([0.5], -1), "`k`"),
        (capability.target_gap, ([1], [1.5]), "expected_accuracy"),
        *(
            (function, arguments, name)
            for function in (capability.squared_errors, capability.error_parts)
            for arguments, name in (
                (([0.5], [1], 1), "`num_samples`"),
                (([1.5], [1], 2), "`predicted`"),
                (([0.5, 0.5], [1], 2), "same length"),
                (([[0.5]], [1], 2), "one-dimensional"),
            )
        ),
    ],
)
def test_wrong_arguments_are_named(function: Callable, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)


COUNTS = st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.floats(0.0, 1.0)))


def _reference_listed_response_error(p: float, num_correct: int, num_samples: int) -> float:
    labels = [1.0] * num_correct + [0.0] * (num_samples - num_correct)
    return sum((p - label) ** 2 for label in labels) / num_samples


@pytest.mark.parametrize("num_samples", [2, 3, 8])
@pytest.mark.parametrize("truth", [0.0, 0.1, 0.5, 0.93])
def test_debiased_error_has_the_right_expectation(num_samples: int, truth: float) -> None:
    """The error of every possible count, weighted by its binomial chance, is (p - c*)^2 whatever n is."""
    counts = np.arange(num_samples + 1)
    weights = stats.binom.pmf(counts, num_samples, truth)
    predicted = np.full(len(counts), 0.3)
    found = weights @ capability.squared_errors(predicted, counts, num_samples)
    assert found == pytest.approx((0.3 - truth) ** 2, abs=1e-12)
    raw = weights @ capability.squared_errors(predicted, counts, num_samples, debiased=False)
    assert raw == pytest.approx((0.3 - truth) ** 2 + truth * (1.0 - truth) / num_samples, abs=1e-12)


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=1, max_size=8))
def test_parts_add_up_and_equal_single_responses(cases: list[tuple[int, int, float]]) -> None:
    samples, correct, predicted = (list(column) for column in zip(*cases, strict=True))
    parts = capability.error_parts(predicted, correct, samples)
    assert parts.response == pytest.approx(parts.capability + parts.spread, abs=1e-12)
    listed = [_reference_listed_response_error(p, c, n) for p, c, n in zip(predicted, correct, samples, strict=True)]
    assert parts.response == pytest.approx(np.mean(listed), abs=1e-12)
    assert parts.capability == pytest.approx(capability.squared_error(predicted, correct, samples), abs=1e-12)


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=2, max_size=8))
def test_a_constant_has_no_skill_and_the_truth_has_all(cases: list[tuple[int, int, float]]) -> None:
    samples, correct, _ = (np.array(column) for column in zip(*cases, strict=True))
    share = correct / samples
    constant = capability.skill(np.full(len(share), share.mean()), correct, samples)
    assert constant is None or constant == pytest.approx(0.0, abs=1e-6)
    whole = capability.skill(share, correct, samples, debiased=False)
    assert whole is None or whole == pytest.approx(1.0)


def test_what_is_not_defined_is_none() -> None:
    assert capability.squared_error([], [], 4) is None
    assert capability.skill([], [], 4) is None
    assert capability.error_parts([], [], 4) is None
    assert capability.random_brier([]) is None
    assert capability.skill([0.1, 0.9], [2, 2], 4) is None  # the capabilities do not differ
    assert capability.target_gap([], []) is None
    assert kendall([1.0, 1.0], [0.0, 1.0]) is None
    gap = capability.target_gap([1, 1], [0.5, 1.0])
    assert gap is not None
    assert (gap.mae, gap.spearman, gap.kendall) == (0.25, None, None)


def test_values_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("metric_diff")["cases"]:
        found, out = capability.target_gap(case["response"], case["capability"]), case["out"]
        assert found is not None
        assert found.mae == pytest.approx(out["mae"], abs=1e-6)
        assert found.spearman == pytest.approx(out["spearman_correlation"], abs=1e-6)
        assert found.kendall == pytest.approx(out["kendall_correlation"], abs=1e-6)
    for case in vectors("random_brier_baseline")["cases"]:
        assert capability.random_brier(case["expected_accuracy"]) == pytest.approx(case["random_brier"], abs=1e-9)


def test_drawn_verdicts_have_the_capabilities_as_their_mean() -> None:
    truth = np.array([0.0, 0.25, 1.0])
    drawn = np.mean([capability.drawn_verdicts(truth, seed=seed) for seed in range(2000)], axis=0)
    assert drawn == pytest.approx(truth, abs=0.03)
    assert capability.drawn_verdicts(truth).tolist() == capability.drawn_verdicts(truth).tolist()


def _questions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(0)
    truth = generator.beta(0.6, 0.7, 400)
    samples = generator.integers(2, 12, 400)
    predicted = np.clip(truth + generator.normal(0.0, 0.2, 400), 0.0, 1.0)
    return torch.tensor(predicted), torch.tensor(generator.binomial(samples, truth)), torch.tensor(samples)


def _computed(*columns: torch.Tensor, step: int = 90, **options: object) -> dict[str, float]:
    metric = CapabilityMetrics(**options)
    for start in range(0, len(columns[0]), step):
        metric.update(*(column[start : start + step] for column in columns))
    return metric.compute()


def test_capability_values_equal_the_vectors(vectors: Vectors) -> None:
    """Counts of 100 samples. Correlations of a constant, which the reference calls 0, are not defined here."""
    for case in vectors("capability_metrics")["cases"]:
        correct = torch.tensor(case["c_star"]).mul(100).round()
        found = _computed(torch.tensor(case["c"]).double(), correct, torch.full_like(correct, 100), debiased=False)
        out = case["out"]
        for key, name in (("MSE", "mse"), ("MAE", "mae"), ("RMSE", "rmse"), ("ECE", "ece")):
            assert found[f"capability/{key}"] == pytest.approx(out[name], abs=1e-6)
        for key, name in (("Pearson", "pearson_r"), ("Spearman", "spearman_r")):
            value = found[f"capability/{key}"]
            assert (0.0 if math.isnan(value) else value) == pytest.approx(out[name], abs=1e-6)
        assert found["capability/Questions"] == out["num_examples"]


@pytest.mark.parametrize("debiased", [True, False])
def test_errors_equal_the_functions_in_any_batches(debiased: bool) -> None:
    columns = _questions()
    found = _computed(*columns, debiased=debiased)
    predicted, correct, samples = columns
    error = capability.squared_error(predicted, correct, samples, debiased=debiased)
    assert found["capability/MSE"] == pytest.approx(error, abs=1e-12)
    assert found["capability/RMSE"] == pytest.approx(error**0.5, abs=1e-12)
    assert found["capability/Skill"] == pytest.approx(
        capability.skill(predicted, correct, samples, debiased=debiased), abs=1e-12
    )
    assert _computed(*columns, step=7, debiased=debiased) == found
    assert _computed(*(column.flip(0) for column in columns), debiased=debiased) == found


def test_nothing_and_bad_input() -> None:
    metric, one = CapabilityMetrics(), torch.tensor([1])
    assert math.isnan(metric.compute()["capability/MSE"])
    metric.update(torch.tensor([0.5]), one, one)
    with pytest.raises(ValueError, match="`num_samples` to be at least 2"):
        metric.compute()
    with pytest.raises(ValueError, match="predicted"):
        metric.update(torch.tensor([1.5]), one, one)
