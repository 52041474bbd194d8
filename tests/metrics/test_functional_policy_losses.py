"""Policy gradients by hand, against PPO written with autograd, and against exact expectations over a vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from selfcal_lightning.adaptation.losses import (
    entropy_bonus,
    kl_estimate,
    policy_gradient_loss,
    sequence_ratio,
    token_ratio,
)
from selfcal_lightning.training.losses import share_of_step

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


def test_by_hand() -> None:
    # Advantages 1 and -1, ratio 1/2: min(.5, .8) = .5 and min(-.5, -.8) = -.8. Ratio 2: min(2, 1.28), min(-2, -1.28).
    logprob, row = torch.full((2,), -1.0), torch.tensor([0, 1])
    advantage = torch.tensor([1.0, -1.0])
    for ratio, wanted in ((0.5, [-0.5, 0.8]), (2.0, [-1.28, 2.0])):
        found = policy_gradient_loss(logprob, advantage, row, ratio=torch.full((2,), ratio))
        assert found.tolist() == pytest.approx(wanted)
    # Of two tokens, "tokens" adds and "responses" averages.
    both = torch.tensor([0, 0])
    assert policy_gradient_loss(logprob, advantage[:1], both).tolist() == [-2.0]
    assert policy_gradient_loss(logprob, advantage[:1], both, normalise="responses").tolist() == [-1.0]


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_value_and_gradient_equal_ppo(spread: float) -> None:
    new, old, advantage = _tokens(spread)
    ours, theirs = (new.clone().requires_grad_() for _ in range(2))
    loss = policy_gradient_loss(ours, advantage, ROW, ratio=token_ratio(ours, old))
    wanted = _reference_autograd_ppo(theirs, old, advantage)
    torch.testing.assert_close(loss, torch.zeros(3).double().index_add(0, ROW, wanted))
    loss.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_value_and_gradient_equal_gspo(spread: float) -> None:
    new, old, advantage = _tokens(spread)
    ours, theirs = (new.clone().requires_grad_() for _ in range(2))
    sums = [torch.zeros(3).double().index_add(0, ROW, values) for values in (new, old)]
    ratio = sequence_ratio(*sums, torch.bincount(ROW))
    loss = policy_gradient_loss(ours, advantage, ROW, ratio=ratio[ROW], normalise="responses")
    wanted = _reference_autograd_gspo(theirs, old, advantage)
    torch.testing.assert_close(loss, wanted)
    loss.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_without_a_ratio_it_is_reinforce() -> None:
    logprob, _, advantage = _tokens(0.0)
    logprob.requires_grad_()
    loss = policy_gradient_loss(logprob, advantage, ROW)
    loss.sum().backward()
    torch.testing.assert_close(logprob.grad, -advantage[ROW])
    torch.testing.assert_close(loss.detach(), -advantage * torch.bincount(ROW))


@pytest.mark.parametrize("normalise", ["tokens", "responses"])
def test_micro_batches_do_not_change_the_gradient(normalise: str) -> None:
    new, old, advantage = _tokens(0.3)
    total = torch.tensor(6.0 if normalise == "tokens" else 3.0)

    def gradient(parts: list[list[int]]) -> Tensor:
        logprob = new.clone().requires_grad_()
        for part in parts:
            mine = torch.isin(ROW, torch.tensor(part))
            row = torch.tensor([part.index(r) for r in ROW[mine].tolist()])
            ratio = token_ratio(logprob[mine], old[mine])
            loss = policy_gradient_loss(logprob[mine], advantage[part], row, ratio=ratio, normalise=normalise)
            share_of_step(loss, torch.ones(len(part)), total).backward()
        return logprob.grad

    torch.testing.assert_close(gradient([[0, 1, 2]]), gradient([[2], [0, 1]]))


def test_a_response_without_tokens_gives_zero() -> None:
    loss = policy_gradient_loss(torch.zeros(1), torch.tensor([1.0, 5.0]), torch.tensor([0]), normalise="responses")
    assert loss.tolist() == [-1.0, 0.0]
    assert sequence_ratio(torch.zeros(1), torch.zeros(1), torch.tensor([0])).tolist() == [1.0]


def test_the_estimate_of_the_divergence_has_no_bias() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    estimates = kl_estimate(p.log(), q.log())
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * estimates).sum(), exact)
    assert (estimates >= 0.0).all()
    # Its variance is below that of the plain estimate log p - log q.
    plain = (p / q).log()
    assert (p * estimates**2).sum() - exact**2 < (p * plain**2).sum() - exact**2
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0])).tolist() == [0.0]


def test_entropy_bonus_means_per_response_and_has_a_gradient() -> None:
    logits = torch.zeros(3, 4, requires_grad=True)
    peaked = torch.tensor([[100.0, 0.0, 0.0, 0.0]])
    found = entropy_bonus(torch.cat([logits, peaked]), torch.tensor([0, 0, 1, 1]), num_rows=3)
    assert found.tolist() == pytest.approx([math.log(4.0), math.log(4.0) / 2.0, 0.0], abs=1e-5)
    probe = torch.tensor([[1.0, 0.0]], requires_grad=True)
    entropy_bonus(probe, torch.tensor([0]), num_rows=1).sum().backward()
    # dH/dz_0 = -p0 p1 (z0 - z1).
    p0 = torch.sigmoid(torch.tensor(1.0))
    torch.testing.assert_close(probe.grad[0, 0], -p0 * (1.0 - p0))


def test_half_precision_is_widened() -> None:
    logprob = torch.full((1,), -1.0, dtype=torch.bfloat16)
    assert policy_gradient_loss(logprob, torch.ones(1), torch.tensor([0])).dtype == torch.float32
    assert kl_estimate(logprob, logprob).dtype == torch.float32
