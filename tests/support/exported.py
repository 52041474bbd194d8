from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.module_batches import NO_DROPOUT, quiet_trainer

from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.self_calibration import SelfCalibrationModule


def shaken(tiny_model: str, **settings: Any) -> SelfCalibrationModule:
    """A module as if it had been trained: the adapter, or all weights, moved at random."""
    arguments = {"lora": LoraSettings(r=4, activated=False), "torch_dtype": "float32", **settings}
    module = SelfCalibrationModule(tiny_model, **arguments)
    module.configure_model()
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator) * 0.02
    module.eval()
    return module


def activated(tiny_model: str, std: float) -> SelfCalibrationModule:
    """A module whose activated adapter says something else than the base model."""
    module = shaken(tiny_model, lora=replace(NO_DROPOUT, activated=True))
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=std, generator=generator)
    return module


def checkpoint(module: SelfCalibrationModule, path: Path) -> str:
    trainer = quiet_trainer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path, weights_only=True)
    return str(path)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
