"""One confidence of a response from values of its tokens: over all of them, over its steps, over windows.

Values are those of ``certainty.token_statistics`` or the like, one for each response token [n]. Scores here are no
probabilities unless it is said; higher is surer.
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
    """Statistics of n response tokens, each [n], in nats.

    Attributes:
        logprob: log p of the token itself.
        certainty: KL(uniform || p) of the distribution that it was drawn from, at least 0; higher is surer.
        entropy: Shannon entropy of that distribution, in [0, log V]; lower is surer.
    """

    logprob: Tensor
    certainty: Tensor
    entropy: Tensor


def self_certainty(logits: Array, *, mask: Array | None = None) -> Tensor:
    r"""Compute the self-certainty of responses in nats, at least 0; higher is surer.

    ``1/n sum_i KL(U || p_i) = -1/(n V) sum_i sum_v log(V p_iv)`` over the n tokens of a response, with ``p_i`` the
    distribution that token i was drawn from and U the uniform one over the V entries of the logits.

    Args:
        logits: Logits [..., n, V] at the positions that predict the response's tokens: the first is the one after the
            last prompt token. A token that is masked with -inf makes it infinite.
        mask: 1 at the tokens that count [..., n]; None counts all.

    Returns:
        One mean for each response [...]; nan where no token counts.

    Raises:
        ValueError: If the logits have no dimension of tokens, or the mask another shape.

    Example:
        >>> self_certainty(torch.zeros(3, 4))  # uniform
        tensor(0.)
        >>> p = torch.tensor([[0.125, 0.125, 0.25, 0.5]])  # log2 of 4 p: -1, -1, 0, 1, so KL = 1/4 log 2
        >>> self_certainty(p.log()).div(math.log(2.0)).round(decimals=5)
        tensor(0.2500)

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
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
    """Compute KL(uniform || p) in nats for each next-token distribution, at least 0; higher is surer.

    Args:
        logits: Logits [..., V].

    Returns:
        Divergences [...].

    Example:
        >>> token_certainty(torch.zeros(2, 4))
        tensor([0., 0.])
    """
    return _by_rows(logits, _certainty)


def token_entropy(logits: Array) -> Tensor:
    """Compute the Shannon entropy in nats of each next-token distribution, in [0, log V]; lower is surer.

    ``H = -sum_v p_v log p_v`` with ``p = softmax(logits)``, at temperature 1.

    Args:
        logits: Logits [..., V]; tokens may be masked with -inf.

    Returns:
        Entropies [...].

    Example:
        >>> token_entropy(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))  # log 2 and 0
        tensor([0.6931, 0.0000])
    """
    return _by_rows(logits, _entropy)


def top_k_confidence(logits: Array, k: int = 20) -> Tensor:
    """Compute the mean negative log-probability of the k likeliest tokens, in nats; higher is surer.

    ``-1/k sum_{j <= k} log p_(j)``: a sure model leaves little to the second and further tokens.

    Args:
        logits: Logits [..., V].
        k: How many tokens count, at most V.

    Returns:
        One value for each distribution [...].

    Raises:
        ValueError: If k does not lie between 1 and V.

    Example:
        >>> top_k_confidence(torch.tensor([0.5, 0.25, 0.25]).log(), 2).div(math.log(2.0))  # (1 + 2) / 2
        tensor(1.5000)

    Reference:
        Fu et al., Deep Think with Confidence, arXiv 2508.15260.
    """
    check_positive(k, "k")
    size = torch.as_tensor(logits).shape[-1:]
    if size and k > size[0]:
        raise InputError(f"Expected `k` to be at most the size of the vocabulary, {size[0]}, but got {k}.")
    return _by_rows(logits, lambda z, log_total: log_total - z.topk(k, dim=-1).values.mean(-1))


def token_statistics(logits: Tensor, token_ids: Tensor) -> TokenStatistics:
    """Compute log-probability, certainty and entropy of tokens in one pass over their logits.

    Args:
        logits: Logits [n, V] at the positions that predict the tokens, any float dtype.
        token_ids: The tokens [n], int64.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        >>> statistics = token_statistics(torch.zeros(1, 4), torch.tensor([2]))  # log 1/4 = -1.3863
        >>> [round(values.item(), 4) for values in statistics]
        [-1.3863, 0.0, 1.3863]
    """
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
    """Return the entropy [rows] of softmax(z) = log sum exp z - sum p z; a p of 0 takes no part, whatever its z."""
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
    """Yield ``rows`` [n, V] in pieces, wide and shifted to a maximum of 0, so that sums of large logits keep digits."""
    for chunk in rows.split(_rows_at_once(rows)):
        z = chunk if chunk.dtype == torch.float64 else chunk.float()
        yield z - z.amax(-1, keepdim=True)


