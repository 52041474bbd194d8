"""Ridge and class probes against recorded vectors, scikit-learn and hand-made cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge

from selfcal_lightning.capability.probe_heads import class_confidence, class_loss, fit_ridge, nearest_class

Vectors = Callable[[str], dict[str, Any]]


def _reference_sklearn_ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, float]:
    model = Ridge(alpha=penalty * len(x)).fit(x, y)
    return model.coef_, float(model.intercept_)


def test_ridge_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("ridge_probe_closed_form")["cases"]:
        weights, intercept = fit_ridge(case["X"], case["y"], penalty=case["weight_decay"])
        assert_allclose(weights, case["w"], atol=1e-5)  # the reference computes in float32
        assert intercept == pytest.approx(case["b"], abs=1e-5)
        error = np.mean((np.array(case["X"]) @ weights + intercept - case["y"]) ** 2)
        assert error == pytest.approx(case["train_mse"], abs=1e-6)


@pytest.mark.parametrize("penalty", [1e-3, 1.0])
@pytest.mark.parametrize("size", [5, 40])
def test_ridge_equals_sklearn_also_with_more_columns_than_rows(size: int, penalty: float) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(size, 12)), generator.random(size)
    wanted, constant = _reference_sklearn_ridge(x, y, penalty)
    weights, intercept = fit_ridge(torch.tensor(x), torch.tensor(y), penalty=penalty)
    assert_allclose(weights, wanted, atol=1e-9)
    assert intercept == pytest.approx(constant, abs=1e-9)


def test_no_penalty_on_singular_features_still_fits() -> None:
    x = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    weights, intercept = fit_ridge(x, [1.0, 2.0, 3.0], penalty=0.0)
    assert_allclose(x @ weights + intercept, [1.0, 2.0, 3.0], atol=1e-9)


def test_class_probe_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("linear_classifier_probe")["cases"]:
        weight, bias, x = (torch.tensor(case[name]) for name in ("W", "b", "X"))
        assert class_confidence(x @ weight.T + bias).tolist() == pytest.approx(case["confidence"], abs=1e-6)


def test_nearest_class_equals_the_vectors(vectors: Vectors) -> None:
    """The reference cuts targets down to the edge of a bin; the recommended column takes the nearest one."""
    differing = 0
    for case in vectors("quantile_bin_encode_decode")["cases"]:
        found = nearest_class(torch.tensor(case["accuracy"]).double(), case["n_bins"]).tolist()
        assert found == case["nearest_bin_id_recommended"]
        differing += sum(ours != theirs for ours, theirs in zip(found, case["bin_id"], strict=True))
    assert differing > 0


def test_class_loss_by_hand() -> None:
    # Three classes for 0, 1/2, 1. Target .6 is nearest to the middle: -log softmax of the middle logit.
    logits = torch.tensor([[0.0, math.log(2.0), 0.0]])
    assert class_loss(logits, torch.tensor([0.6])).item() == pytest.approx(math.log(2.0))
    assert class_loss(logits, torch.tensor([0.0])).item() == pytest.approx(math.log(4.0))
    assert class_confidence(logits).item() == pytest.approx(0.5)
    assert class_confidence(torch.tensor([0.0, 0.0, 90.0])).item() == pytest.approx(1.0)


def test_training_on_the_class_loss_recovers_the_share() -> None:
    logits = torch.zeros(1, 11, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(200):
        optimizer.zero_grad()
        class_loss(logits, torch.tensor([0.7])).sum().backward()
        optimizer.step()
    assert class_confidence(logits).item() == pytest.approx(0.7, abs=0.01)
