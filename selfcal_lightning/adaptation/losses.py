"""Policy-gradient losses, in float32 or wider.

The tokens of all responses of a micro-batch lie in one vector [n], with the row (the response) of each. Losses are per
response; ``training.losses.share_of_step`` divides their sum by the total of the optimiser step, so that the split into
micro-batches and processes does not change the update.
"""

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
    ``ratio`` and its gradient that of ``ratio * log p``, for both PPO (token ratio) and GSPO (sequence ratio).

    Args:
        logprob: log p of the tokens under the trained model [n], with gradient.
        advantage: A of each response [B].
        row: The response of each token [n], in [0, B).
        ratio: Chance of each token under the trained model over that under the sampling model [n]: ``token_ratio`` or
            ``sequence_ratio(...)[row]``. None means 1.
        clip: How far below and above 1 a ratio still counts.
        normalise: "tokens" returns the sum over the tokens of a response, to be divided by the tokens of the step;
            "responses" their mean, to be divided by the responses of the step.

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
        shapes = tuple(logprob.shape), tuple(advantage.shape)
        raise InputError(f"Expected `logprob` [n] and `advantage` [B], but got shapes {shapes[0]} and {shapes[1]}.")
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
    """Return the chance of each token under the trained model over that under the sampling model [n].

    Takes log p of the tokens under the trained and the sampling model, at temperature 1 [n].

    Example:
        >>> token_ratio(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([1.])
    """
    _check_same(new=new, old=old)
    return torch.exp(at_least_float32(new) - at_least_float32(old))


def sequence_ratio(new: Tensor, old: Tensor, length: Tensor) -> Tensor:
    """Return the chance of each response under the trained model over that under the sampling model, per token [B].

    ``exp((new - old) / length)`` with sums of log p over the response [B] and its length in tokens [B].

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

    ``e^d - d - 1`` with ``d = log reference - log p``: unbiased, with less variance than ``-d``.

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
    """Compute the mean entropy of the next-token distributions of each response [B], in nats; 0 without tokens.

    Takes the logits that predict the tokens [n, V] and the response of each token [n].

    Example:
        >>> entropy_bonus(torch.zeros(2, 4), torch.tensor([0, 0]), num_rows=1)  # log 4
        tensor([1.3863])
    """
    if logits.dim() != 2 or row.shape != logits.shape[:1]:
        raise InputError(f"Expected `logits` [n, V] and `row` [n], but got {tuple(logits.shape)}, {tuple(row.shape)}.")
    return row_means(token_entropy(logits), row, num_rows=num_rows)


def _check_same(**columns: Tensor) -> None:
    shapes = {name: tuple(column.shape) for name, column in columns.items()}
    if len(set(shapes.values())) > 1:
        names = ", ".join(f"`{name}`" for name in shapes)
        raise InputError(f"Expected {names} to have the same shape, but got {tuple(shapes.values())}.")
