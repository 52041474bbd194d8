import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from support.house import Vectors
from torch import Tensor

from selfcal_lightning.adaptation import losses as policy
from selfcal_lightning.rewards.heads import mean_rows, monotone_quantiles
from selfcal_lightning.rewards.metrics import QuantileMetrics, StepMetrics
from selfcal_lightning.training import losses as training_losses
from selfcal_lightning.training.losses import calibration_loss, cross_entropy_calibration_loss, squared_calibration_loss


def _reference_naive_ranknet(scores: list[float], targets: list[float], temperature: float, tie_weight: float) -> float:
    """Return the mean over ordered pairs plus the weighted mean over ties, by two loops."""
    ordered, tied = [], []
    for i, j in itertools.combinations(range(len(scores)), 2):
        d = (scores[i] - scores[j]) / temperature
        if targets[i] == targets[j]:
            tied.append((math.log1p(math.exp(d)) + math.log1p(math.exp(-d))) / 2.0 - math.log(2.0))
        else:
            ordered.append(math.log1p(math.exp(-d if targets[i] > targets[j] else d)))
    means = [sum(losses) / len(losses) if losses else 0.0 for losses in (ordered, tied)]
    return means[0] + tie_weight * means[1]


def test_calibration_loss_equals_the_vectors_and_torch(vectors: Vectors) -> None:
    for case in vectors("smooth_l1_confidence_loss")["cases"]:
        confidence, target = (torch.tensor(case[name]).double().reshape(-1) for name in ("p_yes", "target"))
        losses = calibration_loss(confidence, target)
        assert losses.mean().item() == pytest.approx(case["loss"], abs=1e-6)
        theirs = torch.nn.SmoothL1Loss(beta=0.25, reduction="none")(confidence, target)
        torch.testing.assert_close(losses, theirs, rtol=0.0, atol=0.0)
        torch.testing.assert_close(squared_calibration_loss(confidence, target), (confidence - target) ** 2)


def test_only_the_cross_entropy_pulls_back_a_confidence_that_is_far_off() -> None:
    logit, target = torch.tensor([-14.0, 14.0], requires_grad=True), torch.tensor([1.0, 0.0])
    with torch.autocast("cpu", torch.bfloat16):
        (slope,) = torch.autograd.grad(cross_entropy_calibration_loss(logit.sigmoid(), target).sum(), logit)
    assert slope.tolist() == pytest.approx([-1.0, 1.0], abs=1e-4)
    for loss in (calibration_loss, squared_calibration_loss):
        (slope,) = torch.autograd.grad(loss(logit.sigmoid(), target).sum(), logit)
        assert slope.abs().max() < 1e-5


def test_pinball_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("wql_loss")["cases"]:
        scores, target = torch.tensor(case["scores"]).double(), torch.tensor(case["targets"]).double()
        losses = training_losses.pinball_loss(scores, target, case["quantiles"])
        torch.testing.assert_close(losses, torch.tensor(case["per_element"]).double(), atol=1e-6, rtol=0.0)
        assert losses.mean().item() == pytest.approx(case["wql"], abs=1e-6)


def test_soft_cross_entropy_by_hand() -> None:
    # sigmoid(log 3) = 3/4: -1/2 log 3/4 - 1/2 log 1/4 = log 4 - 1/2 log 3.
    loss = training_losses.soft_cross_entropy(torch.tensor([math.log(3.0), 200.0]), torch.tensor([0.5, 1.0]))
    assert loss.tolist() == pytest.approx([math.log(4.0) - 0.5 * math.log(3.0), 0.0], abs=1e-6)


def test_ranknet_equals_the_vectors(vectors: Vectors) -> None:
    """The reference's sum is its mean times the number of pairs."""
    for case in vectors("ranknet_loss")["cases"]:
        scores, target = torch.tensor(case["scores"]), torch.tensor(case["targets"])
        options = {"temperature": case["temperature"], "tie_weight": case["tie_loss_weight"]}
        loss = training_losses.ranknet_loss(scores, target, **options).item()
        if case["reduction"] == "sum":
            assert len(set(case["targets"])) == len(case["targets"])
            loss *= math.comb(len(scores), 2)
        assert loss == pytest.approx(case["loss"], abs=1e-6)


