from pathlib import Path
from types import SimpleNamespace

from lightning.pytorch import Callback, Trainer
from support.module_batches import quiet_trainer

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
