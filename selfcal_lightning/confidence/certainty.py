"""A response's confidence from values of its tokens: over all tokens, over steps, or over windows.

Values, one per response token [n], come from ``certainty.token_statistics`` or similar. Scores are not probabilities
unless stated; higher is more certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, check_positive

_CHUNK_ELEMENTS = 2**24


class TokenStatistics(NamedTuple):
    """Statistics of n response tokens, each [n], in nats."""

    logprob: Tensor
    certainty: Tensor
    entropy: Tensor


def self_certainty(logits: Array, *, mask: Array | None = None) -> Tensor:
    r"""Compute the self-certainty of responses in nats, at least 0; higher is more certain.

    ``1/n sum_i KL(U || p_i) = -1/(n V) sum_i sum_v log(V p_iv)`` over the n tokens of a response, with ``p_i`` the
    distribution that token i was drawn from and U the uniform one over the V entries of the logits.
    """
    certainty = token_certainty(logits)
    if certainty.dim() < 1:
        raise InputError("Expected `logits` to have shape [..., tokens, vocabulary], but got one dimension only.")
    if mask is None:
        return certainty.mean(-1)
    counts = torch.as_tensor(mask, device=certainty.device).bool()
    if counts.shape != certainty.shape:
        raise InputError(f"Expected `mask` to have shape {tuple(certainty.shape)}, but got {tuple(counts.shape)}.")
    return torch.where(counts, certainty, 0.0).sum(-1) / counts.sum(-1)


def token_certainty(logits: Array) -> Tensor:
    """Compute KL(uniform || p) in nats for each next-token distribution, at least 0; higher is surer."""
    return _by_rows(logits, _certainty)


def token_entropy(logits: Array) -> Tensor:
    """Compute the Shannon entropy in nats of each next-token distribution, in [0, log V]; lower is more certain.

    ``H = -sum_v p_v log p_v`` with ``p = softmax(logits)``, at temperature 1.
    """
    return _by_rows(logits, _entropy)


def top_k_confidence(logits: Array, k: int = 20) -> Tensor:
    """Compute the mean negative log-probability of the k most likely tokens, in nats; higher is more certain.

    ``-1/k sum_{j <= k} log p_(j)``: a certain model leaves little probability to all but the first.
    """
    check_positive(k, "k")
    size = torch.as_tensor(logits).shape[-1:]
    if size and k > size[0]:
        raise InputError(f"Expected `k` to be at most the size of the vocabulary, {size[0]}, but got {k}.")
    return _by_rows(logits, lambda z, log_total: log_total - z.topk(k, dim=-1).values.mean(-1))


def token_statistics(logits: Tensor, token_ids: Tensor) -> TokenStatistics:
    """Compute log-probability, certainty and entropy of tokens in one pass over their logits."""
    if logits.dim() != 2 or token_ids.shape != logits.shape[:1]:
        raise InputError(
            f"Expected `logits` [n, V] and `token_ids` [n], but got {tuple(logits.shape)} and {tuple(token_ids.shape)}."
        )
    parts = []
    for z, ids in zip(_shifted(logits), token_ids.split(_rows_at_once(logits)), strict=True):
        log_total = z.logsumexp(-1)
        logprob = z.gather(1, ids[:, None]).squeeze(1) - log_total
        parts.append((logprob, _certainty(z, log_total), _entropy(z, log_total)))
    return TokenStatistics(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _certainty(z: Tensor, log_total: Tensor) -> Tensor:
    """Return KL(uniform || softmax(z)) [rows] = log sum exp z - mean z - log V, which needs no log-probabilities."""
    return (log_total - z.mean(-1) - math.log(z.shape[-1])).clamp_min(0.0)


def _entropy(z: Tensor, log_total: Tensor) -> Tensor:
    """Return the entropy [rows] of softmax(z) = log sum exp z - sum p z; tokens with p = 0 are ignored."""
    p = (z - log_total[:, None]).exp_()
    return (log_total - (p * z.clamp_min(torch.finfo(z.dtype).min)).sum(-1)).clamp_min(0.0)


def _by_rows(logits: Array, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Apply ``function`` of z [rows, V] and log sum exp z [rows] to logits [..., V], a few rows at a time."""
    values = torch.as_tensor(logits)
    if values.dim() < 1 or values.shape[-1] < 1:
        raise InputError(f"Expected `logits` to have shape [..., vocabulary], but got {tuple(values.shape)}.")
    chunks = [function(z, z.logsumexp(-1)) for z in _shifted(values.reshape(-1, values.shape[-1]))]
    return torch.cat(chunks).reshape(values.shape[:-1])


