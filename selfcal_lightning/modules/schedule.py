"""The learning rate of a training: a cosine over optimiser steps, whose number must be known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.schedules import cosine_with_warmup

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch.optim import Optimizer


def with_cosine(optimizer: Optimizer, trainer: Trainer, *, warmup_steps: int) -> OptimizerLRSchedulerConfig:
    """Return the optimiser with a warm-up and a cosine to zero over the optimiser steps of a training.

    Args:
        optimizer: The optimiser, at its peak learning rate.
        trainer: Who trains.
        warmup_steps: Optimiser steps of linear warm-up; a warning where these are all.

    Raises:
        InputError: The number of steps is not known.
    """
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
