"""What is logged of an optimiser step of a reward model: sums over its micro-batches and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfcal_lightning.modules.rewards.batch import RewardBatch
from selfcal_lightning.modules.rewards.losses import RewardLosses

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


class RewardStepLog:
    """Adds up the micro-batches of an optimiser step, and turns the sums into what is logged."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, batch: RewardBatch, losses: RewardLosses, mean: Tensor) -> None:
        """Add a micro-batch: its parts of both losses, and the mean at every place [M]."""
        known = ~batch.place_target.isnan()
        values = (*losses, mean[known].sum(), batch.place_target[known].sum(), known.sum())
        sums = torch.stack([value.detach().double() for value in values])
        self._sums = sums if self._sums is None else self._sums + sums

    def finish(self, strategy: Strategy, *, pinball: float, lr: float) -> dict[str, float]:
        """Return what the step is logged as, by its key, and begin the next. One small collective.

        Args:
            strategy: What adds up over processes.
            pinball: Weight of the quantiles in the loss.
            lr: Learning rate.
        """
        if self._sums is None:
            return {}
        entropy, quantiles, score, target, places = strategy.reduce(self._sums, reduce_op="sum").tolist()
        self._sums = None
        return {
            "train/loss/CrossEntropy": entropy,
            "train/loss/Pinball": quantiles,
            "train/loss/Total": entropy + pinball * quantiles,
            "train/Score": score / max(places, 1.0),
            "train/Target": target / max(places, 1.0),
            "train/LearningRate": lr,
        }
