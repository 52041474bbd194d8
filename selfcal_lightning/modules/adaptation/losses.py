"""A micro-batch's parts of the losses over response tokens of its optimiser step."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.losses import row_means, share_of_step
from selfcal_lightning.functional.policy_losses import (
    entropy_bonus,
    kl_estimate,
    policy_gradient_loss,
    sequence_ratio,
    token_ratio,
)
from selfcal_lightning.modules.adaptation.batch import PolicyBatch

Ratio = Literal["token", "sequence"]


class PolicyParts(NamedTuple):
    """Parts of a step, scalars: clipped policy gradient, KL to round 0, entropy, and the share of clipped tokens."""

    gradient: Tensor
    divergence: Tensor
    entropy: Tensor
    clipped: Tensor


def policy_parts(
    batch: PolicyBatch,
    logprob: Tensor,
    *,
    behaviour: Tensor | None,
    reference: Tensor | None,
    logits: Tensor | None,
    ratio: Ratio = "token",
    clip: tuple[float, float] = (0.2, 0.28),
) -> PolicyParts:
    """Return a micro-batch's parts of the policy gradient and what restrains it.

    Each is the mean over the tokens of a response, weighted over the responses of the step by ``generation_weight``:
    with numbers of tokens as weights, every token of the step weighs alike.

    Args:
        batch: The rows, with advantages and weights.
        logprob: log p of the labels under the model that is trained [N], with gradient.
        behaviour: Likewise under the model that sampled them; None where it is the same one.
        reference: Likewise under the model of round 0; None adds no KL.
        logits: Logits at the labels [N, V]; None measures no entropy.
        ratio: "token" clips the ratio of every token (GRPO), "sequence" that of the whole response (GSPO).
        clip: How far below and above 1 a ratio still counts.
    """
    row, rows = batch.label_row, batch.batch_size
    ratios = None if behaviour is None else _ratios(logprob.detach(), behaviour, row, rows, ratio)
    per_row = policy_gradient_loss(logprob, batch.advantage, row, ratio=ratios, clip=clip, normalise="responses")
    nothing = torch.zeros_like(per_row)
    divergence = nothing if reference is None else row_means(kl_estimate(logprob, reference), row, num_rows=rows)
    entropy = nothing if logits is None else entropy_bonus(logits, row, num_rows=rows)
    clipped = (
        nothing if ratios is None else row_means(_is_clipped(ratios, batch.advantage[row], clip), row, num_rows=rows)
    )
    weight, total = batch.generation_weight, batch.generation_total
    return PolicyParts(*(share_of_step(part, weight, total) for part in (per_row, divergence, entropy, clipped)))


def check_ratio(ratio: str, clip: tuple[float, float]) -> None:
    """Raise InputError where one of them is out of range."""
    if ratio not in get_args(Ratio):
        raise InputError(f"Expected `ratio` to be one of {get_args(Ratio)}, but got {ratio!r}.")
    if not 0.0 <= clip[0] <= 1.0 or clip[1] < 0.0:
        raise InputError(f"Expected `clip_low` to lie in [0, 1] and `clip_high` to be at least 0, but got {clip}.")


def _ratios(logprob: Tensor, behaviour: Tensor, row: Tensor, rows: int, ratio: Ratio) -> Tensor:
    if ratio == "token":
        return token_ratio(logprob, behaviour)
    sums = [values.new_zeros(rows).index_add(0, row, values) for values in (logprob, behaviour)]
    return sequence_ratio(*sums, torch.bincount(row, minlength=rows))[row]


def _is_clipped(ratio: Tensor, advantage: Tensor, clip: tuple[float, float]) -> Tensor:
    """Return 1 where a token's gradient is cut off by the clipping, [N]."""
    above, below = (ratio > 1.0 + clip[1]) & (advantage > 0), (ratio < 1.0 - clip[0]) & (advantage < 0)
    return (above | below).to(ratio.dtype)
