"""Beta distributed capability: integrals, limits, fits that find what drew the counts, and the bias of a point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import integrate, special, stats

from selfcal_lightning.capability.distributions import (
    InflatedBeta,
    beta_pass_at_k,
    fit_concentration,
    fit_inflated_beta,
)
from selfcal_lightning.metrics.capability import pass_at_k, simulated_pass_at_k


def _reference_integrated_pass_at_k(p: float, k: int, concentration: float) -> float:
    density = stats.beta(concentration * p, concentration * (1.0 - p)).pdf
    return integrate.quad(lambda x: (1.0 - (1.0 - x) ** k) * density(x), 0.0, 1.0, limit=200)[0]


def _reference_scipy_pass_at_k(p: float, k: int, concentration: float) -> float:
    a, b = concentration * p, concentration * (1.0 - p)
    return 1.0 - np.exp(special.betaln(a, b + k) - special.betaln(a, b))


def _reference_scipy_log_likelihood(p: np.ndarray, c: np.ndarray, n: int, fitted: InflatedBeta) -> float:
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


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("concentration", [2.0, 5.0, 40.0])
@pytest.mark.parametrize("k", [1, 3, 20])
def test_beta_pass_at_k_equals_the_integral(p: float, concentration: float, k: int) -> None:
    wanted = _reference_integrated_pass_at_k(p, k, concentration)
    assert beta_pass_at_k(p, k, concentration=concentration) == pytest.approx(wanted, abs=1e-6)


@settings(deadline=None)
@given(st.floats(0.001, 0.999), st.integers(0, 128), st.floats(0.01, 1e4))
def test_beta_pass_at_k_equals_the_ratio_of_beta_functions(p: float, k: int, concentration: float) -> None:
    found = beta_pass_at_k(p, k, concentration=concentration)
    assert found == pytest.approx(_reference_scipy_pass_at_k(p, k, concentration), abs=1e-9)
    # By Jensen's inequality a point is too high, and the mean of the distribution is the prediction itself.
    assert found <= simulated_pass_at_k(p, k) + 1e-12
    assert beta_pass_at_k(p, 1, concentration=concentration) == pytest.approx(p, abs=1e-12)


def test_limits() -> None:
    p = np.array([0.0, 0.3, 1.0])
    assert_allclose(beta_pass_at_k(p, 16, concentration=np.inf), simulated_pass_at_k(p, 16), atol=1e-12)
    assert_allclose(beta_pass_at_k(p, 16, concentration=1e-9), p, atol=1e-6)
    assert beta_pass_at_k(p, 0, concentration=2.0).tolist() == [0.0, 0.0, 0.0]
    assert InflatedBeta(0.0, 2.0).pass_at_k(p, 4).tolist() == beta_pass_at_k(p, 4, concentration=2.0).tolist()
    assert InflatedBeta(1.0, 2.0).pass_at_k(p, 64).tolist() == p.tolist()
    assert InflatedBeta(0.5, 2.0).pass_at_k(p, 0).tolist() == [0.0, 0.0, 0.0]


def test_posterior_predicts_further_samples() -> None:
    """After 2 right of 3 under Beta(1, 1), the chance of a right one among 2 more is 1 - B(3, 4) / B(3, 2)."""
    mean, strength = (1.0 + 2.0) / (2.0 + 3.0), 2.0 + 3.0
    wanted = 1.0 - special.beta(3.0, 4.0) / special.beta(3.0, 2.0)
    assert beta_pass_at_k(mean, 2, concentration=strength) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("concentration", [0.5, 2.0, 10.0])
def test_the_concentration_that_drew_the_counts_is_found(concentration: float) -> None:
    p, _, correct = _drawn(0.0, concentration)
    assert fit_concentration(p, correct, 32) == pytest.approx(concentration, rel=0.1)


def test_the_inflation_that_drew_the_counts_is_found() -> None:
    p, _, correct = _drawn(0.3, 4.0)
    fitted = fit_inflated_beta(p, correct, 32)
    assert fitted.inflation == pytest.approx(0.3, abs=0.04)
    assert fitted.concentration == pytest.approx(4.0, rel=0.15)
    plain, _, counts = _drawn(0.0, 4.0)
    assert fit_inflated_beta(plain, counts, 32).inflation < 0.02


def test_the_fit_is_the_likeliest_nearby() -> None:
    p, _, correct = _drawn(0.3, 4.0, size=400)
    fitted = fit_inflated_beta(p, correct, 32)
    best = _reference_scipy_log_likelihood(p, correct, 32, fitted)
    for step_w, step_s in ((0.01, 1.0), (-0.01, 1.0), (0.0, 1.03), (0.0, 0.97)):
        other = InflatedBeta(fitted.inflation + step_w, fitted.concentration * step_s)
        assert _reference_scipy_log_likelihood(p, correct, 32, other) < best
    alone = fit_concentration(p, correct, 32)
    best = _reference_scipy_log_likelihood(p, correct, 32, InflatedBeta(0.0, alone))
    for factor in (0.97, 1.03):
        assert _reference_scipy_log_likelihood(p, correct, 32, InflatedBeta(0.0, alone * factor)) < best


def test_a_distribution_mends_the_curve_of_a_point() -> None:
    p, theta, correct = _drawn(0.2, 1.5)
    fitted = fit_inflated_beta(p[:1500], correct[:1500], 32)
    for k in (4, 16, 64):
        truth = simulated_pass_at_k(theta[1500:], k).mean()
        assert fitted.pass_at_k(p[1500:], k).mean() == pytest.approx(truth, abs=0.02)
        assert simulated_pass_at_k(p[1500:], k).mean() > truth + 0.08
    assert pass_at_k(32, correct, 16).mean() == pytest.approx(simulated_pass_at_k(theta, 16).mean(), abs=0.01)


def test_predictions_of_zero_and_one_can_be_fitted() -> None:
    assert np.isfinite(fit_concentration([0.0, 1.0, 0.5], [1, 1, 1], 2))
    assert np.isfinite(fit_inflated_beta([0.0, 1.0, 0.5], [1, 1, 1], 2).concentration)
