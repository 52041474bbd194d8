import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special, stats
from support.house import Vectors

from selfcal_lightning.capability import allocation, fitted_maps
from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.confidence.scaling import IsotonicMap
from selfcal_lightning.metrics import capability
from selfcal_lightning.metrics.capability import pass_at_k, simulated_pass_at_k
from selfcal_lightning.metrics.discrimination import kendall, pearson
from selfcal_lightning.rewards.search import paths_to_keep, required_samples, samples_per_path


def _reference_exact_pass_at_k(num_samples: int, num_correct: int, k: int) -> Fraction:
    return 1 - Fraction(math.comb(num_samples - num_correct, k), math.comb(num_samples, k))


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
    for case in vectors("recommended_closed_forms")["cases"]:
        if "budget" in case:
            found = pass_at_k(*np.array(case["counts_n_c"]).T, case["budget"])
            assert_allclose(found, case["per_question"], atol=1e-9)


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


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_pass_at_k_equals_exact_fractions(case: tuple[int, int, int]) -> None:
    assert pass_at_k(*case) == pytest.approx(float(_reference_exact_pass_at_k(*case)), abs=1e-12)


def test_large_counts_keep_their_digits() -> None:
    # 1 - C(10^6 - 1, 1) / C(10^6, 1) = 10^-6; and one right among 5000, of which 4999 are drawn.
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-12)
    assert pass_at_k(5000, 1, 4999) == pytest.approx(0.9998, rel=1e-12)
    assert pass_at_k(5000, 2500, 64) == pytest.approx(float(_reference_exact_pass_at_k(5000, 2500, 64)), rel=1e-12)
    assert simulated_pass_at_k(1e-12, 100) == pytest.approx(1e-10, rel=1e-9)


@given(st.lists(st.sampled_from(["7", "8", "9", None]), max_size=9))
def test_agreeing_pairs_equal_all_pairs(answers: list[str | None]) -> None:
    found, pairs = capability.agreeing_pairs(answers), list(itertools.combinations(answers, 2))
    assert found == (pytest.approx(np.mean([a is not None and a == b for a, b in pairs])) if pairs else None)
    assert capability.agreeing_pairs(answers[::-1]) == found
    if found is not None:
        assert found <= capability.top_share(answers) <= 1.0


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (pass_at_k, ([4], [5], 1), "`num_correct` .* got 5 of 4"),
        (pass_at_k, ([4, 2], [1, 1], 3), "`k` .* got k = 3 for 2"),
        (capability.target_gap, ([1], [1.5]), "expected_accuracy"),
        (capability.squared_errors, ([0.5], [1], 1), "`num_samples`"),
    ],
)
def test_wrong_arguments_are_named(function: Callable, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*arguments)


CHANCES = st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.9, 1.0])
COUNTS = st.integers(2, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.floats(0.0, 1.0)))


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


@given(st.lists(COUNTS, min_size=1, max_size=8))
def test_parts_add_up_and_equal_single_responses(cases: list[tuple[int, int, float]]) -> None:
    samples, correct, predicted = (list(column) for column in zip(*cases, strict=True))
    parts = capability.error_parts(predicted, correct, samples)
    assert parts.response == pytest.approx(parts.capability + parts.spread, abs=1e-12)
    listed = [((p - 1.0) ** 2 * c + p**2 * (n - c)) / n for p, c, n in zip(predicted, correct, samples, strict=True)]
    assert parts.response == pytest.approx(np.mean(listed), abs=1e-12)
    assert parts.capability == pytest.approx(capability.squared_error(predicted, correct, samples), abs=1e-12)


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
    generator = np.random.default_rng(0)
    truth, samples = generator.beta(0.6, 0.7, 400), generator.integers(2, 12, 400)
    predicted = np.clip(truth + generator.normal(0.0, 0.2, 400), 0.0, 1.0)
    columns = [torch.tensor(column) for column in (predicted, generator.binomial(samples, truth), samples)]
    found = _computed(*columns, debiased=debiased)
    predicted, correct, samples = columns
    error = capability.squared_error(predicted, correct, samples, debiased=debiased)
    assert found["capability/MSE"] == pytest.approx(error, abs=1e-12)
    assert found["capability/RMSE"] == pytest.approx(error**0.5, abs=1e-12)
    skill = capability.skill(predicted, correct, samples, debiased=debiased)
    assert found["capability/Skill"] == pytest.approx(skill, abs=1e-12)
    assert _computed(*columns, step=7, debiased=debiased) == found
    assert _computed(*(column.flip(0) for column in columns), debiased=debiased) == found


