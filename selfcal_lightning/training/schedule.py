"""Learning-rate schedules over a known number of optimiser steps."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch.optim import Optimizer

from selfcal_lightning.core.errors import InputError


def cosine_with_warmup(step: int, *, total: int, warmup: int) -> float:
    """Return the learning-rate factor: linear up to 1 at step ``warmup``, then half a cosine to 0 at ``total``.

    Example:
        >>> [cosine_with_warmup(step, total=4, warmup=0) for step in (0, 2, 4)]
        [1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def with_cosine(optimizer: Optimizer, trainer: Trainer, *, warmup_steps: int) -> OptimizerLRSchedulerConfig:
    """Return the optimiser with a warm-up and a cosine to zero over all optimiser steps."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 1:
        raise InputError(f"Set `trainer.max_epochs` or `trainer.max_steps`: the cosine cannot span {total} steps.")
    if warmup_steps >= total:
        rank_zero_warn(
            f"`warmup_steps` {warmup_steps:,} is not below the {int(total):,} optimiser steps: `lr` is never reached."
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, total=int(total), warmup=warmup_steps)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
