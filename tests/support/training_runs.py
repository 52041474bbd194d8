from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.command_lines import nested
from support.module_batches import quiet_trainer
from torch.distributed.tensor import DTensor

from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.self_calibration import SelfCalibrationModule


def data_module(tiny_model: str, store: Path, **settings: Any) -> SSCDataModule:
    """Eight training and three validation questions with four samples each; four optimiser steps an epoch."""
    arguments: dict[str, Any] = {"num_samples": 4, "total_tuples": 16, "batch_size": 4, "max_length": 400}
    for split, limit in (("train", 8), ("validation", 3)):
        arguments[split] = [QuestionSource("word_problems", split=split, limit=limit)]
    return SSCDataModule(tiny_model, str(store), **{**arguments, **settings})


def generation(**settings: Any) -> SSCGeneration:
    return SSCGeneration(**nested(**{"max_new_tokens": 60, **settings}))


def module_of(tiny_model: str, **settings: Any) -> SelfCalibrationModule:
    """A small adapter that learns fast."""
    return SelfCalibrationModule(tiny_model, **{"lora": LoraSettings(r=4, activated=False), "lr": 1e-2, **settings})


def trainer_with(*callbacks: Callback, **settings: Any) -> Trainer:
    return quiet_trainer(**{"num_sanity_val_steps": 0, **settings}, callbacks=list(callbacks))


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
