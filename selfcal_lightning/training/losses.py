"""Losses of confidences, rates and ranks. They take tensors, keep gradients, and compute in float32 or wider."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects

from selfcal_lightning.core.errors import InputError


def calibration_loss(confidence: Tensor, target: Tensor, *, beta: float = 0.25) -> Tensor:
    """Compute the SmoothL1 loss of each confidence against its target.

    ``0.5 d^2 / beta`` where ``|d| < beta``, else ``|d| - 0.5 beta``, with ``d = confidence - target``.

    Args:
        confidence: P(True) of each response [B], in [0, 1].
        target: Soft self-consistency of each response [B], in [0, 1].
        beta: Difference at which the square turns into a line.

    Returns:
        One loss per example [B].

    Example:
        >>> calibration_loss(torch.tensor([0.5, 0.1]), torch.tensor([0.5, 0.85]))
        tensor([0.0000, 0.6250])

    Reference:
        arXiv 2503.00031, section 4.2.
    """
    if beta <= 0.0:
        raise InputError(f"`beta` must be above 0, but got {beta}.")
    first, second = _same_shape(confidence, target)
    return F.smooth_l1_loss(first, second, reduction="none", beta=beta)


def squared_calibration_loss(confidence: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error of each confidence against its target [B]: the ablation of ``calibration_loss``.

    Example:
        >>> squared_calibration_loss(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor([0.2500])
    """
    first, second = _same_shape(confidence, target)
    return F.mse_loss(first, second, reduction="none")


def cross_entropy_calibration_loss(confidence: Tensor, target: Tensor) -> Tensor:
    """Compute the cross-entropy of each confidence against its target [B], in nats.

    Like the squared error, it is least where the confidence is the mean of the targets; but its gradient by log-odds,
    ``confidence - target``, does not vanish where a confidence is near 0 or 1 and wrong.

    Example:
        >>> cross_entropy_calibration_loss(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor([0.6931])
    """
    first, second = _same_shape(confidence, target)
    with torch.autocast(first.device.type, enabled=False):  # which refuses it, for the sake of half precision
        return F.binary_cross_entropy(first, second, reduction="none")


def soft_cross_entropy(logit: Tensor, rate: Tensor) -> Tensor:
    """Compute the cross-entropy of a predicted chance against an observed rate, in nats.

    ``-r log sigmoid(z) - (1 - r) log(1 - sigmoid(z))``: least where ``sigmoid(z)`` is the mean of the rates.

    Args:
        logit: z, the log-odds of the predicted chance [...].
        rate: r, the share of successes [...], in [0, 1].

    Example:
        >>> soft_cross_entropy(torch.tensor([0.0, 0.0]), torch.tensor([0.25, 1.0]))  # log 2 whatever the rate
        tensor([0.6931, 0.6931])
    """
    first, second = _same_shape(logit, rate, "logit", "rate")
    return F.binary_cross_entropy_with_logits(first, second, reduction="none")


def pinball_loss(quantile_scores: Tensor, target: Tensor, quantiles: Sequence[float]) -> Tensor:
    """Compute the pinball loss of predicted quantiles; its expectation is minimal at that quantile of the target.

    ``max((q - 1) u, q u)`` with ``u = target - score``.

    Args:
        quantile_scores: Predicted quantiles [..., Q].
        target: What they are quantiles of [...].
        quantiles: Their levels q, each in (0, 1).

    Returns:
        One loss per example and quantile [..., Q]; the weighted quantile loss is their mean.

    Example:
        >>> pinball_loss(torch.tensor([[0.2, 0.5, 0.8]]), torch.tensor([0.5]), [0.1, 0.5, 0.9])  # .1 * .3, 0, -.1 * -.3
        tensor([[0.0300, 0.0000, 0.0300]])

    Reference:
        Koenker and Bassett, Regression Quantiles, 1978; Park et al., arXiv 2506.09338.
    """
    if not all(0.0 < level < 1.0 for level in quantiles):
        raise InputError(f"`quantiles` must lie in (0, 1), but got {list(quantiles)}.")
    wanted = (*target.shape, len(quantiles))
    if quantile_scores.shape != wanted:
        raise InputError(f"`quantile_scores` must have shape {wanted}, but got {tuple(quantile_scores.shape)}.")
    scores, aim = _same_shape(quantile_scores, target[..., None].expand_as(quantile_scores))
    levels = torch.as_tensor(quantiles, dtype=scores.dtype, device=scores.device)
    below = aim - scores
    return torch.where(below < 0.0, (levels - 1.0) * below, levels * below)


