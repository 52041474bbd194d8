"""Trainers as tests need them: what a check reads of one, and what one leaves in a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.module_batches import quiet_trainer, trained_state

from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy


def trainer_of(way: str, precision: str = "32-true") -> SimpleNamespace:
    """What the check reads of a Trainer; Lightning itself turns 16-mixed into bf16-mixed on a CPU."""
    strategies = {"one process": "auto", "DDP": "ddp", "FSDP2": AdapterModelParallelStrategy()}
    return SimpleNamespace(strategy=quiet_trainer(strategy=strategies[way]).strategy, precision=precision)


class SaveAt(Callback):
    """Writes ``<step>.ckpt`` after these optimiser steps, or after each, before a validation that is due there."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, set(steps or range(1, 1000))

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class KeepState(Callback):
    """Write what was trained to a file: with two processes the parent never sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            torch.save({"steps": trainer.global_step, "state": trained_state(pl_module)}, self.path)