def test_nothing_and_bad_input() -> None:
    metric, one = CapabilityMetrics(), torch.tensor([1])
    assert math.isnan(metric.compute()["capability/MSE"])
    metric.update(torch.tensor([0.5]), one, one)
    with pytest.raises(ValueError, match="`num_samples` to be at least 2"):
        metric.compute()


# ---- plans of samples and maps of capabilities


def _reference_scipy_log_likelihood(p: np.ndarray, c: np.ndarray, n: int, fitted: fitted_maps.InflatedBeta) -> float:
    """Return the log-likelihood of counts under a mixture of atoms and scipy's beta-binomial."""
    body = stats.betabinom(n, fitted.concentration * p, fitted.concentration * (1.0 - p)).pmf(c)
    atoms = np.where(c == 0, 1.0 - p, 0.0) + np.where(c == n, p, 0.0)
    return float(np.log(fitted.inflation * atoms + (1.0 - fitted.inflation) * body).sum())


@given(st.floats(0.001, 0.999), st.integers(0, 128), st.floats(0.01, 1e4))
def test_beta_pass_at_k_equals_the_ratio_of_beta_functions(p: float, k: int, concentration: float) -> None:
    found = fitted_maps.beta_pass_at_k(p, k, concentration=concentration)
    a, b = concentration * p, concentration * (1.0 - p)
    assert found == pytest.approx(1.0 - np.exp(special.betaln(a, b + k) - special.betaln(a, b)), abs=1e-9)
    # By Jensen's inequality a point is too high, and the mean of the distribution is the prediction itself.
    assert found <= simulated_pass_at_k(p, k) + 1e-12
    assert fitted_maps.beta_pass_at_k(p, 1, concentration=concentration) == pytest.approx(p, abs=1e-12)


def test_the_fit_is_the_likeliest_nearby() -> None:
    generator = np.random.default_rng(0)
    p = generator.uniform(0.05, 0.95, 400)
    theta = np.where(generator.random(400) < 0.3, generator.random(400) < p, generator.beta(4.0 * p, 4.0 * (1.0 - p)))
    correct = generator.binomial(32, theta)
    fitted = fitted_maps.fit_inflated_beta(p, correct, 32)
    best = _reference_scipy_log_likelihood(p, correct, 32, fitted)
    for step_w, step_s in ((0.01, 1.0), (-0.01, 1.0), (0.0, 1.03), (0.0, 0.97)):
        other = fitted_maps.InflatedBeta(fitted.inflation + step_w, fitted.concentration * step_s)
        assert _reference_scipy_log_likelihood(p, correct, 32, other) < best
    alone = fitted_maps.fit_concentration(p, correct, 32)
    best = _reference_scipy_log_likelihood(p, correct, 32, fitted_maps.InflatedBeta(0.0, alone))
    for factor in (0.97, 1.03):
        assert _reference_scipy_log_likelihood(p, correct, 32, fitted_maps.InflatedBeta(0.0, alone * factor)) < best


