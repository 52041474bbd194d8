"""A run of two epochs with a round between them, to be killed: model and folder, --kill_after questions, --resume.

With --devices 2 it is the second process that is killed.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from jsonargparse import CLI
from lightning.pytorch.callbacks import ModelCheckpoint
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.data.store.parts import ShardWriter
from selfcal_lightning.models.folders import weights_sha256
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.export import write_export


def kill_itself_after(questions: int) -> None:
    """Make this process kill itself as soon as it has committed so many questions of round 1."""
    commit = ShardWriter.commit

    def counted(self: ShardWriter) -> None:
        commit(self)
        if self.record.round == 1 and len(self._sizes) >= questions:
            os.kill(os.getpid(), signal.SIGKILL)

    ShardWriter.commit = counted


def main(model: str, folder: Path, kill_after: int | None = None, resume: str | None = None, devices: int = 1) -> None:
    torch.set_num_threads(1)
    if kill_after is not None and int(os.environ.get("LOCAL_RANK", "0")) == devices - 1:
        kill_itself_after(kill_after)
    module = module_of(model, lora=LoraSettings(r=4, dropout=0.2, activated=False))
    settings: dict[str, Any] = {"max_new_tokens": 60, "questions_per_shard": 1, "shard_by_shard": True}
    checkpoints = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=2)
    changes = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "max_epochs": 2}
    changes |= {"enable_checkpointing": True, "limit_val_batches": 0, "reload_dataloaders_every_n_epochs": 1}
    trainer = trainer_with(generation(**settings), checkpoints, **changes)
    data = data_module(model, folder / "store", regenerate_every_n_epochs=1, total_tuples=12)
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    if trainer.is_global_zero:
        adapter = write_export(module, folder / "adapter")
        (folder / "result.json").write_text(json.dumps({"adapter": weights_sha256(str(adapter))}))


if __name__ == "__main__":
    CLI(main)