@given(
    st.lists(st.tuples(st.floats(-5.0, 5.0), st.sampled_from([0.0, 0.5, 1.0])), max_size=6),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.3]),
)
def test_ranknet_equals_two_loops(pairs: list[tuple[float, float]], temperature: float, tie_weight: float) -> None:
    scores, targets = [s for s, _ in pairs], [t for _, t in pairs]
    found = training_losses.ranknet_loss(
        torch.tensor(scores, dtype=torch.float64), torch.tensor(targets), temperature=temperature, tie_weight=tie_weight
    )
    assert found.item() == pytest.approx(_reference_naive_ranknet(scores, targets, temperature, tie_weight), abs=1e-9)


ROW = torch.tensor([0, 0, 1, 1, 1, 2])
CLIP = (0.2, 0.28)


def _reference_autograd_ppo(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return PPO's loss of each token, with its ratio inside the graph (arXiv 1707.06347, equation 7)."""
    ratio = torch.exp(new - old)
    gain = advantage[ROW]
    return torch.maximum(-ratio * gain, -ratio.clamp(1.0 - CLIP[0], 1.0 + CLIP[1]) * gain)


def _reference_autograd_gspo(new: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    """Return GSPO's loss of each response, with its ratio inside the graph (arXiv 2507.18071)."""
    losses = []
    for row in range(len(advantage)):
        mine = row == ROW
        ratio = torch.exp((new[mine] - old[mine]).mean())
        gains = ratio * advantage[row], ratio.clamp(1.0 - CLIP[0], 1.0 + CLIP[1]) * advantage[row]
        losses.append(-torch.minimum(*gains))
    return torch.stack(losses)


def _tokens(spread: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities under the new and the old model, and an advantage for each of three responses."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, generator=generator).double()
    new = old + spread * torch.randn(6, generator=generator).double()
    return new, old, torch.tensor([1.5, -0.5, -2.0]).double()


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reference", [_reference_autograd_ppo, _reference_autograd_gspo])
def test_value_and_gradient_equal_the_reference(spread: float, reference: Callable[..., Tensor]) -> None:
    new, old, advantage = _tokens(spread)
    ours, theirs = (new.clone().requires_grad_() for _ in range(2))
    wanted = reference(theirs, old, advantage)
    if reference is _reference_autograd_ppo:
        loss = policy.policy_gradient_loss(ours, advantage, ROW, ratio=policy.token_ratio(ours, old))
        torch.testing.assert_close(loss, torch.zeros(3).double().index_add(0, ROW, wanted))
    else:
        sums = [torch.zeros(3).double().index_add(0, ROW, values) for values in (new, old)]
        ratio = policy.sequence_ratio(*sums, torch.bincount(ROW))[ROW]
        loss = policy.policy_gradient_loss(ours, advantage, ROW, ratio=ratio, normalise="responses")
        torch.testing.assert_close(loss, wanted)
    loss.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("normalise", ["tokens", "responses"])
def test_micro_batches_do_not_change_the_gradient(normalise: str) -> None:
    new, old, advantage = _tokens(0.3)
    total = torch.tensor(6.0 if normalise == "tokens" else 3.0)

    def gradient(parts: list[list[int]]) -> Tensor:
        logprob = new.clone().requires_grad_()
        for part in parts:
            mine = torch.isin(ROW, torch.tensor(part))
            row = torch.tensor([part.index(r) for r in ROW[mine].tolist()])
            ratio = policy.token_ratio(logprob[mine], old[mine])
            loss = policy.policy_gradient_loss(logprob[mine], advantage[part], row, ratio=ratio, normalise=normalise)
            training_losses.share_of_step(loss, torch.ones(len(part)), total).backward()
        return logprob.grad

    torch.testing.assert_close(gradient([[0, 1, 2]]), gradient([[2], [0, 1]]))


def test_the_estimate_of_the_divergence_has_no_bias() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    estimates = policy.kl_estimate(p.log(), q.log())
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * estimates).sum(), exact)
    assert (estimates >= 0.0).all()
    # Its variance is below that of the plain estimate log p - log q.
    plain = (p / q).log()
    assert (p * estimates**2).sum() - exact**2 < (p * plain**2).sum() - exact**2
    assert policy.kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0])).tolist() == [0.0]


