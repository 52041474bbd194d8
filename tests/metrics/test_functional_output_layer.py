"""What is asked of an output layer, against plain logits: float32 columns, normalisers, token losses with gradients."""

from __future__ import annotations

import pytest
import torch
from support.dispatch_modes import PeakBytes
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from selfcal_lightning.models import outputs as output_layer
from selfcal_lightning.models.outputs import float32_logits, log_normaliser, negative_log_likelihood


def _layer(rows: int, *, hidden: int = 16, vocabulary: int = 40, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, hidden), (vocabulary, hidden), (vocabulary,))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _reference_torch_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias), ids, reduction="none")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tile", [1, 7 * 16, 10**6])
def test_logits_are_those_of_the_layer_however_they_are_cut(
    with_bias: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_token_losses_are_a_cross_entropy_with_its_gradient(with_bias: bool, rows: int) -> None:
    hidden, weight, bias = _layer(8, dtype=torch.float64)
    bias, ids = bias if with_bias else None, torch.tensor([0, 39, 7, 7, 1, 2, 3, 0])
    scale = torch.linspace(0.0, 2.0, 8, dtype=torch.float64)
    gradients = []
    for losses_of in (
        lambda h: _reference_torch_cross_entropy(h, weight, bias, ids),
        lambda h: negative_log_likelihood(h, weight, ids, bias, rows=rows),
    ):
        leaf = hidden.clone().requires_grad_()
        losses = losses_of(leaf)
        (losses * scale).sum().backward()
        gradients.append((losses.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
    check = hidden.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda h: negative_log_likelihood(h, weight, ids, bias, rows=rows), check)


def test_no_tokens_are_no_loss() -> None:
    hidden, weight, _ = _layer(0)
    losses = negative_log_likelihood(hidden.requires_grad_(), weight, torch.zeros(0, dtype=torch.long))
    losses.sum().backward()
    assert hidden.grad.shape == (0, 16)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_half_precision_the_losses_are_those_of_the_models_own_logits(autocast: bool) -> None:
    hidden, weight, _ = _layer(64, hidden=64, vocabulary=300, dtype=torch.float32 if autocast else torch.bfloat16)
    ids = torch.arange(64)
    gradients, losses = [], []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for losses_of in (
            lambda h: F.cross_entropy(F.linear(h, weight).float(), ids, reduction="none"),
            lambda h: negative_log_likelihood(h, weight, ids),
        ):
            leaf = hidden.clone().requires_grad_()
            found = losses_of(leaf)
            found.sum().backward()
            losses.append(found.detach())
            gradients.append(leaf.grad.float())
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[0], losses[1])
    assert (gradients[0] - gradients[1]).norm() < 0.01 * gradients[0].norm()


def test_the_logits_of_all_positions_never_live_at_once() -> None:
    """In bytes for each position and entry of the vocabulary; the plain way takes about 12."""
    rows, vocabulary = 512, 20_000
    hidden, weight, _ = _layer(rows, hidden=32, vocabulary=vocabulary, dtype=torch.bfloat16)
    ids = torch.arange(rows)
    peaks = {}
    for name, losses_of in {
        "plain": lambda h: F.cross_entropy(F.linear(h, weight).float(), ids, reduction="none"),
        "chunked": lambda h: negative_log_likelihood(h, weight, ids, rows=32),
    }.items():
        with PeakBytes() as watch:
            losses_of(hidden.clone().requires_grad_()).sum().backward()
        peaks[name] = watch.peak / rows / vocabulary
    assert peaks["plain"] > 10.0
    assert peaks["chunked"] < 1.5
