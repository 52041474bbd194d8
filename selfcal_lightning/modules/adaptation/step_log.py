"""What is logged of an optimiser step of test-time training: sums over its micro-batches and processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfcal_lightning.modules.adaptation.batch import PolicyBatch
from selfcal_lightning.modules.adaptation.losses import PolicyParts

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy


class PolicyStepLog:
    """Adds up the micro-batches of an optimiser step, and turns the sums into what is logged."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(
        self, batch: PolicyBatch, parts: PolicyParts, likelihood: Tensor, calibration: Tensor, p_true: Tensor
    ) -> None:
        """Add a micro-batch: its parts of the losses (scalars), and P(True) [B]."""
        calibrates = batch.calibration_weight > 0
        target = torch.where(calibrates, batch.target, torch.zeros_like(batch.target))
        values = (
            *parts, likelihood, calibration, (p_true * calibrates).sum(), target.sum(), calibrates.sum(),
            (batch.generation_weight > 0).sum(),
        )  # fmt: skip
        sums = torch.stack([value.detach().double() for value in values])
        self._sums = sums if self._sums is None else self._sums + sums

    def finish(self, strategy: Strategy, *, weights: dict[str, float], lr: float) -> dict[str, float]:
        """Return what the step is logged as, by its key, and begin the next. One small collective.

        Args:
            strategy: What adds up over processes.
            weights: Of the parts in the loss, by their name in the log.
            lr: Learning rate.
        """
        if self._sums is None:
            return {}
        names = ("PolicyGradient", "KL", "Entropy", "Clipped", "Likelihood", "Calibration")
        *parts, p_true, target, asked, learnt = strategy.reduce(self._sums, reduce_op="sum").tolist()
        self._sums = None
        losses = dict(zip(names, parts, strict=True))
        clipped = losses.pop("Clipped")
        return {
            **{f"train/loss/{name}": value for name, value in losses.items()},
            "train/loss/Total": sum(weights[name] * value for name, value in losses.items()),
            "train/Clipped": clipped,
            "train/Confidence": p_true / max(asked, 1.0),
            "train/Target": target / max(asked, 1.0),
            "train/ResponsesLearnt": learnt,
            "train/LearningRate": lr,
        }
