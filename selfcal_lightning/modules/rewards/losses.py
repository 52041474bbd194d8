"""The loss of a reward model with quantiles: cross-entropy of its mean, pinball of its quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selfcal_lightning.functional.losses import pinball_loss, row_means, share_of_step, soft_cross_entropy
from selfcal_lightning.functional.quantiles import monotone_quantiles
from selfcal_lightning.modules.rewards.batch import RewardBatch


class RewardLosses(NamedTuple):
    """A micro-batch's parts of the two losses of its optimiser step, scalars."""

    cross_entropy: Tensor
    pinball: Tensor


def reward_losses(raw: Tensor, batch: RewardBatch, levels: Sequence[float]) -> RewardLosses:
    """Return both parts.

    Every response weighs the same, however many steps it has: long wrong ones would else outweigh the others. The
    quantiles do not pull the mean, which keeps what the cross-entropy makes of it.

    Args:
        raw: The three outputs at every place, [M, 3]; see ``functional.monotone_quantiles``.
        batch: The places, with their targets and weights.
        levels: Levels of the lower and the upper quantile.
    """
    known = ~batch.place_target.isnan()
    raw, target, row = raw[known], batch.place_target[known], batch.place_row[known]
    mean, gaps = raw[:, :1], raw[:, 1:]
    quantiles = monotone_quantiles(torch.cat([mean.detach(), gaps], dim=1))
    pinball = pinball_loss(torch.stack([quantiles.low, quantiles.high], dim=1), target, levels).mean(1)
    parts = (soft_cross_entropy(mean.squeeze(1), target), pinball)
    means = (row_means(part, row, num_rows=batch.batch_size) for part in parts)
    return RewardLosses(*(share_of_step(values, batch.weight, batch.total) for values in means))