def ranknet_loss(scores: Tensor, target: Tensor, *, temperature: float = 1.0, tie_weight: float = 0.0) -> Tensor:
    """Compute RankNet's logistic loss over pairs, with an optional term for ties.

    With ``d = (s_i - s_j) / tau`` it is the mean of ``softplus(-sign(t_i - t_j) d)`` over pairs whose targets differ,
    plus ``tie_weight`` times the mean of ``(softplus(d) + softplus(-d)) / 2 - log 2`` over pairs whose targets agree.

    Args:
        scores: s, any real numbers [B].
        target: t, the values that define the order [B].
        temperature: tau.
        tie_weight: Weight of the second mean.

    Returns:
        A scalar; 0, with a gradient of 0, if there is no pair to order.

    Example:
        >>> ranknet_loss(torch.tensor([0.0, 2.0]), torch.tensor([0.1, 0.9]))  # log(1 + e^-2)
        tensor(0.1269)

    Reference:
        Burges et al., Learning to Rank using Gradient Descent, 2005, section 3.
    """
    if temperature <= 0.0 or tie_weight < 0.0:
        got = f"{temperature} and {tie_weight}"
        raise InputError(f"`temperature` must be above 0 and `tie_weight` at least 0, but got {got}.")
    first, second = _same_shape(scores, target, "scores", "target")
    if first.dim() != 1:
        raise InputError(f"`scores` and `target` must have shape [B], but got {tuple(first.shape)}.")
    i, j = torch.triu_indices(len(first), len(first), offset=1, device=first.device)
    difference, order = (first[i] - first[j]) / temperature, torch.sign(second[i] - second[j])
    is_tie = order == 0.0
    ordered = F.softplus(-order * difference)
    tied = 0.5 * (F.softplus(difference) + F.softplus(-difference)) - math.log(2.0)
    loss = (ordered * ~is_tie).sum() / (~is_tie).sum().clamp(min=1)
    return loss + tie_weight * (tied * is_tie).sum() / is_tie.sum().clamp(min=1)


def group_ranking_loss(scores: Tensor, target: Tensor, group: Tensor) -> Tensor:
    """Compute each example's mean logistic pair loss within its group.

    ``mean over j of softplus(-sign(t_i - t_j) (s_i - s_j))`` over the group's examples j with another target.

    Args:
        scores: s, any real numbers [B].
        target: t, the values that define the order [B].
        group: The group of each example, such as its question [B].

    Returns:
        One loss per example [B]; 0 if its group has no other target.

    Example:
        >>> group_ranking_loss(torch.tensor([2.0, 0.0, 9.0]), torch.tensor([0.9, 0.1, 0.5]), torch.tensor([0, 0, 1]))
        tensor([0.1269, 0.1269, 0.0000])

    Reference:
        Burges et al., Learning to Rank using Gradient Descent, 2005, section 3.
    """
    first, second = _same_shape(scores, target, "scores", "target")
    if first.dim() != 1 or group.shape != first.shape:
        shapes = f"{tuple(first.shape)} and {tuple(group.shape)}"
        raise InputError(f"`scores`, `target` and `group` must have one shape [B], but got {shapes}.")
    order = torch.sign(second[:, None] - second[None]) * (group[:, None] == group[None])
    losses = F.softplus(-order * (first[:, None] - first[None])) * order.abs()
    return losses.sum(1) / order.abs().sum(1).clamp(min=1.0)


def share_of_step(values: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """Return ``sum(weight * values) / total``, with the total weight of an optimiser step; 0 if that is 0."""
    return (weight * values).sum() / torch.where(total > 0, total, torch.ones_like(total))


def row_means(values: Tensor, row_index: Tensor, *, num_rows: int) -> Tensor:
    """Return the mean of the values [n] of each row [num_rows]; 0 for a row without values.

    Example:
        >>> row_means(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0, 2, 2]), num_rows=3)
        tensor([1., 0., 4.])
    """
    zeros = values.new_zeros(num_rows)
    counts = zeros.index_add(0, row_index, torch.ones_like(values))
    return zeros.index_add(0, row_index, values) / counts.clamp(min=1.0)


def at_least_float32(values: Tensor) -> Tensor:
    """Return ``values`` in float32, unless they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def _same_shape(first: Tensor, second: Tensor, one: str = "confidence", other: str = "target") -> tuple[Tensor, Tensor]:
    """Return both tensors in their wider dtype, at least float32."""
    if first.shape != second.shape:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise InputError(f"`{one}` and `{other}` must have the same shape, but got {shapes}.")
    dtype = torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)
    return first.to(dtype), second.to(dtype)
