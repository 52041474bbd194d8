"""What is asked of a model's output layer, without its logits: exact columns, and the log-likelihood of tokens.

The layer gives the logits ``h W^T + b`` of a hidden state h over a vocabulary of V. In half precision a logit of 16 to
32 has steps of 1/8, and a probability read from two of them steps of .03; and the logits of all positions of a batch,
their softmax and its gradient would be the larger part of the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

_TILE_ELEMENTS = 2**25  # 128 MiB in float32


def float32_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, token_ids: Tensor | None = None
) -> Tensor:
    """Return logits that are computed in float32 from hidden states and weights of any dtype.

    Args:
        hidden: [n, d].
        weight: Of the output layer, [V, d]; at most 128 MiB of it are held in float32 at a time.
        bias: [V], or None.
        token_ids: The columns that are wanted, int64 [k]; None wants all.

    Returns:
        float32 (float64 where the hidden states are), [n, k] or [n, V].

    Example:
        >>> hidden, weight = torch.tensor([[1.0, 2.0]]).bfloat16(), torch.eye(2).bfloat16()
        >>> float32_logits(hidden, weight, token_ids=torch.tensor([1]))
        tensor([[2.]])
    """
    hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
    with torch.autocast(hidden.device.type, enabled=False):
        if token_ids is not None:
            chosen = None if bias is None else bias[token_ids].to(hidden.dtype)
            return F.linear(hidden, weight[token_ids].to(hidden.dtype), chosen)
        tiles = _tiles(weight)
        logits = torch.cat([hidden @ weight[tile].to(hidden.dtype).T for tile in tiles], dim=-1)
        return logits if bias is None else logits + bias.to(hidden.dtype)


def log_normaliser(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``log sum_v exp(logit_v)`` of each hidden state, in float32; gradients reach the hidden states only.

    Made for a few rows. The gradient is computed in the forward pass, so that no logits are kept for the backward pass.

    Args:
        hidden: [n, d].
        weight: Of the output layer, frozen, [V, d].
        bias: Frozen, [V], or None.

    Returns:
        float32 [n].

    Example:
        >>> log_normaliser(torch.zeros(1, 2), torch.eye(2))
        tensor([0.6931])
    """
    return _LogNormaliser.apply(hidden, weight, bias)


def negative_log_likelihood(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, bias: Tensor | None = None, *, rows: int | None = None
) -> Tensor:
    """Return the negative log-likelihood of a token for each hidden state, in nats, a few positions at a time.

    ``-log softmax(h W^T + b)[token]``, the product in the dtype of the hidden states (of autocast, where it is on) and
    all else in float32, as the output layer and a cross-entropy do it. The gradient is computed in the forward pass, so
    that the logits of ``rows`` positions exist at a time; it reaches the hidden states only.

    Args:
        hidden: [n, d].
        weight: Of the output layer, frozen, [V, d].
        token_ids: int64 [n].
        bias: Frozen, [V], or None.
        rows: Positions at a time; None takes so many that their logits hold 128 MiB in float32.

    Returns:
        float32 (float64 where the hidden states are), [n].

    Example:
        >>> negative_log_likelihood(torch.zeros(2, 3), torch.eye(3), torch.tensor([0, 2]))
        tensor([1.0986, 1.0986])
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = rows or max(1, _TILE_ELEMENTS // len(weight))
    return _TokenLosses.apply(hidden, weight, bias, token_ids, rows)


def _tiles(weight: Tensor) -> list[slice]:
    """Return slices of the vocabulary whose weights take 128 MiB in float32 each."""
    size = max(1, _TILE_ELEMENTS // weight.shape[1])
    return [slice(start, start + size) for start in range(0, len(weight), size)]


class _LogNormaliser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = float32_logits(hidden, weight, bias)
        result = logits.logsumexp(-1)
        if ctx.needs_input_grad[0]:
            p = logits.sub_(result[:, None]).exp_()
            with torch.autocast(hidden.device.type, enabled=False):
                slope = p.new_zeros(hidden.shape)
                for tile in _tiles(weight):
                    slope += p[:, tile] @ weight[tile].to(p.dtype)
            ctx.save_for_backward(slope.to(hidden.dtype))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradient[:, None] * slope).to(slope.dtype), None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, rows: int) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        losses = hidden.new_empty(len(hidden), dtype=wide)
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), rows):
                part = slice(start, start + rows)
                ids = token_ids[part, None]
                logits = F.linear(hidden[part], weight, bias).to(wide)
                total = logits.logsumexp(-1, keepdim=True)
                losses[part] = (total - logits.gather(1, ids))[:, 0]
                if slope is not None:
                    p = logits.sub_(total).exp_()
                    p.scatter_add_(1, ids, p.new_full((1, 1), -1.0).expand_as(ids))
                    slope[part] = p.to(weight.dtype) @ weight
        if slope is not None:
            ctx.save_for_backward(slope)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (gradient[:, None] * slope).to(slope.dtype), None, None, None, None
