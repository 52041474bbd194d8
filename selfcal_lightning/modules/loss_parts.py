"""A micro-batch's parts of the losses of its optimiser step."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from selfcal_lightning.functional.losses import (
    calibration_loss,
    group_ranking_loss,
    row_means,
    share_of_step,
    squared_calibration_loss,
)
from selfcal_lightning.modules.batch import SSCBatch

SMALLEST = 1e-6  # log-odds stay within +-13.8


def calibration_part(
    batch: SSCBatch,
    confidence: Tensor,
    *,
    loss: str,
    beta: float,
    ranking: float = 0.0,
    targets: Tensor | None = None,
) -> Tensor:
    """Return the part of the calibration loss, a scalar.

    Args:
        batch: The rows, with their targets and weights.
        confidence: P(True), [B].
        loss: "smooth_l1" or "squared".
        beta: Width of the quadratic part of SmoothL1.
        ranking: Weight of the order of the responses to one question, of those in this micro-batch.
        targets: Targets in the place of the batch's own, [B].
    """
    weight, wanted = batch.calibration_weight, batch.target if targets is None else targets
    target = torch.where(weight > 0, wanted, torch.zeros_like(wanted))  # 0 * nan would be nan
    per_row = squared_calibration_loss if loss == "squared" else partial(calibration_loss, beta=beta)
    values = per_row(confidence, target)
    if ranking > 0.0:
        # Rows without weight are ordered with nobody: among them are copies that fill a short step.
        alone = -1 - torch.arange(len(target), device=target.device)
        question = torch.where(weight > 0, batch.question_index, alone)
        values = values + ranking * group_ranking_loss(torch.logit(confidence, eps=SMALLEST), target, question)
    return share_of_step(values, weight, batch.calibration_total)


def generation_part(batch: SSCBatch, token_losses: Tensor) -> Tensor:
    """Return the part of the generation loss, a scalar, from the ``token_losses`` of the batch's labels, [N]."""
    nll = row_means(token_losses, batch.label_row, num_rows=batch.batch_size)
    return share_of_step(nll, batch.generation_weight, batch.generation_total)