def test_quantile_mapping_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("quantile_mapping_posthoc")["cases"]:
        found = fitted_maps.quantile_mapping(case["confidence"], case["target_distribution"], ties="first")
        assert_allclose(found, case["out"], atol=1e-9)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_isotonic_equals_its_minimax_formula(targets: list[float]) -> None:
    scores = np.arange(len(targets)) / 7.0
    found, size = IsotonicMap.fit(scores, np.array(targets)).transform(scores), len(targets)
    means = {(s, e): sum(targets[s : e + 1]) / (e + 1 - s) for s in range(size) for e in range(s, size)}
    wanted = [max(min(means[s, e] for e in range(i, size)) for s in range(i + 1)) for i in range(size)]
    assert_allclose(found, wanted, atol=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 10).map(lambda n: n / 10), st.integers(0, 8)), min_size=1, max_size=12),
    st.lists(st.floats(-1.0, 2.0), min_size=1, max_size=6),
)
def test_maps_rise_with_the_score_and_with_k(questions: list[tuple[float, int]], asked: list[float]) -> None:
    scores, correct = zip(*questions, strict=True)
    maps = fitted_maps.fit_pass_at_k_maps(scores, correct, 8, ks=[4, 1, 2, 8])
    assert maps.k == (1, 2, 4, 8)
    found = maps.transform(sorted(asked))
    assert (np.diff(found, axis=0) >= -1e-9).all()
    assert (np.diff(found, axis=1) >= -1e-12).all()
    assert ((found >= 0.0) & (found <= 1.0)).all()
    # What the map says of the questions that it was fitted to is right on average.
    means = [pass_at_k(8, correct, k).mean() for k in maps.k]
    assert_allclose(maps.transform(scores).mean(axis=1), means, atol=1e-9)


@given(
    st.lists(st.integers(-5, 5), min_size=2, max_size=8, unique=True),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
)
def test_quantile_mapping_equals_order_statistics(scores: list[int], distribution: list[float]) -> None:
    found = fitted_maps.quantile_mapping(scores, distribution)
    place = np.array([sorted(scores).index(score) for score in scores]) * (len(distribution) - 1) / (len(scores) - 1)
    wanted = np.interp(place, range(len(distribution)), sorted(distribution))
    assert_allclose(found, wanted, atol=1e-9)
    assert_allclose(fitted_maps.quantile_mapping(scores, distribution, ties="first"), wanted, atol=1e-9)


def test_greedy_equals_the_vectors(vectors: Vectors) -> None:
    cases = vectors("greedy_budget_allocation")["cases"]
    for case in cases:
        options = {"minimum": case["min_budget"], "maximum": case["max_budget"]}
        if "raises" in case:
            with pytest.raises(ValueError, match="Expected `total` to be at least"):
                allocation.greedy_allocation(case["confidences"], case["total_budget"], **options)
        else:
            found = allocation.greedy_allocation(case["confidences"], case["total_budget"], **options)
            assert found.tolist() == case["allocation"]
    assert any("raises" in case for case in cases)


def test_interpolation_keeps_the_total(vectors: Vectors) -> None:
    for case in vectors("interpolated_budget")["cases"]:
        found = allocation.interpolated_allocation(case["uniform"], case["greedy"], case["alpha"])
        assert found.sum() == case["total"]
        mixed = case["alpha"] * np.array(case["uniform"]) + (1.0 - case["alpha"]) * np.array(case["greedy"])
        assert (np.abs(found - mixed) < 1.0).all()
    for case in vectors("round_to_integers_bug")["cases"]:
        found = allocation.round_to_total(case["x"], case["target"])
        assert found.sum() == case["target"]
        assert (np.abs(found - np.array(case["x"])) < 1.0).all()


@given(st.lists(CHANCES, min_size=1, max_size=6), st.integers(0, 30), st.integers(0, 2), st.integers(2, 8))
def test_the_heap_equals_a_loop(p: list[float], total: int, minimum: int, maximum: int) -> None:
    total += minimum * len(p)
    found = allocation.greedy_allocation(p, total, minimum=minimum, maximum=maximum)
    clipped, wanted = [min(max(chance, 1e-6), 1.0 - 1e-6) for chance in p], [minimum] * len(p)
    for _ in range(min(total, maximum * len(p)) - sum(wanted)):
        gains = [q * (1.0 - q) ** k if k < maximum else -1.0 for q, k in zip(clipped, wanted, strict=True)]
        wanted[gains.index(max(gains))] += 1
    assert found.tolist() == wanted


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
        assert allocation.beta_allocation(right, wrong, total, maximum=100).tolist() == wanted.tolist()
    # B(a + 1, b + k) / B(a, b) of a nearly certain question underflows soon; it still continues getting samples.
    found = allocation.beta_allocation([1e9, 1e9], [1e-3, 1e-3], 80, maximum=50)
    assert found.tolist() == [40, 40]