def _rows_at_once(rows: Tensor) -> int:
    return max(1, _CHUNK_ELEMENTS // rows.shape[-1])


def response_certainty(logits: Tensor) -> Tensor:
    """Compute the mean cross-entropy of the uniform distribution against the model's, in nats, at least log V.

    ``-1/(n V) sum_i sum_v log p_iv``: self-certainty plus log V, as published for choosing among responses.

    Args:
        logits: Logits [..., n, V] at the positions that predict the response's tokens.

    Returns:
        One mean for each response [...]; nan where it has no token.

    Example:
        >>> response_certainty(torch.zeros(3, 4))  # log 4
        tensor(1.3863)
    """
    return self_certainty(logits) + math.log(logits.shape[-1])


def span_means(values: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the mean of the values over each range of tokens [S].

    Args:
        values: One for each token [n].
        spans: Ranges of tokens that are not empty, such as those of ``steps.token_spans``.

    Raises:
        ValueError: If the values are not [n], or a range is empty or reaches beyond them.

    Example:
        >>> span_means(torch.tensor([1.0, 3.0, 5.0]), [(0, 2), (2, 3)])
        tensor([2., 5.])
    """
    if values.dim() != 1:
        raise InputError(f"Expected `values` to have shape [n], but got {tuple(values.shape)}.")
    for start, end in spans:
        if not 0 <= start < end <= len(values):
            raise InputError(f"Expected `spans` to be ranges of the {len(values)} tokens, but got ({start}, {end}).")
    return torch.stack([values[start:end].mean() for start, end in spans]) if len(spans) else values.new_zeros(0)


def step_scores(metric: Tensor, logprob: Tensor, *, weight: float = 0.5) -> Tensor:
    """Mix a metric of each step with the geometric mean of its tokens' probabilities.

    ``metric^(1 - weight) * exp(logprob)^weight``

    Args:
        metric: Of each step, at least 0 [S].
        logprob: Mean log-probability of the tokens of each step, in nats [S].
        weight: Of the probability, in [0, 1].

    Returns:
        Scores [S]; ``steps.aggregate(scores, "mean")`` is the response's.

    Raises:
        ValueError: If the shapes differ, a metric is negative, or the weight is out of its range.

    Example:
        >>> step_scores(torch.tensor([4.0]), torch.tensor([0.25]).log())  # 2 * 1/2
        tensor([1.])
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
    """Compute the score of each step from its tokens' certainty: the metric is the mean of ``KL(U || p) + log V``.

    Args:
        tokens: Statistics of the response's tokens.
        spans: Tokens of each step.
        vocabulary_size: V, the width of the logits that they come from.
        weight: Of the probability of the tokens, in [0, 1].

    Returns:
        Scores [S], at least 0.

    Raises:
        ValueError: As ``span_means`` and ``step_scores``.

    Example:
        >>> tokens = TokenStatistics(torch.zeros(2), torch.zeros(2), torch.zeros(2))
        >>> step_certainty(tokens, [(0, 2)], vocabulary_size=4, weight=0.0)  # log 4
        tensor([1.3863])
    """
    metric = span_means(tokens.certainty, spans) + math.log(vocabulary_size)
    return step_scores(metric, span_means(tokens.logprob, spans), weight=weight)


def step_entropy(
    tokens: TokenStatistics, spans: Sequence[tuple[int, int]], *, vocabulary_size: int, weight: float = 0.5
) -> Tensor:
    """Compute the score of each step from its tokens' entropy: the metric is ``1 - mean H / log V``.

    Args:
        tokens: Statistics of the response's tokens.
        spans: Tokens of each step.
        vocabulary_size: V, the width of the logits that they come from.
        weight: Of the probability of the tokens, in [0, 1].

    Returns:
        Scores [S], in [0, 1].

    Raises:
        ValueError: As ``span_means`` and ``step_scores``.

    Example:
        >>> tokens = TokenStatistics(torch.zeros(2), torch.zeros(2), torch.tensor([0.0, math.log(4.0)]))
        >>> step_entropy(tokens, [(0, 2)], vocabulary_size=4, weight=0.0)
        tensor([0.5000])
    """
    metric = (1.0 - span_means(tokens.entropy, spans) / math.log(vocabulary_size)).clamp(0.0, 1.0)
    return step_scores(metric, span_means(tokens.logprob, spans), weight=weight)


def group_confidences(values: Tensor, *, window: int) -> Tensor:
    """Return the means of the values over all windows of ``window`` neighbouring tokens [max(n - window, 0) + 1].

    Args:
        values: Confidence of each token [n], such as ``certainty.top_k_confidence``.
        window: Tokens of a group; a shorter response is one group.

    Raises:
        ValueError: If the values are not [n] or the window is not positive.

    Example:
        >>> group_confidences(torch.tensor([1.0, 3.0, 5.0]), window=2)
        tensor([2., 4.])
    """
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
    """Compute the confidence of the least sure part of a response.

    Args:
        values: Confidence of each token [n], such as ``certainty.top_k_confidence``.
        window: Tokens of a group.
        share: Mean of which share of the groups, the lowest ones, in [0, 1]; at least one group is taken.

    Returns:
        The confidence; None of a response without tokens.

    Raises:
        ValueError: If the values are not [n] or a setting is out of its range.

    Example:
        >>> lowest_group_confidence(torch.tensor([8.0, 2.0, 4.0, 8.0]), window=2)  # 5, 3, 6
        3.0

    Reference:
        Fu et al., Deep Think with Confidence, arXiv 2508.15260.
    """
    if not 0.0 <= share <= 1.0:
        raise InputError(f"Expected `share` to lie in [0, 1], but got {share}.")
    groups = group_confidences(values, window=window)
    if not len(groups):
        return None
    taken = max(1, int(share * len(groups)))
    return groups.double().topk(taken, largest=False).values.mean().item()


def tail_confidence(values: Tensor, *, size: int = 2048) -> float | None:
    """Compute the mean confidence of the last tokens of a response; None without tokens.

    Args:
        values: Confidence of each token [n].
        size: How many of the last tokens count.

    Raises:
        ValueError: If the values are not [n] or the size is not positive.

    Example:
        >>> tail_confidence(torch.tensor([9.0, 1.0, 3.0]), size=2)
        2.0
    """
    check_positive(size, "size")
    if values.dim() != 1:
        raise InputError(f"Expected `values` to have shape [n], but got {tuple(values.shape)}.")
    return values[-size:].double().mean().item() if len(values) else None