def test_entropy_bonus_means_per_response_and_has_a_gradient() -> None:
    logits = torch.zeros(3, 4, requires_grad=True)
    peaked = torch.tensor([[100.0, 0.0, 0.0, 0.0]])
    found = policy.entropy_bonus(torch.cat([logits, peaked]), torch.tensor([0, 0, 1, 1]), num_rows=3)
    assert found.tolist() == pytest.approx([math.log(4.0), math.log(4.0) / 2.0, 0.0], abs=1e-5)
    probe = torch.tensor([[1.0, 0.0]], requires_grad=True)
    policy.entropy_bonus(probe, torch.tensor([0]), num_rows=1).sum().backward()
    # dH/dz_0 = -p0 p1 (z0 - z1).
    p0 = torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(probe.grad[0, 0], -p0 * (1.0 - p0))


RAW = st.floats(-1e30, 1e30)


@settings(max_examples=500)
@given(RAW, RAW, RAW)
def test_quantiles_never_cross(centre: float, below: float, above: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        mean, low, high = monotone_quantiles(torch.tensor([centre, below, above], dtype=torch.float64).to(dtype))
        assert 0.0 <= low <= mean <= high <= 1.0


@given(st.lists(st.floats(-30.0, 30.0), min_size=3, max_size=3))
def test_quantiles_equal_scipy(raw: list[float]) -> None:
    found = monotone_quantiles(torch.tensor(raw, dtype=torch.float64))
    centre, below, above = raw
    ends = [centre, centre - np.logaddexp(0.0, below), centre + np.logaddexp(0.0, above)]
    assert [score.item() for score in found] == pytest.approx(special.expit(ends), abs=1e-8)


def _outside(low: Any, high: Any, rates: Any, *, tolerance: float = 0.0) -> list[float]:
    """Return the shares of rates below the lower and above the upper quantile."""
    metric = QuantileMetrics(tolerance=tolerance)
    columns = (torch.as_tensor(np.broadcast_to(column, len(rates)).copy()) for column in (low, high, rates))
    metric.update(*columns, torch.zeros(len(rates), dtype=torch.long))
    values = metric.compute()
    return [values["steps/BelowLow"], values["steps/AboveHigh"]]


def test_right_quantiles_leave_the_nominal_share_outside() -> None:
    # .25 is at the tolerance, so inside; .2 and 0 are outside.
    assert _outside(0.3, 1.0, [0.25, 0.2, 0.0, 0.9], tolerance=0.05) == [0.5, 0.0]
    assert _outside(0.0, 0.3, [0.35, 0.36, 1.0, 0.0], tolerance=0.05) == [0.0, 0.5]
    rates, truth = np.random.default_rng(0).beta(2.0, 3.0, 20_000), stats.beta(2.0, 3.0)
    assert _outside(truth.ppf(0.1), truth.ppf(0.9), rates) == pytest.approx([0.1, 0.1], abs=0.01)


def test_brier_excess_has_the_right_expectation() -> None:
    def excess(score: float, rate: float, num_rollouts: int) -> float:
        metric = StepMetrics()
        metric.update(
            *(torch.tensor([value], dtype=torch.float64) for value in (score, rate, num_rollouts)), torch.tensor([0])
        )
        return metric.compute()["steps/BrierExcess"]

    successes = np.arange(9)
    for truth in (0.0, 0.3, 0.9):
        weights = stats.binom.pmf(successes, 8, truth)
        found = sum(w * excess(0.6, k / 8, 8) for w, k in zip(weights, successes, strict=True))
        assert found == pytest.approx((0.6 - truth) ** 2, abs=1e-12)
    assert excess(0.5, 1.0 / 3.0, 3) == pytest.approx(1.0 / 36.0 - 1.0 / 9.0, abs=1e-6)


def score_by_rows(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, positive: list[int], negative: int) -> Any:
    rows, offsets = mean_rows(weight, bias, positive=positive, negative=negative)
    return torch.nn.functional.linear(hidden, rows, offsets).logsumexp(-1).sigmoid()


def test_qwen_head_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("quantile_head_init_qwen")["cases"]:
        weight, bias = torch.tensor(case["W"]), torch.tensor(case["b"])
        rows, offsets = mean_rows(weight, bias, positive=[1], negative=0)
        assert rows[0].tolist() == pytest.approx(case["new_W"][0], abs=1e-6)
        assert offsets.item() == pytest.approx(case["new_b"][0], abs=1e-6)
        found = score_by_rows(torch.tensor(case["x"]), weight, bias, [1], 0)
        assert found.tolist() == pytest.approx(case["softmax_pos_before"], abs=1e-6)


def test_other_heads_start_exactly_where_the_vectors_stood(vectors: Vectors) -> None:
    """The reference's own conversion keeps a random bias, and bends ReasonEval's score even without it."""
    for case in vectors("quantile_head_init_other")["cases"]:
        if case["model"] == "shepherd":
            (good, bad), weight, wanted = case["candidate_token_ids"], case["lm_head_weight"], case["before"]
            positive, negative = [good], bad
        else:
            weight, wanted = case["score_head_weight"], case["validity_before_1-p0"]
            positive, negative = [1, 2], 0
        found = score_by_rows(torch.tensor(case["x"]), torch.tensor(weight), None, positive, negative)
        assert found.tolist() == pytest.approx(wanted, abs=1e-6)
        assert (found[:, None] - torch.tensor(case["after_sigmoid"])).abs().max() > 0.05


def test_activations_and_step_rewards_equal_the_vectors(vectors: Vectors) -> None:
    """Scores of the public formats, read from their class logits by a head that copies the classes."""
    identity = torch.eye(3)
    for case in vectors("prm_activations")["cases"]:
        logits = torch.tensor(case["logits"])
        for name, positive, negative in (
            ("qwen_mse softmax[...,1] (first two logits)", [1], 0),
            ("shepherd_mse softmax over candidates [0,2], index 0", [0], 2),
            ("reasoneval_mse 1-p0", [1, 2], 0),
        ):
            found = score_by_rows(logits, identity, None, positive, negative)
            assert found.tolist() == pytest.approx(case[name], abs=1e-6)
        assert logits.sigmoid().tolist() == [pytest.approx(row, abs=1e-6) for row in case["quantile sigmoid"]]
    # Scores at the marked positions of a response.
    for case in vectors("prm_step_rewards")["cases"]:
        logits = torch.tensor(case["logits"]).float()[torch.tensor(case["mask"]).bool()]
        if case["mode"] == "softmax":
            found = score_by_rows(logits, torch.eye(2), None, [1], 0)
            assert found.tolist() == pytest.approx(case["out"][0], abs=1e-6)
        else:
            assert logits.sigmoid().tolist() == [pytest.approx(row, abs=1e-6) for row in case["out"][0]]


@pytest.mark.parametrize("positive", [[1], [4], [1, 2], [0, 2, 4]])
@pytest.mark.parametrize("with_bias", [False, True])
def test_any_head_keeps_the_score(positive: list[int], with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(5, 7).double(), torch.randn(5).double() if with_bias else None
    hidden = torch.randn(3, 4, 7).double()
    logits = torch.nn.functional.linear(hidden, weight, bias)
    wanted = logits[..., [*positive, 3]].softmax(-1)[..., :-1].sum(-1)
    torch.testing.assert_close(score_by_rows(hidden, weight, bias, positive, 3), wanted)
