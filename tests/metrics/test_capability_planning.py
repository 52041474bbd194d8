from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import special, stats
from support.house import Vectors

from selfcal_lightning.capability import allocation, fitted_maps
from selfcal_lightning.confidence.scaling import IsotonicMap
from selfcal_lightning.metrics.capability import pass_at_k, simulated_pass_at_k
from selfcal_lightning.rewards.search import paths_to_keep, required_samples, samples_per_path


def _reference_scipy_pass_at_k(p: float, k: int, concentration: float) -> float:
    a, b = concentration * p, concentration * (1.0 - p)
    return 1.0 - np.exp(special.betaln(a, b + k) - special.betaln(a, b))


def _reference_scipy_log_likelihood(p: np.ndarray, c: np.ndarray, n: int, fitted: fitted_maps.InflatedBeta) -> float:
    """Return the log-likelihood of counts under a mixture of atoms and scipy's beta-binomial."""
    body = stats.betabinom(n, fitted.concentration * p, fitted.concentration * (1.0 - p)).pmf(c)
    atoms = np.where(c == 0, 1.0 - p, 0.0) + np.where(c == n, p, 0.0)
    return float(np.log(fitted.inflation * atoms + (1.0 - fitted.inflation) * body).sum())


def _drawn(inflation: float, concentration: float, size: int = 3000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return predictions, true capabilities and right ones among 32 samples of ``size`` questions."""
    generator = np.random.default_rng(0)
    p = generator.uniform(0.05, 0.95, size)
    theta = generator.beta(concentration * p, concentration * (1.0 - p))
    is_atom, atom = generator.random(size) < inflation, generator.random(size) < p
    theta = np.where(is_atom, atom, theta)
    return p, theta, generator.binomial(32, theta)


@settings(deadline=None)
@given(st.floats(0.001, 0.999), st.integers(0, 128), st.floats(0.01, 1e4))
def test_beta_pass_at_k_equals_the_ratio_of_beta_functions(p: float, k: int, concentration: float) -> None:
    found = fitted_maps.beta_pass_at_k(p, k, concentration=concentration)
    assert found == pytest.approx(_reference_scipy_pass_at_k(p, k, concentration), abs=1e-9)
    # By Jensen's inequality a point is too high, and the mean of the distribution is the prediction itself.
    assert found <= simulated_pass_at_k(p, k) + 1e-12
    assert fitted_maps.beta_pass_at_k(p, 1, concentration=concentration) == pytest.approx(p, abs=1e-12)


def test_the_fit_is_the_likeliest_nearby() -> None:
    p, _, correct = _drawn(0.3, 4.0, size=400)
    fitted = fitted_maps.fit_inflated_beta(p, correct, 32)
    best = _reference_scipy_log_likelihood(p, correct, 32, fitted)
    for step_w, step_s in ((0.01, 1.0), (-0.01, 1.0), (0.0, 1.03), (0.0, 0.97)):
        other = fitted_maps.InflatedBeta(fitted.inflation + step_w, fitted.concentration * step_s)
        assert _reference_scipy_log_likelihood(p, correct, 32, other) < best
    alone = fitted_maps.fit_concentration(p, correct, 32)
    best = _reference_scipy_log_likelihood(p, correct, 32, fitted_maps.InflatedBeta(0.0, alone))
    for factor in (0.97, 1.03):
        assert _reference_scipy_log_likelihood(p, correct, 32, fitted_maps.InflatedBeta(0.0, alone * factor)) < best


QUESTIONS = st.lists(st.tuples(st.integers(0, 10).map(lambda n: n / 10), st.integers(0, 8)), min_size=1, max_size=12)


def _reference_minimax_isotonic(targets: list[float]) -> list[float]:
    """Return the isotonic fit by its minimax formula: ``max_{s <= i} min_{e >= i} mean(targets[s..e])``."""
    size = len(targets)
    means = {(s, e): sum(targets[s : e + 1]) / (e + 1 - s) for s in range(size) for e in range(s, size)}
    return [max(min(means[s, e] for e in range(i, size)) for s in range(i + 1)) for i in range(size)]


def _reference_listed_quantile(distribution: list[float], level: float) -> float:
    ordered, at = sorted(distribution), level * (len(distribution) - 1)
    below = min(int(at), len(ordered) - 2) if len(ordered) > 1 else 0
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def test_quantile_mapping_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("quantile_mapping_posthoc")["cases"]:
        found = fitted_maps.quantile_mapping(case["confidence"], case["target_distribution"], ties="first")
        assert_allclose(found, case["out"], atol=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9))
def test_isotonic_equals_its_minimax_formula(targets: list[float]) -> None:
    scores = np.arange(len(targets)) / 7.0
    found = IsotonicMap.fit(scores, np.array(targets)).transform(scores)
    assert_allclose(found, _reference_minimax_isotonic(targets), atol=1e-9)


@settings(deadline=None)
@given(QUESTIONS, st.lists(st.floats(-1.0, 2.0), min_size=1, max_size=6))
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


@settings(deadline=None)
@given(
    st.lists(st.integers(-5, 5), min_size=2, max_size=8, unique=True),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
)
def test_quantile_mapping_equals_order_statistics(scores: list[int], distribution: list[float]) -> None:
    found = fitted_maps.quantile_mapping(scores, distribution)
    order = sorted(scores)
    wanted = [_reference_listed_quantile(distribution, order.index(score) / (len(scores) - 1)) for score in scores]
    assert_allclose(found, wanted, atol=1e-9)
    assert_allclose(fitted_maps.quantile_mapping(scores, distribution, ties="first"), wanted, atol=1e-9)


CHANCES = st.lists(st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.5, 0.9, 1.0]), min_size=1, max_size=6)


def _reference_loop_allocation(p: list[float], total: int, minimum: int, maximum: int) -> list[int]:
    clipped = [min(max(chance, 1e-6), 1.0 - 1e-6) for chance in p]
    given = [minimum] * len(p)
    for _ in range(total - sum(given)):
        gains = [q * (1.0 - q) ** k if k < maximum else -1.0 for q, k in zip(clipped, given, strict=True)]
        if max(gains) < 0.0:
            break
        given[gains.index(max(gains))] += 1
    return given


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


def test_what_a_budget_solves_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("recommended_closed_forms")["cases"]:
        if "budget" in case:
            samples, correct = np.array(case["counts_n_c"]).T
            found = pass_at_k(samples, correct, case["budget"])
            assert_allclose(found, case["per_question"], atol=1e-9)


@settings(deadline=None)
@given(CHANCES, st.integers(0, 30), st.integers(0, 2), st.integers(2, 8))
def test_the_heap_equals_a_loop(p: list[float], total: int, minimum: int, maximum: int) -> None:
    total += minimum * len(p)
    found = allocation.greedy_allocation(p, total, minimum=minimum, maximum=maximum)
    assert found.tolist() == _reference_loop_allocation(p, total, minimum, maximum)
    assert found.sum() == min(total, maximum * len(p))


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


@settings(deadline=None)
@given(st.lists(st.lists(st.booleans(), max_size=5), max_size=5), st.integers(0, 20))
def test_sequential_equals_a_loop(rows: list[list[bool]], total: int) -> None:
    drawn, solved = allocation.sequential_allocation(rows, total)
    assert (drawn.tolist(), solved.tolist()) == _reference_drawn_solved(rows, total)


SCORES = st.lists(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.9, 1.0]), max_size=10)


def _reference_counted_samples(p: Fraction, target: Fraction) -> int:
    """Add samples until the chance that all are wrong is small enough, in exact fractions."""
    samples, wrong = 1, 1 - p
    while wrong > 1 - target:
        samples, wrong = samples + 1, wrong * (1 - p)
    return samples


def _reference_loop_paths(scores: list[float], samples: int, maximum: int) -> int:
    kept = 0
    for score in sorted(scores, reverse=True)[:maximum]:
        kept += 1
        if kept * samples >= required_samples(score):
            break
    return kept


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


@settings(deadline=None)
@given(st.integers(1, 99), st.sampled_from(["0.5", "0.9", "0.99", "0.999"]))
def test_required_samples_equal_a_count(percent: int, target: str) -> None:
    """In hundredths, so that powers that reach the target exactly do so in fractions and must in floats."""
    wanted = _reference_counted_samples(Fraction(percent, 100), Fraction(target))
    assert required_samples(percent / 100, target=float(target)) == wanted


@settings(deadline=None)
@given(SCORES, st.integers(1, 64), st.integers(1, 12))
def test_paths_equal_a_loop(scores: list[float], samples: int, maximum: int) -> None:
    found = paths_to_keep(scores, samples_per_path=samples, maximum=maximum)
    assert found == _reference_loop_paths(scores, samples, maximum)
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
