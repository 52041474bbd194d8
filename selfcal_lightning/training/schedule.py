"""Learning-rate schedules over a known number of optimiser steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from selfcal_lightning.core.errors import InputError

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch.optim import Optimizer


def cosine_with_warmup(step: int, *, total: int, warmup: int) -> float:
    """Return the factor of the learning rate at an optimiser step, in [0, 1].

    Linear from ``1 / (warmup + 1)`` at step 0 to 1 at step ``warmup``, then half a cosine to 0 at ``total``.

    Example:
        >>> [cosine_with_warmup(step, total=4, warmup=0) for step in (0, 2, 4)]
        [1.0, 0.5, 0.0]
        >>> cosine_with_warmup(0, total=4, warmup=1)
        0.5
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear_with_warmup(step: int, *, total: int, warmup: int) -> float:
    """Return the factor of the learning rate at an optimiser step, in [0, 1].

    Linear from ``1 / (warmup + 1)`` at step 0 to 1 at step ``warmup``, then linear to 0 at ``total``.

    Example:
        >>> [linear_with_warmup(step, total=4, warmup=0) for step in (0, 1, 4)]
        [1.0, 0.75, 0.0]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 1.0 - min((step - warmup) / max(total - warmup, 1), 1.0)


def with_cosine(optimizer: Optimizer, trainer: Trainer, *, warmup_steps: int) -> OptimizerLRSchedulerConfig:
    """Return the optimiser with a warm-up and a cosine to zero over the optimiser steps of a training."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 1:
        raise InputError(
            f"Expected the number of optimiser steps to be known for the cosine, but got {total}. "
            "Set `trainer.max_epochs` or `trainer.max_steps`."
        )
    if warmup_steps >= total:
        rank_zero_warn(
            f"Expected `warmup_steps` to be below the {int(total):,} optimiser steps, but got "
            f"{warmup_steps:,}: the learning rate never reaches `lr`. Lower it, or train for longer."
        )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, total=int(total), warmup=warmup_steps)
    )
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
