"""Losses of self-calibration. They take tensors, keep gradients, and compute in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that every PyTorch reader expects


def calibration_loss(confidence: Tensor, target: Tensor, *, beta: float = 0.25) -> Tensor:
    """Compute the SmoothL1 loss of each confidence against its target.

    ``0.5 d^2 / beta`` where ``|d| < beta``, else ``|d| - 0.5 beta``, with ``d = confidence - target``.

    Args:
        confidence: P(True) of each response [B], in [0, 1].
        target: Soft self-consistency of each response [B], in [0, 1].
        beta: Where the square turns into a line, above 0.

    Returns:
        One loss per example [B].

    Raises:
        ValueError: If the shapes differ or ``beta`` is not positive.

    Example:
        >>> calibration_loss(torch.tensor([0.5, 0.1]), torch.tensor([0.5, 0.85]))
        tensor([0.0000, 0.6250])

    Reference:
        arXiv 2503.00031, section 4.2.
    """
    if beta <= 0.0:
        raise ValueError(f"Expected `beta` to be above 0, but got {beta}.")
    first, second = _same_shape(confidence, target)
    return F.smooth_l1_loss(first, second, reduction="none", beta=beta)


def squared_calibration_loss(confidence: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error of each confidence against its target: the ablation of ``calibration_loss``.

    Args:
        confidence: P(True) of each response [B], in [0, 1].
        target: Soft self-consistency of each response [B], in [0, 1].

    Returns:
        One loss per example [B].

    Raises:
        ValueError: If the shapes differ.

    Example:
        >>> squared_calibration_loss(torch.tensor([0.5]), torch.tensor([1.0]))
        tensor([0.2500])
    """
    first, second = _same_shape(confidence, target)
    return F.mse_loss(first, second, reduction="none")


def share_of_step(values: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    """Return what some examples add to the weighted mean over a whole optimiser step.

    Args:
        values: One loss per example [B].
        weight: Their weights [B].
        total: Sum of the weights over the step, a scalar; where it is 0, so is the share.

    Returns:
        ``sum(weight * values) / total``, a scalar.

    Example:
        >>> share_of_step(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.0]), torch.tensor(2.0))
        tensor(0.5000)
    """
    return (weight * values).sum() / torch.where(total > 0, total, torch.ones_like(total))


def packed_negative_log_likelihood(logits: Tensor, token_ids: Tensor, row_index: Tensor, *, num_rows: int) -> Tensor:
    """Compute the mean negative log-likelihood per row from the logits of the needed positions only, in nats.

    Args:
        logits: Logits [n, V] of the n tokens that count, over all rows.
        token_ids: Those tokens [n].
        row_index: The row of each token [n], in [0, num_rows).
        num_rows: B.

    Returns:
        One mean per row [B]; 0 for a row without tokens, so that a row of zero weight adds no NaN.

    Example:
        >>> packed_negative_log_likelihood(torch.zeros(2, 4), torch.tensor([0, 3]), torch.tensor([1, 1]), num_rows=2)
        tensor([0.0000, 1.3863])
    """
    token_losses = F.cross_entropy(_wide(logits), token_ids, reduction="none")
    return mean_per_row(token_losses, row_index, num_rows=num_rows)


def mean_per_row(values: Tensor, row_index: Tensor, *, num_rows: int) -> Tensor:
    """Return the mean of the values of each row, [num_rows]; 0 for a row without values.

    Args:
        values: [n].
        row_index: The row of each value, int64 [n], in [0, num_rows).
        num_rows: Number of rows.

    Example:
        >>> mean_per_row(torch.tensor([1.0, 3.0]), torch.tensor([1, 1]), num_rows=2)
        tensor([0., 2.])
    """
    zeros = values.new_zeros(num_rows)
    sums = zeros.index_add(0, row_index, values)
    counts = zeros.index_add(0, row_index, torch.ones_like(values))
    return sums / counts.clamp(min=1.0)


def _wide(values: Tensor) -> Tensor:
    """Return ``values`` in float32, or float64 where they are."""
    return values if values.dtype == torch.float64 else values.float()


def _same_shape(confidence: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in their wider dtype, at least float32."""
    if confidence.shape != target.shape:
        raise ValueError(
            "Expected `confidence` and `target` to have the same shape, "
            f"but got {tuple(confidence.shape)} and {tuple(target.shape)}."
        )
    dtype = torch.promote_types(torch.promote_types(confidence.dtype, target.dtype), torch.float32)
    return confidence.to(dtype), target.to(dtype)
