"""Leave-one-out ridge against N fits and recorded vectors, with more and with fewer features than questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge

from selfcal_lightning.capability.probe import PENALTIES, fit_ridge_leaving_one_out

Vectors = Callable[[str], dict[str, Any]]


def data(questions: int, width: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(questions, width))
    return x, x[:, 0] - 0.5 * x[:, 1] + 0.3 * rng.normal(size=questions) + 2.0


def test_ridge_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("ridge_probe_closed_form")["cases"]:
        x, y = np.array(case["X"]), np.array(case["y"])
        fit = fit_ridge_leaving_one_out(x, y, penalties=[case["weight_decay"]])
        assert_allclose(fit.weights, case["w"], atol=1e-5)  # the reference computes in float32
        assert fit.intercept == pytest.approx(case["b"], abs=1e-5)
        assert np.mean((x @ fit.weights + fit.intercept - y) ** 2) == pytest.approx(case["train_mse"], abs=1e-6)


@pytest.mark.parametrize(("questions", "width"), [(40, 7), (20, 55), (12, 12)])
def test_the_penalty_is_that_of_least_error_over_n_fits(questions: int, width: int) -> None:
    x, y = data(questions, width)
    fit = fit_ridge_leaving_one_out(x, y)
    errors = {}
    for penalty in PENALTIES:
        residuals = []
        for out in range(questions):
            rest = np.arange(questions) != out
            left = Ridge(alpha=penalty * questions).fit(x[rest], y[rest])
            residuals.append(float(left.predict(x[[out]])[0] - y[out]))
        errors[penalty] = float(np.mean(np.square(residuals)))
    assert fit.penalty == min(errors, key=errors.__getitem__)
    assert fit.error == pytest.approx(errors[fit.penalty], rel=1e-6)
    assert_allclose(fit.weights, Ridge(alpha=fit.penalty * questions).fit(x, y).coef_, atol=1e-9)


def test_a_feature_that_never_changes_does_no_harm() -> None:
    x, y = data(30, 4)
    with_constant = np.column_stack([x, np.full(30, 7.0)])
    plain, fit = fit_ridge_leaving_one_out(x, y), fit_ridge_leaving_one_out(with_constant, y)
    assert_allclose(fit.weights, [*plain.weights, 0.0], atol=1e-9)


def test_features_of_noise_end_at_the_mean() -> None:
    rng = np.random.default_rng(1)
    fit = fit_ridge_leaving_one_out(rng.normal(size=(50, 200)), rng.normal(size=50))
    assert np.abs(fit.weights).max() < 0.01
