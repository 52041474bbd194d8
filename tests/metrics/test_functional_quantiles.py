"""Quantiles that cannot cross, their coverage, and heads that start exactly where public reward models stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

from selfcal_lightning.rewards.quantiles import (
    brier_excess,
    coverage,
    monotone_quantiles,
    quantile_head_from,
)
from selfcal_lightning.training.losses import pinball_loss, soft_cross_entropy

Vectors = Callable[[str], dict[str, Any]]
RAW = st.floats(-1e30, 1e30)
RATES = st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 8)), min_size=1, max_size=20)


def _reference_scipy_scores(raw: list[float]) -> list[float]:
    centre, below, above = raw
    ends = centre, centre - np.logaddexp(0.0, below), centre + np.logaddexp(0.0, above)
    return [float(special.expit(end)) for end in ends]


def _reference_softmax_score(logits: Tensor, positive: list[int], negative: int) -> Tensor:
    """Return the share of the positive classes among positive and negative ones."""
    chosen = logits[..., [*positive, negative]].softmax(-1)
    return chosen[..., :-1].sum(-1)


@settings(deadline=None, max_examples=500)
@given(RAW, RAW, RAW)
def test_quantiles_never_cross(centre: float, below: float, above: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        mean, low, high = monotone_quantiles(torch.tensor([centre, below, above], dtype=torch.float64).to(dtype))
        assert 0.0 <= low <= mean <= high <= 1.0


def test_quantiles_of_many_ordinary_outputs_never_cross() -> None:
    raw = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([3.0, 8.0, 8.0])
    mean, low, high = monotone_quantiles(raw)
    assert (low <= mean).all()
    assert (mean <= high).all()
    torch.testing.assert_close(mean, raw[:, 0].sigmoid())


@settings(deadline=None)
@given(st.lists(st.floats(-30.0, 30.0), min_size=3, max_size=3))
def test_quantiles_equal_scipy(raw: list[float]) -> None:
    found = monotone_quantiles(torch.tensor(raw, dtype=torch.float64))
    assert [score.item() for score in found] == pytest.approx(_reference_scipy_scores(raw), abs=1e-8)


def test_training_finds_mean_and_quantiles_of_a_bernoulli_like_rate() -> None:
    """Rates 0 (60 %), 1/2 (10 %) and 1 (30 %): the mean is .35, q10 is 0 and q90 is 1; the median would say 0."""
    rates = torch.tensor([0.0] * 60 + [0.5] * 10 + [1.0] * 30)
    raw = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.1)
    for _ in range(800):
        optimizer.zero_grad()
        scores = monotone_quantiles(raw)
        ends = torch.stack([scores.low, scores.high]).expand(100, 2)
        loss = soft_cross_entropy(raw[0].expand(100), rates).mean() + pinball_loss(ends, rates, [0.1, 0.9]).mean()
        loss.backward()
        optimizer.step()
    mean, low, high = monotone_quantiles(raw)
    assert mean.item() == pytest.approx(0.35, abs=0.02)
    assert low.item() < 0.05
    assert high.item() > 0.95


def test_coverage_by_hand() -> None:
    # Lower quantile .3, tolerance .05: .25 is at the tolerance, so inside; .2 and 0 are outside.
    found = coverage([0.3] * 4, [0.25, 0.2, 0.0, 0.9], 0.1, tolerance=0.05)
    assert (found.outside, found.nominal, found.count) == (0.5, 0.1, 4)
    upper = coverage([0.3] * 4, [0.35, 0.36, 1.0, 0.0], 0.9, tolerance=0.05)
    assert upper.outside == 0.5
    assert upper.nominal == pytest.approx(0.1)
    assert coverage([], [], 0.1) is None


def test_right_quantiles_leave_the_nominal_share_outside() -> None:
    rates = np.random.default_rng(0).beta(2.0, 3.0, 20_000)
    for level in (0.1, 0.5, 0.9):
        quantile = stats.beta(2.0, 3.0).ppf(level)
        found = coverage(np.full(len(rates), quantile), rates, level)
        assert found.outside == pytest.approx(found.nominal, abs=0.01)


@settings(deadline=None)
@given(RATES, st.sampled_from([0.1, 0.9]), st.floats(0.0, 0.2))
def test_coverage_equals_a_loop(pairs: list[tuple[float, int]], level: float, tolerance: float) -> None:
    quantiles, rates = [q for q, _ in pairs], [successes / 8 for _, successes in pairs]
    beyond = [(q - r if level < 0.5 else r - q) - tolerance for q, r in zip(quantiles, rates, strict=True)]
    found = coverage(quantiles, rates, level, tolerance=tolerance)
    assert sum(b > 1e-8 for b in beyond) <= found.outside * len(pairs) + 1e-9
    assert found.outside * len(pairs) - 1e-9 <= sum(b > -1e-8 for b in beyond)


def test_brier_excess_has_the_right_expectation() -> None:
    successes = np.arange(9)
    for truth in (0.0, 0.3, 0.9):
        weights = stats.binom.pmf(successes, 8, truth)
        found = sum(w * brier_excess([0.6], [k / 8], 8) for w, k in zip(weights, successes, strict=True))
        assert found == pytest.approx((0.6 - truth) ** 2, abs=1e-12)
    assert brier_excess([0.5], torch.tensor([1.0 / 3.0]), [3]) == pytest.approx(1.0 / 36.0 - 1.0 / 9.0, abs=1e-6)
    assert brier_excess([], [], 8) is None


def test_qwen_head_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("quantile_head_init_qwen")["cases"]:
        head = quantile_head_from(
            torch.tensor(case["W"]), torch.tensor(case["b"]), positive=[1], negative=0, num_outputs=3
        )
        assert head.weight.squeeze(1).tolist() == [pytest.approx(row, abs=1e-6) for row in case["new_W"]]
        assert head.bias.squeeze(1).tolist() == pytest.approx(case["new_b"], abs=1e-6)
        found = head(torch.tensor(case["x"])).sigmoid()
        assert found.tolist() == [pytest.approx(row, abs=1e-6) for row in case["sigmoid_after"]]
        assert found[:, 0].tolist() == pytest.approx(case["softmax_pos_before"], abs=1e-6)


def test_other_heads_start_exactly_where_the_vectors_stood(vectors: Vectors) -> None:
    """The reference's own conversion keeps a random bias, and bends ReasonEval's score even without it."""
    for case in vectors("quantile_head_init_other")["cases"]:
        hidden = torch.tensor(case["x"])
        if case["model"] == "shepherd":
            (good, bad), weight = case["candidate_token_ids"], torch.tensor(case["lm_head_weight"])
            head = quantile_head_from(weight, None, positive=[good], negative=bad, num_outputs=3)
            wanted = case["before"]
            assert head(hidden).sigmoid().tolist() == [
                pytest.approx(row, abs=1e-6) for row in case["exact_if_bias_zero"]
            ]
        else:
            weight = torch.tensor(case["score_head_weight"])
            head = quantile_head_from(weight, None, positive=[1, 2], negative=0, num_outputs=3)
            wanted = case["validity_before_1-p0"]
        found = head(hidden).sigmoid()
        for column in range(3):
            assert found[:, column].tolist() == pytest.approx(wanted, abs=1e-6)
        assert (found - torch.tensor(case["after_sigmoid"])).abs().max() > 0.05


def test_activations_equal_the_vectors(vectors: Vectors) -> None:
    """Scores of the public formats, read from their class logits by a head that copies the classes."""
    identity = torch.eye(3)
    for case in vectors("prm_activations")["cases"]:
        logits = torch.tensor(case["logits"])
        for name, positive, negative in (
            ("qwen_mse softmax[...,1] (first two logits)", [1], 0),
            ("shepherd_mse softmax over candidates [0,2], index 0", [0], 2),
            ("reasoneval_mse 1-p0", [1, 2], 0),
        ):
            head = quantile_head_from(identity, None, positive=positive, negative=negative, num_outputs=1)
            assert head(logits).sigmoid().squeeze(-1).tolist() == pytest.approx(case[name], abs=1e-6)
        assert logits.sigmoid().tolist() == [pytest.approx(row, abs=1e-6) for row in case["quantile sigmoid"]]


def test_step_rewards_equal_the_vectors(vectors: Vectors) -> None:
    """Scores at the marked positions of a response."""
    for case in vectors("prm_step_rewards")["cases"]:
        logits = torch.tensor(case["logits"]).float()[torch.tensor(case["mask"]).bool()]
        if case["mode"] == "softmax":
            head = quantile_head_from(torch.eye(2), None, positive=[1], negative=0, num_outputs=1)
            assert head(logits).sigmoid().squeeze(-1).tolist() == pytest.approx(case["out"][0], abs=1e-6)
        else:
            assert logits.sigmoid().tolist() == [pytest.approx(row, abs=1e-6) for row in case["out"][0]]


@pytest.mark.parametrize("positive", [[1], [4], [1, 2], [0, 2, 4]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_head_keeps_the_score(positive: list[int], with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 7).double(), torch.randn(5).double() if with_bias else None
    hidden = torch.randn(3, 4, 7).double()
    head = quantile_head_from(weight, bias, positive=positive, negative=3, num_outputs=2)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    wanted = _reference_softmax_score(logits, positive, 3)
    found = head(hidden).sigmoid()
    assert found.shape == (3, 4, 2)
    torch.testing.assert_close(found, wanted[..., None].expand(-1, -1, 2))


def test_outputs_are_copies_that_train_apart() -> None:
    source = torch.randn(2, 3)
    head = quantile_head_from(source, None, positive=[1], negative=0, num_outputs=2)
    head.weight[0].zero_()
    assert head.weight[1].abs().sum() > 0.0
    assert source.abs().sum() > 0.0
    half = quantile_head_from(source.bfloat16(), None, positive=[1], negative=0, num_outputs=1)
    assert half.weight.dtype == half.bias.dtype == torch.bfloat16
