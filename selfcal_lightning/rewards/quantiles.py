"""A predicted chance with quantiles around it: outputs that cannot cross, and heads to start from.

The chance of success from a prefix of a response is often 0 or 1, so the median of its distribution jumps between
them. The *mean* is the point score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.training.losses import at_least_float32


class StepScores(NamedTuple):
    """A predicted chance of success with a lower and an upper quantile, each [...], in [0, 1]."""

    mean: Tensor
    low: Tensor
    high: Tensor


class QuantileHead(NamedTuple):
    """A head of M outputs over hidden states; for one row an output it is a plain linear layer.

    Attributes:
        weight: [M, P, D].
        bias: [M, P].
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., M] of hidden states [..., D]: ``log sum_p exp(w_mp . h + b_mp)``."""
        return (torch.einsum("...d,mpd->...mp", hidden, self.weight) + self.bias).logsumexp(-1)


def monotone_quantiles(raw: Tensor) -> StepScores:
    """Turn three outputs of a head into a chance and two quantiles that cannot cross, whatever the outputs are.

    ``mean = sigmoid(m)``, ``low = sigmoid(m - softplus(a))``, ``high = sigmoid(m + softplus(b))``
    """
    if raw.dim() < 1 or raw.shape[-1] != 3:
        raise InputError(f"Expected `raw` to have shape [..., 3], but got {tuple(raw.shape)}.")
    centre, below, above = at_least_float32(raw).unbind(-1)
    mean = centre.sigmoid()
    low, high = (centre - F.softplus(below)).sigmoid(), (centre + F.softplus(above)).sigmoid()
    # In floats sigmoid may fall by one unit in the last place where its argument rises.
    return StepScores(mean, torch.minimum(low, mean), torch.maximum(high, mean))


def folded_outputs(outputs: Tensor) -> Tensor:
    """Return the three outputs of ``monotone_quantiles`` from those of a head whose mean has P rows.

    ``m = log sum_p exp(o_p)``; the two gaps stay as they are. With one row nothing changes.
    """
    if outputs.dim() < 1 or outputs.shape[-1] < 3:
        raise InputError(f"Expected `outputs` to have shape [..., P + 2], but got {tuple(outputs.shape)}.")
    if outputs.shape[-1] == 3:
        return outputs
    return torch.cat([outputs[..., :-2].logsumexp(-1, keepdim=True), outputs[..., -2:]], dim=-1)


def quantile_head_from(
    weight: Tensor, bias: Tensor | None, *, positive: Sequence[int], negative: int, num_outputs: int
) -> QuantileHead:
    """Turn the classes of a public reward model into outputs whose sigmoid is its score, exactly."""
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]) or num_outputs < 1:
        shape = None if bias is None else tuple(bias.shape)
        raise InputError(
            f"Expected `weight` [C, D], `bias` [C] or None, `num_outputs` >= 1, but got {tuple(weight.shape)}, "
            f"{shape}, {num_outputs}."
        )
    classes = [*positive, negative]
    if not positive or len(set(classes)) < len(classes) or not 0 <= min(classes) <= max(classes) < len(weight):
        raise InputError(
            f"Expected `positive` and `negative` to be different classes below {len(weight)}, but got {[*positive]} "
            f"and {negative}."
        )
    constant = weight.new_zeros(len(weight)) if bias is None else bias
    rows, offsets = weight[list(positive)] - weight[negative], constant[list(positive)] - constant[negative]
    return QuantileHead(rows.expand(num_outputs, -1, -1).clone(), offsets.expand(num_outputs, -1).clone())
