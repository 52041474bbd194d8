"""A micro-batch's parts of the losses of its optimiser step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from selfcal_lightning.functional.losses import (
    calibration_loss,
    row_means,
    share_of_step,
    squared_calibration_loss,
)
from selfcal_lightning.modules.batch import SSCBatch


def calibration_part(batch: SSCBatch, confidence: Tensor, *, loss: str, beta: float) -> Tensor:
    """Return the part of the calibration loss, a scalar.

    Args:
        batch: The rows, with their targets and weights.
        confidence: P(True), [B].
        loss: "smooth_l1" or "squared".
        beta: Width of the quadratic part of SmoothL1.
    """
    weight = batch.calibration_weight
    target = torch.where(weight > 0, batch.target, torch.zeros_like(batch.target))  # 0 * nan would be nan
    per_row = squared_calibration_loss if loss == "squared" else partial(calibration_loss, beta=beta)
    return share_of_step(per_row(confidence, target), weight, batch.calibration_total)


def generation_part(batch: SSCBatch, token_losses: Tensor) -> Tensor:
    """Return the part of the generation loss, a scalar, from the ``token_losses`` of the batch's labels, [N]."""
    nll = row_means(token_losses, batch.label_row, num_rows=batch.batch_size)
    return share_of_step(nll, batch.generation_weight, batch.generation_total)