def _shifted(rows: Tensor) -> Iterator[Tensor]:
    """Yield ``rows`` [n, V] in chunks, in higher precision and shifted to a maximum of 0 to limit rounding errors."""
    for chunk in rows.split(_rows_at_once(rows)):
        z = chunk if chunk.dtype == torch.float64 else chunk.float()
        yield z - z.amax(-1, keepdim=True)


def _rows_at_once(rows: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // rows.shape[-1])


def response_certainty(logits: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the uniform distribution against the model's, in nats, at least log V.

    ``-1/(n V) sum_i sum_v log p_iv``, which is self-certainty plus log V.
    """
    return self_certainty(logits) + math.log(logits.shape[-1])


def span_means(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the mean of the values over each range of tokens [S]."""
    if values.dim() != 1:
        raise InputError(f"Expected `values` to have shape [n], but got {tuple(values.shape)}.")
    for start, end in spans:
        if not 0 <= start < end <= len(values):
            raise InputError(f"Expected `spans` to be ranges of the {len(values)} tokens, but got ({start}, {end}).")
    return torch.stack([values[start:end].mean() for start, end in spans]) if len(spans) else values.new_zeros(0)


def step_scores(metric: Tensor, logprob: Tensor, *, weight: float = 0.5) -> Tensor:
    """Combine a metric of each step with the geometric mean of its tokens' probabilities.

    ``metric^(1 - weight) * exp(logprob)^weight``
    """
    if metric.shape != logprob.shape or metric.dim() != 1:
        raise InputError(
            f"Expected `metric` and `logprob` to have shape [S], but got {tuple(metric.shape)}, {tuple(logprob.shape)}."
        )
    if not 0.0 <= weight <= 1.0:
        raise InputError(f"Expected `weight` to lie in [0, 1], but got {weight}.")
    if (metric < 0.0).any():
        raise InputError(f"Expected `metric` to be at least 0, but got {metric.min().item():g}.")
    return metric ** (1.0 - weight) * torch.exp(weight * logprob)


def step_certainty(
    tokens: TokenStatistics, spans: Sequence[tuple[int, int]], *, vocabulary_size: int, weight: float = 0.5
) -> Tensor:
    """Compute the score of each step from its tokens' certainty: the metric is the mean of ``KL(U || p) + log V``."""
    metric = span_means(tokens.certainty, spans) + math.log(vocabulary_size)
    return step_scores(metric, span_means(tokens.logprob, spans), weight=weight)


def step_entropy(
    tokens: TokenStatistics, spans: Sequence[tuple[int, int]], *, vocabulary_size: int, weight: float = 0.5
) -> Tensor:
    """Compute the score of each step from its tokens' entropy: the metric is ``1 - mean H / log V``."""
    metric = (1.0 - span_means(tokens.entropy, spans) / math.log(vocabulary_size)).clamp(0.0, 1.0)
    return step_scores(metric, span_means(tokens.logprob, spans), weight=weight)


def group_confidences(values: Tensor, *, window: int) -> Tensor:
    """Return the means over all windows of ``window`` consecutive tokens [max(n - window, 0) + 1]."""
    check_positive(window, "window")
    if values.dim() != 1:
        raise InputError(f"Expected `values` to have shape [n], but got {tuple(values.shape)}.")
    if not len(values):
        return values
    size = min(window, len(values))
    # In float64, for sums over long responses cancel.
    sums = torch.cat([values.new_zeros(1, dtype=torch.float64), values.double().cumsum(0)])
    return ((sums[size:] - sums[:-size]) / size).to(values.dtype)


def lowest_group_confidence(values: Tensor, *, window: int = 2048, share: float = 0.0) -> float | None:
    """Compute the confidence of the least certain part of a response."""
    if not 0.0 <= share <= 1.0:
        raise InputError(f"Expected `share` to lie in [0, 1], but got {share}.")
    groups = group_confidences(values, window=window)
    if not len(groups):
        return None
    taken = max(1, int(share * len(groups)))
    return groups.double().topk(taken, largest=False).values.mean().item()
