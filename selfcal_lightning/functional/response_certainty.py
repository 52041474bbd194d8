"""One confidence of a response from values of its tokens: over all of them, over its steps, over windows.

Values are those of ``certainty.token_statistics`` or the like, one for each response token [n]. Scores here are no
probabilities unless it is said; higher is surer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.functional.certainty import TokenStatistics, self_certainty


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
