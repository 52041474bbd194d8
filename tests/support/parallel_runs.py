"""Trainings over several processes: their strategies, and what is held against one another of them."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.tensor import DTensor

from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy


class Record(Callback):
    """The loss and the norm of the gradients, after they are clipped, of every optimiser step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.done = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count where a checkpoint ended."""
        self.done = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the step, where this micro-batch ended one."""
        if self.done < trainer.global_step:
            self.done = trainer.global_step
            self.losses.append(trainer.callback_metrics["train/loss/Total"].item())
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
            self.norms.append(torch.stack([g.float().norm() for g in whole]).norm().item())


def strategy_of(name: str) -> Any:
    """Return what a Trainer takes for "ddp", "fsdp2" or "groups", two processes to a share of the weights."""
    if name == "groups":
        return AdapterModelParallelStrategy(data_parallel_size=2)
    return AdapterModelParallelStrategy() if name == "fsdp2" else name
