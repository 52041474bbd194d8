"""Self-certainty and entropy against the recorded values, closed forms and a naive float64 computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from selfcal_lightning.confidence import certainty
from selfcal_lightning.confidence.certainty import self_certainty, token_certainty, token_entropy, token_statistics

Vectors = Callable[[str], dict[str, Any]]


def _reference_scipy_entropy(logits: Tensor) -> list[float]:
    return [float(stats.entropy(p)) for p in logits.double().softmax(-1).numpy()]


def _reference_scipy_certainty(logits: Tensor) -> list[float]:
    uniform = np.full(logits.shape[-1], 1.0 / logits.shape[-1])
    return [float(stats.entropy(uniform, p)) for p in logits.double().softmax(-1).numpy()]


def test_self_certainty_equals_the_vectors(vectors: Vectors) -> None:
    cases = vectors("self_certainty")["cases"]
    for case in cases:
        logits = torch.tensor(case["logits"])
        found = self_certainty(logits[None], mask=[case["mask"]]) if "mask" in case else self_certainty(logits)
        torch.testing.assert_close(found, torch.tensor(case["self_certainty"]), atol=1e-6, rtol=1e-6)
    assert any("mask" in case for case in cases)


def test_token_values_equal_the_vectors(vectors: Vectors) -> None:
    """The reference shifts by one and fills the first token with 0."""
    for case in vectors("cot_token_metrics")["cases"]:
        logits, ids, out = torch.tensor(case["logits"]), torch.tensor(case["input_ids"]), case["out"]
        for row in range(len(ids)):
            found = token_statistics(logits[row, :-1], ids[row, 1:])
            assert found.logprob.tolist() == pytest.approx(out["logprobs"][row][1:], abs=1e-6)
            assert found.entropy.tolist() == pytest.approx(out["entropy"][row][1:], abs=1e-6)
            assert found.certainty.tolist() == pytest.approx(out["certainty"][row][1:], abs=1e-6)


def test_mean_entropy_equals_the_vectors_in_bits(vectors: Vectors) -> None:
    for case in vectors("coe_output_baselines")["cases"]:
        bits = token_entropy(torch.tensor(case["logits"])).mean() / math.log(2.0)
        assert bits.item() == pytest.approx(case["entropy_bits"], abs=1e-6)


def test_closed_forms() -> None:
    # p = (1/2, 1/4, 1/4): H = 1.5 log 2, KL(U || p) = -log 3 - (log 1/2 + 2 log 1/4) / 3 = 5/3 log 2 - log 3.
    logits = torch.tensor([[2.0, 1.0, 1.0]]).mul(math.log(2.0)) + 7.0
    assert token_entropy(logits).item() == pytest.approx(1.5 * math.log(2.0), abs=1e-6)
    assert token_certainty(logits).item() == pytest.approx(5.0 / 3.0 * math.log(2.0) - math.log(3.0), abs=1e-6)
    assert self_certainty([[0.0, 0.0]]).item() == 0.0
    assert torch.isnan(self_certainty(torch.zeros(1, 2, 3), mask=torch.zeros(1, 2))).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_float32_over_a_real_vocabulary(scale: float, offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, 151_936, generator=generator) * scale + offset).double()
    rounded = logits.float()
    tolerance = {"rel": 3e-5, "abs": 3e-6}
    assert token_entropy(rounded).tolist() == pytest.approx(_reference_scipy_entropy(rounded), **tolerance)
    assert token_certainty(rounded).tolist() == pytest.approx(_reference_scipy_certainty(rounded), **tolerance)


def test_half_precision_is_widened_first() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    for function in (token_entropy, token_certainty, self_certainty):
        assert function(logits).dtype == torch.float32
        torch.testing.assert_close(function(logits), function(logits.float()))
    assert token_entropy(logits.double()).dtype == torch.float64


def test_pieces_do_not_change_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(2)).double()
    ids = torch.arange(7)[None].expand(2, 7)[:, :5].flatten()
    whole = token_entropy(logits), token_certainty(logits), token_statistics(logits.flatten(0, 1), ids)
    monkeypatch.setattr(certainty, "_CHUNK_ELEMENTS", 21)  # three rows at once
    torch.testing.assert_close(token_entropy(logits), whole[0])
    torch.testing.assert_close(token_certainty(logits), whole[1])
    torch.testing.assert_close(token_statistics(logits.flatten(0, 1), ids), whole[2])
    assert whole[0].shape == (2, 5)
    assert self_certainty(logits).tolist() == pytest.approx(whole[1].mean(-1).tolist())
    expected = logits.log_softmax(-1).flatten(0, 1).gather(1, ids[:, None]).squeeze(1)
    torch.testing.assert_close(whole[2].logprob, expected)
    assert [column.tolist() for column in token_statistics(torch.zeros(0, 7), ids[:0])] == [[], [], []]


def test_masked_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert token_entropy(logits).item() == pytest.approx(math.log(2.0), abs=1e-6)
    assert token_certainty(logits).item() == math.inf
    mask = torch.tensor([0, 1])
    found = self_certainty(torch.cat([logits, torch.zeros(1, 3)]), mask=mask)
    assert found.item() == 0.0, "a token that does not count may be infinite"
