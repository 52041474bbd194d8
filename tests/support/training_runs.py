from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from support.module_batches import quiet_trainer
from support.options import nested

from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.models.lora import LoraSettings
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
