"""Leave-one-out ridge against N fits and against scikit-learn, with more and with fewer features than questions."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV

from selfcal_lightning.capability.probe_heads import fit_ridge
from selfcal_lightning.capability.ridge import PENALTIES, fit_ridge_leaving_one_out


def data(questions: int, width: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(questions, width))
    return x, x[:, 0] - 0.5 * x[:, 1] + 0.3 * rng.normal(size=questions) + 2.0


@pytest.mark.parametrize(("questions", "width"), [(40, 7), (20, 55), (12, 12)])
def test_left_out_predictions_are_those_of_n_fits(questions: int, width: int) -> None:
    x, y = data(questions, width)
    penalty = 0.3
    fit = fit_ridge_leaving_one_out(x, y, penalties=[penalty])
    for out in range(questions):
        rest = np.arange(questions) != out
        # The penalty counts a question; one is missing.
        weights, intercept = fit_ridge(x[rest], y[rest], penalty=penalty * questions / (questions - 1))
        assert fit.left_out[out] == pytest.approx(x[out] @ weights + intercept, abs=1e-9)
    weights, intercept = fit_ridge(x, y, penalty=penalty)
    np.testing.assert_allclose(fit.weights, weights, atol=1e-9)
    assert fit.intercept == pytest.approx(intercept)


@pytest.mark.parametrize(("questions", "width"), [(60, 9), (25, 80)])
def test_the_choice_is_that_of_scikit_learn(questions: int, width: int) -> None:
    x, y = data(questions, width, seed=3)
    fit = fit_ridge_leaving_one_out(x, y)
    theirs = RidgeCV(alphas=[penalty * questions for penalty in PENALTIES]).fit(x, y)
    assert theirs.alpha_ == pytest.approx(fit.penalty * questions)
    np.testing.assert_allclose(theirs.coef_, fit.weights, atol=1e-8)
    assert fit.error == pytest.approx(-theirs.best_score_, rel=1e-6)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    x, y = data(30, 4)
    with_constant = np.column_stack([x, np.full(30, 7.0)])
    plain, fit = fit_ridge_leaving_one_out(x, y), fit_ridge_leaving_one_out(with_constant, y)
    np.testing.assert_allclose(fit.weights, [*plain.weights, 0.0], atol=1e-9)


def test_features_of_noise_end_at_the_mean() -> None:
    rng = np.random.default_rng(1)
    fit = fit_ridge_leaving_one_out(rng.normal(size=(50, 200)), rng.normal(size=50))
    assert np.abs(fit.weights).max() < 0.01
