"""A micro-batch's parts of the losses of its optimiser step."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from selfcal_lightning.functional.losses import (
    calibration_loss,
    packed_negative_log_likelihood,
    share_of_step,
    squared_calibration_loss,
)
from selfcal_lightning.modules.batch import SSCBatch


class JointPositions(NamedTuple):
    """Where joint training needs logits, each position once: branches of one prompt ask its last one together.

    Attributes:
        positions: Positions in the flattened tokens, int64, [n].
        of_query: Which of them follow the query of each row, int64, [B].
        of_labels: Which of them predict each label that is asked for, int64, [M].
        asked: Which of the batch's labels these are, bool, [N].
    """

    positions: Tensor
    of_query: Tensor
    of_labels: Tensor
    asked: Tensor


def joint_positions(batch: SSCBatch, *, omega: float) -> JointPositions:
    """Return where the logits of both losses are; of the generation loss none where it has no weight."""
    asked = (omega * batch.generation_weight > 0)[batch.label_row]
    wanted = torch.cat((batch.query_position, batch.label_position[asked]))
    positions, place = torch.unique(wanted, return_inverse=True)
    return JointPositions(positions, place[: batch.batch_size], place[batch.batch_size :], asked)


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


def generation_part(batch: SSCBatch, logits: Tensor, at: JointPositions) -> Tensor:
    """Return the part of the generation loss, a scalar, from the ``logits`` at the positions, [n, V]."""
    ids, rows = batch.label_id[at.asked], batch.label_row[at.asked]
    nll = packed_negative_log_likelihood(logits[at.of_labels], ids, rows, num_rows=batch.batch_size)
    return share_of_step(nll, batch.generation_weight, batch.generation_total)