@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=5), st.integers(0, 20))
def test_sequential_equals_a_loop(rows: list[list[bool]], total: int) -> None:
    drawn, solved = [0] * len(rows), [False] * len(rows)
    for _ in range(total):  # one sample after another to the open question with the largest 1 / (2 + failures)
        open_ = [i for i, row in enumerate(rows) if not solved[i] and drawn[i] < len(row)]
        if open_:
            chosen = max(open_, key=lambda i: (1.0 / (2.0 + drawn[i]), -i))
            solved[chosen] = rows[chosen][drawn[chosen]]
            drawn[chosen] += 1
    assert [found.tolist() for found in allocation.sequential_allocation(rows, total)] == [drawn, solved]


def test_required_samples_equal_the_vectors(vectors: Vectors) -> None:
    cases = vectors("ias_N")["cases"]
    for case in cases:
        found = required_samples(case["p"], target=case["q"], num_paths=int(case["denom"]))
        assert found == case["N"], case
    assert len({case["denom"] for case in cases}) > 1


def test_paths_and_samples_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("determine_K_M")["cases"]:
        paths, samples = case["max_leaves_K"], case["max_samples_M"]
        for row, kept, drawn in zip(case["scores"], case["K_ias"], case["M_ias"], strict=True):
            assert paths_to_keep(row, samples_per_path=samples, maximum=paths) == kept
            assert [samples_per_path(row, num_paths=paths, maximum=samples)] * len(row) == drawn
    # The reference keeps one path of none, and then raises.
    for case in vectors("determine_K_M_empty")["cases"]:
        for row in case["scores"]:
            assert paths_to_keep(row, samples_per_path=8, maximum=8) == 0
            assert samples_per_path(row, num_paths=8, maximum=8) == 0


@given(st.integers(1, 99), st.sampled_from(["0.5", "0.9", "0.99", "0.999"]))
def test_required_samples_equal_a_count(percent: int, target: str) -> None:
    """In hundredths, so that powers that reach the target exactly do so in fractions and must in floats."""
    samples, wrong = 1, 1 - Fraction(percent, 100)
    while wrong > 1 - Fraction(target):
        samples, wrong = samples + 1, wrong * (1 - Fraction(percent, 100))
    assert required_samples(percent / 100, target=float(target)) == samples


@given(
    st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0]), max_size=10),
    st.integers(1, 64),
    st.integers(1, 12),
)
def test_paths_equal_a_loop(scores: list[float], samples: int, maximum: int) -> None:
    found = paths_to_keep(scores, samples_per_path=samples, maximum=maximum)
    rest = sorted(scores, reverse=True)[:maximum]
    enough = [kept for kept, score in enumerate(rest, start=1) if kept * samples >= required_samples(score)]
    assert found == min(enough, default=len(rest))
    assert found == paths_to_keep(scores[::-1], samples_per_path=samples, maximum=maximum)
    assert found <= min(len(scores), maximum)


def test_limits() -> None:
    p = np.array([0.0, 0.3, 1.0])
    assert_allclose(fitted_maps.beta_pass_at_k(p, 16, concentration=np.inf), simulated_pass_at_k(p, 16), atol=1e-12)
    assert_allclose(fitted_maps.beta_pass_at_k(p, 16, concentration=1e-9), p, atol=1e-6)
    assert fitted_maps.beta_pass_at_k(p, 0, concentration=2.0).tolist() == [0.0, 0.0, 0.0]
    plain = fitted_maps.beta_pass_at_k(p, 4, concentration=2.0)
    assert fitted_maps.InflatedBeta(0.0, 2.0).pass_at_k(p, 4).tolist() == plain.tolist()
    assert fitted_maps.InflatedBeta(1.0, 2.0).pass_at_k(p, 64).tolist() == p.tolist()
    assert fitted_maps.InflatedBeta(0.5, 2.0).pass_at_k(p, 0).tolist() == [0.0, 0.0, 0.0]
