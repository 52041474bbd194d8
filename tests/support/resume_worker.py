"""A training run to stop, kill and resume, as a process of its own: small, but with the real data, dropout and noise.

The same command is the first start and every later one: it continues from the newest checkpoint in its folder. What it
leaves there: ``rank-R.jsonl`` (a line for every micro-batch, over all starts), ``end-R.json`` (states at the end of
training) and ``adapter/``. Under torchrun it takes the processes that it finds; without, Lightning starts as many as
``WORLD_SIZE`` says.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from support.kill_worker import die_at
from support.training_runs import data_module, generation, module_of, strategy_of, trainer_with

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.callbacks.preemption import PreemptionCheckpoint
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.checkpoints import AtomicCheckpointIO, random_states

ROWS_PER_STEP, ACCUMULATE = 8, 2


def digest(value: Any) -> str:
    """Return a hash of tensors and plain values in dictionaries, lists, tuples and dataclasses, bit for bit."""
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype}{tuple(value.shape)}".encode() + value.detach().cpu().contiguous().numpy().tobytes()
    elif dataclasses.is_dataclass(value):
        text = digest({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}).encode()
    elif isinstance(value, dict):
        text = "".join(f"{name}:{digest(one)};" for name, one in value.items()).encode()
    elif isinstance(value, list | tuple):
        text = ",".join(digest(one) for one in value).encode()
    else:
        text = repr(value).encode()
    return hashlib.sha256(text).hexdigest()


class Trace(Callback):
    """Draws from every global generator at each micro-batch, and writes down what came, what was seen, and the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        draws = [random.random(), float(np.random.rand()), torch.rand(()).item()]
        line = {"step": trainer.global_step, "epoch": trainer.current_epoch, "batch": batch_idx}
        line |= {"rows": digest(batch), "draws": draws}
        with open(self.folder / f"rank-{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        loops, schedule = trainer.fit_loop.state_dict(), trainer.lr_scheduler_configs[0].scheduler.state_dict()
        end = {
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "counters": {name: loops[name] for name in loops if "val_loop" not in name},
            "optimizer": digest(trainer.strategy.optimizer_state(trainer.optimizers[0])),
            "scheduler": {name: value for name, value in schedule.items() if name != "lr_lambdas"},
            "random": digest(random_states(trainer.strategy.root_device)),
        }
        (self.folder / f"end-{trainer.global_rank}.json").write_text(json.dumps(end))


class Strike(Callback):
    """Sends a signal from inside the process of a rank, or from its parent, the launcher; on the first start only.

    ``place`` is "batch" (before micro-batch ``number``, counted over all epochs), "setup" (before the store is filled),
    "generation" or "disk" (before flush or rename ``number`` from there, or since training began; by SIGKILL).
    """

    def __init__(self, folder: Path, name: str, place: str, number: int, rank: int, parent: bool) -> None:
        self.mark, self.name, self.place, self.number = folder / f"struck-{rank}", name, place, number
        self.rank, self.parent = rank, parent

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        if self.place == "setup" and self._due(trainer):
            signal.raise_signal(signal.Signals[self.name])
        if self.place == "generation" and self._due(trainer):
            die_at(self.number)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.place == "disk" and self._due(trainer):
            die_at(self.number)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        seen = trainer.fit_loop.epoch_loop.batch_progress.total.ready - 1
        if self.place == "batch" and seen == self.number and self._due(trainer):
            os.kill(os.getppid() if self.parent else os.getpid(), signal.Signals[self.name])

    def _due(self, trainer: Trainer) -> bool:
        if trainer.global_rank != self.rank or self.mark.exists():
            return False
        self.mark.touch()
        return True


class Linger(Callback):
    """Lets the first process take its time over its end, longer than Lightning's launcher takes to look."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero:
            time.sleep(self.seconds)
            (self.folder / "lingered").touch()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--store", type=Path)
    for flag in ("parent", "activated"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = {"strategy": "auto", "strike": "", "place": "batch", "number": 0, "rank": 0}
    for name, default in {**options, "num-workers": 0, "checkpoint-every": 1, "linger": 0.0}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    folder = arguments.folder
    folder.mkdir(exist_ok=True)
    # Another seed where there is a checkpoint to continue from, so that a run which does not restore the states shows.
    seed = (1 if (folder / "checkpoints").exists() else 0) + 10 * int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    strike = (arguments.strike, arguments.place, arguments.number, arguments.rank, arguments.parent)
    callbacks: list[Callback] = [
        PreemptionCheckpoint(),
        *([Strike(folder, *strike)] if arguments.strike else []),
        generation(questions_per_shard=2, shard_by_shard=True),
        Trace(folder),
        *([Linger(folder, arguments.linger)] if arguments.linger else []),
        AdapterExport(str(folder / "adapter")),
        ModelCheckpoint(
            folder / "checkpoints", "{step}", every_n_train_steps=arguments.checkpoint_every, save_last=True
        ),
    ]
    changes = {"devices": processes, "strategy": strategy_of(arguments.strategy), "plugins": [AtomicCheckpointIO()]}
    changes |= {"max_epochs": 2, "accumulate_grad_batches": ACCUMULATE, "enable_checkpointing": True}
    trainer = trainer_with(*callbacks, **changes)
    rows = ROWS_PER_STEP // (processes * ACCUMULATE)
    sizes = {"total_tuples": 4 * ROWS_PER_STEP - 3, "batch_size": rows}  # the last step of an epoch is not full
    store = arguments.store or folder / "store"
    data = data_module(arguments.model, store, num_workers=arguments.num_workers, **sizes)
    module = module_of(arguments.model, lora=LoraSettings(r=4, dropout=0.2, activated=arguments.activated), lr=5e-3)
    trainer.fit(module, datamodule=data, ckpt_path="last")
    if torch.distributed.is_initialized():
        # Everything is written. The threads of gloo in torch 2.13 abort now and then a process that ends in the usual
        # way, whether the group was destroyed or not ("terminate called without an active exception").
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
