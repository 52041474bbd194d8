"""Losses of policy gradients. They take tensors, keep gradients, and compute in float32 or wider.

The tokens of all responses of a micro-batch lie in one vector [n], with the row (the response) of each. Losses come per
response; ``losses.share_of_step`` divides what they add up to by the total of the whole optimiser step, so that neither
micro-batches nor processes change the update.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from selfcal_lightning.confidence.certainty import token_entropy
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.training.losses import at_least_float32, row_means

Normalise = Literal["tokens", "responses"]


def policy_gradient_loss(
    logprob: Tensor,
    advantage: Tensor,
    row: Tensor,
    *,
    ratio: Tensor | None = None,
    clip: tuple[float, float] = (0.2, 0.28),
    normalise: Normalise = "tokens",
) -> Tensor:
    """Compute the clipped policy gradient loss of responses.

    ``-min(r A, clip(r, 1 - low, 1 + high) A)`` for each token, with A the advantage of its response. The value of r is
    ``ratio`` and its gradient that of ``ratio * log p``, as for PPO's ratio of tokens and for GSPO's of sequences.

    Args:
        logprob: log p of the tokens under the model that is trained [n], with gradient.
        advantage: A of each response [B].
        row: The response of each token [n], in [0, B).
        ratio: Chance of each token [n] under the model that is trained over that under the one that sampled:
            ``token_ratio``, or ``sequence_ratio(...)[row]``. None where they are the same model, which is a ratio of 1.
        clip: Low and high: how far below and above 1 a ratio still counts, each at least 0.
        normalise: "tokens" gives the sum over the tokens of a response, to be divided by the tokens of the step.
            "responses" gives their mean, to be divided by the responses of the step.

    Returns:
        One loss per response [B]; 0 for a response without tokens.

    Example:
        >>> logprob, row = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0, 0, 1])
        >>> policy_gradient_loss(logprob, torch.tensor([1.0, -1.0]), row)
        tensor([-2.,  1.])
        >>> policy_gradient_loss(logprob, torch.tensor([1.0, -1.0]), row, ratio=torch.full((3,), 2.0))
        tensor([-2.5600,  2.0000])

    Reference:
        Schulman et al., PPO, arXiv 1707.06347, equation 7; Yu et al., DAPO, arXiv 2503.14476, section 3.1 (two bounds);
        Zheng et al., GSPO, arXiv 2507.18071 (one ratio a response).
    """
    if normalise not in ("tokens", "responses"):
        raise InputError(f'Expected `normalise` to be "tokens" or "responses", but got {normalise!r}.')
    if min(clip) < 0.0:
        raise InputError(f"Expected `clip` to hold two numbers of at least 0, but got {clip}.")
    _check_same(logprob=logprob, row=row, **({} if ratio is None else {"ratio": ratio}))
    if logprob.dim() != 1 or advantage.dim() != 1:
        raise InputError(
            f"Expected `logprob` [n] and `advantage` [B], but got {tuple(logprob.shape)} and {tuple(advantage.shape)}."
        )
    logprob = at_least_float32(logprob)
    weight = torch.exp(logprob - logprob.detach())
    if ratio is not None:
        weight = weight * ratio.detach().to(weight.dtype)
    gain = advantage.to(weight.dtype)[row]
    losses = -torch.minimum(weight * gain, weight.clamp(1.0 - clip[0], 1.0 + clip[1]) * gain)
    if normalise == "responses":
        return row_means(losses, row, num_rows=len(advantage))
    return losses.new_zeros(len(advantage)).index_add(0, row, losses)


def token_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return how much likelier each token is under the model that is trained than under the one that sampled, [n].

    Args:
        new: log p of the tokens under the model that is trained [n].
        old: The same under the model that sampled, at temperature 1 [n].

    Example:
        >>> token_ratio(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([1.])
    """
    _check_same(new=new, old=old)
    return torch.exp(at_least_float32(new) - at_least_float32(old))


def sequence_ratio(new: Tensor, old: Tensor, length: Tensor) -> Tensor:
    """Return how much likelier each response is under the model that is trained, per token, [B].

    ``exp((new - old) / length)``: it needs the log-probability of the whole response only.

    Args:
        new: Sum of log p of the response's tokens under the model that is trained [B].
        old: The same under the model that sampled, at temperature 1 [B].
        length: Tokens of the response [B]; 0 gives a ratio of 1 where the sums are 0.

    Example:
        >>> sequence_ratio(torch.tensor([-2.0]), torch.tensor([-4.0]), torch.tensor([2]))  # e
        tensor([2.7183])

    Reference:
        Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071.
    """
    _check_same(new=new, old=old, length=length)
    return torch.exp((at_least_float32(new) - at_least_float32(old)) / length.clamp(min=1))


def kl_estimate(logprob: Tensor, reference_logprob: Tensor) -> Tensor:
    """Estimate ``KL(p || reference)`` from single tokens drawn from p, in nats, at least 0.

    ``e^d - d - 1`` with ``d = log reference - log p``: without bias, and of less variance than ``-d``.

    Args:
        logprob: log p of the tokens under the model that is trained [...].
        reference_logprob: The same under the reference model [...].

    Returns:
        One estimate per token [...].

    Example:
        >>> kl_estimate(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.0]))  # e - 2
        tensor([0.0000, 0.7183])

    Reference:
        Schulman, Approximating KL Divergence, 2020 ("k3").
    """
    _check_same(logprob=logprob, reference_logprob=reference_logprob)
    difference = at_least_float32(reference_logprob) - at_least_float32(logprob)
    return torch.expm1(difference) - difference


def entropy_bonus(logits: Tensor, row: Tensor, *, num_rows: int) -> Tensor:
    """Compute the mean entropy of the next-token distributions of each response, in nats; subtract it from a loss.

    Args:
        logits: Logits at the positions that predict the tokens [n, V].
        row: The response of each token [n], in [0, num_rows).
        num_rows: B.

    Returns:
        One mean per response [B]; 0 for a response without tokens.

    Example:
        >>> entropy_bonus(torch.zeros(2, 4), torch.tensor([0, 0]), num_rows=1)  # log 4
        tensor([1.3863])
    """
    if logits.dim() != 2 or row.shape != logits.shape[:1]:
        raise InputError(f"Expected `logits` [n, V] and `row` [n], but got {tuple(logits.shape)}, {tuple(row.shape)}.")
    return row_means(token_entropy(logits), row, num_rows=num_rows)


def _check_same(**columns: Tensor) -> None:
    """Raise ValueError unless all ``columns`` have the same shape; keywords are the names in the message."""
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1:
        names = ", ".join(f"`{name}`" for name in shapes)
        raise InputError(f"Expected {names} to have the same shape, but got {tuple(shapes.values())}.")
