import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.linear_model import Ridge
from support.house import Vectors
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from selfcal_lightning.capability.probe import PENALTIES, fit_ridge_leaving_one_out
from selfcal_lightning.capability.probe_heads import head_outputs, linked, nearest_class, probe_loss
from selfcal_lightning.models import outputs as output_layer
from selfcal_lightning.models.outputs import float32_logits, log_normaliser, negative_log_likelihood
from selfcal_lightning.training.losses import ranknet_loss


def test_ridge_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("ridge_probe_closed_form")["cases"]:
        x, y = np.array(case["X"]), np.array(case["y"])
        fit = fit_ridge_leaving_one_out(x, y, penalties=[case["weight_decay"]])
        assert_allclose(fit.weights, case["w"], atol=1e-5)  # the reference computes in float32
        assert fit.intercept == pytest.approx(case["b"], abs=1e-5)
        assert np.mean((x @ fit.weights + fit.intercept - y) ** 2) == pytest.approx(case["train_mse"], abs=1e-6)


def test_nearest_class_equals_the_vectors(vectors: Vectors) -> None:
    """The reference cuts targets down to the edge of a bin; the recommended column takes the nearest one."""
    differing = 0
    for case in vectors("quantile_bin_encode_decode")["cases"]:
        found = nearest_class(torch.tensor(case["accuracy"]).double(), case["n_bins"]).tolist()
        assert found == case["nearest_bin_id_recommended"]
        differing += sum(ours != theirs for ours, theirs in zip(found, case["bin_id"], strict=True))
    assert differing > 0


def test_outputs_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layers, x = [nn.Linear(5, 7), nn.Linear(7, 4), nn.Linear(4, 3)], torch.randn(6, 5)
    found = head_outputs(x, [one.weight for one in layers], [one.bias for one in layers])
    torch.testing.assert_close(found, nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])(x))


def test_classes_are_linked_as_the_vectors_do(vectors: Vectors) -> None:
    for case in vectors("linear_classifier_probe")["cases"]:
        weight, bias, x = (torch.tensor(case[name]) for name in ("W", "b", "X"))
        shares = linked(head_outputs(x, [weight], [bias]), "classes")
        assert shares.tolist() == pytest.approx(case["confidence"], abs=1e-6)


def test_losses_by_hand() -> None:
    outputs, target = torch.tensor([[0.0], [math.log(3.0)]]), torch.tensor([1.0, 0.5])
    # Shares 1/2 and 3/4: -log(1/2), and -(log(3/4) + log(1/4)) / 2.
    by_hand = (math.log(2.0) - 0.5 * math.log(3.0 / 16.0)) / 2.0
    assert probe_loss(outputs, target, "bce").item() == pytest.approx(by_hand)
    assert probe_loss(outputs, target, "mse").item() == pytest.approx((0.25 + 0.0625) / 2)
    assert probe_loss(outputs, target, "ranknet") == ranknet_loss(outputs[:, 0], target)


@pytest.mark.parametrize(("questions", "width"), [(40, 7), (20, 55), (12, 12)])
def test_the_penalty_is_that_of_least_error_over_n_fits(questions: int, width: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(questions, width))
    y = x[:, 0] - 0.5 * x[:, 1] + 0.3 * rng.normal(size=questions) + 2.0
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


def _layer(rows: int, *, hidden: int = 16, vocabulary: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, hidden), (vocabulary, hidden), (vocabulary,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [1, 7 * 16, 10**6])
def test_tiled_logits_are_those_of_the_layer(with_bias: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_TILE_ELEMENTS", tile)
    hidden, weight, bias = _layer(5, dtype=torch.float64)
    expected = F.linear(hidden, weight, bias if with_bias else None)
    found = float32_logits(hidden, weight, bias if with_bias else None)
    torch.testing.assert_close(found, expected)
    ids = torch.tensor([3, 39, 3])
    columns = float32_logits(hidden, weight, bias if with_bias else None, token_ids=ids)
    torch.testing.assert_close(columns, expected[:, ids])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_columns_are_exact_whatever_the_model_computes_in(dtype: torch.dtype, autocast: bool) -> None:
    """Logits of 20 to 28, as large models have them: in bfloat16, P(Yes) takes some fifty values among thousands."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4000, 64, generator=generator)
    weight = torch.randn(2, 64, generator=generator) * 0.1
    hidden[:, 0], weight[:, 0] = 24.0, 1.0
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    exact = torch.sigmoid(torch.diff(hidden.double() @ weight.double().T, dim=1)[:, 0])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        columns = float32_logits(hidden, weight, token_ids=torch.tensor([0, 1]))
        coarse = torch.sigmoid(torch.diff(F.linear(hidden, weight).float(), dim=1)[:, 0])
    assert columns.dtype == torch.float32
    found = torch.sigmoid(torch.diff(columns, dim=1)[:, 0])
    assert (found - exact).abs().max() < 1e-5
    if autocast or dtype == torch.bfloat16:
        assert (coarse - exact).abs().max() > 5e-3
        assert len(coarse.unique()) < 100 < 3000 < len(found.unique())


@pytest.mark.parametrize("with_bias", [False, True])
def test_the_normaliser_and_its_gradient(with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_layer, "_TILE_ELEMENTS", 7 * 16)
    hidden, weight, bias = _layer(5, dtype=torch.float64)
    bias = bias if with_bias else None
    torch.testing.assert_close(log_normaliser(hidden, weight, bias), F.linear(hidden, weight, bias).logsumexp(-1))
    assert torch.autograd.gradcheck(lambda h: log_normaliser(h, weight, bias), hidden.requires_grad_())


def losses_and_gradient(losses_of: Callable[[Tensor], Tensor], hidden: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    leaf = hidden.clone().requires_grad_()
    losses = losses_of(leaf)
    (losses * scale).sum().backward()
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_token_losses_are_a_cross_entropy_with_its_gradient(with_bias: bool, rows: int) -> None:
    hidden, weight, bias = _layer(8, dtype=torch.float64)
    bias, ids = bias if with_bias else None, torch.tensor([0, 39, 7, 7, 1, 2, 3, 0])
    plain = lambda h: F.cross_entropy(F.linear(h, weight, bias), ids, reduction="none")  # noqa: E731
    ours = lambda h: negative_log_likelihood(h, weight, ids, bias, rows=rows)  # noqa: E731
    scale = torch.linspace(0.0, 2.0, 8, dtype=torch.float64)
    torch.testing.assert_close(*(losses_and_gradient(losses, hidden, scale) for losses in (plain, ours)))
    assert torch.autograd.gradcheck(ours, hidden.clone().requires_grad_())


@pytest.mark.parametrize("autocast", [False, True])
def test_in_half_precision_the_losses_are_those_of_the_models_own_logits(autocast: bool) -> None:
    hidden, weight, _ = _layer(64, hidden=64, vocabulary=300, dtype=torch.float32 if autocast else torch.bfloat16)
    ids = torch.arange(64)
    plain = lambda h: F.cross_entropy(F.linear(h, weight).float(), ids, reduction="none")  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, slope = losses_and_gradient(plain, hidden, torch.ones(64))
        found, gradient = losses_and_gradient(lambda h: negative_log_likelihood(h, weight, ids), hidden, torch.ones(64))
    assert found.dtype == torch.float32
    torch.testing.assert_close(expected, found)
    assert (slope.float() - gradient.float()).norm() < 0.01 * slope.float().norm()
