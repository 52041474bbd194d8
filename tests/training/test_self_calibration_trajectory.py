"""One trajectory, however the module is run: micro-batches, processes, a stop in the middle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.module_batches import NO_DROPOUT, Planned, largest_difference, module_of, quiet_trainer, trained_state
from support.trainers import KeepState
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.training.batches import SSCBatch


@pytest.fixture(scope="module")
def tiny_model(shallow_model: str) -> str:
    return shallow_model


LR = 1e-3  # at ten times that the model is sure of everything after two steps, and its gradients are rounding


def fitted(tiny_model: str, chat: ChatFormat, micro_batch: int, path: Path, **settings: Any) -> dict[str, torch.Tensor]:
    module = module_of(tiny_model, lr=LR)
    accumulate = 8 // (micro_batch * settings.get("devices", 1))
    trainer = quiet_trainer(accumulate_grad_batches=accumulate, max_epochs=2, callbacks=[KeepState(path)], **settings)
    trainer.fit(module, datamodule=Planned(chat, micro_batch))
    kept = torch.load(path)
    assert kept["steps"] == 6
    return kept["state"]


@pytest.fixture(scope="module")
def one_batch_trajectory(
    tiny_model: str, chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    return fitted(tiny_model, chat, 8, tmp_path_factory.mktemp("trajectory") / "state.pt")


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_does_not_change_the_trajectory(
    tiny_model: str, chat: ChatFormat, one_batch_trajectory: dict[str, torch.Tensor], micro_batch: int, tmp_path: Path
) -> None:
    start = module_of(tiny_model)
    start.configure_model()
    assert largest_difference(one_batch_trajectory, trained_state(start)) > 1e-3
    accumulated = fitted(tiny_model, chat, micro_batch, tmp_path / "state.pt")
    assert largest_difference(accumulated, one_batch_trajectory) < 1e-5


def test_processes_do_not_change_the_trajectory(
    tiny_model: str, chat: ChatFormat, one_batch_trajectory: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    two = fitted(tiny_model, chat, 2, tmp_path / "state.pt", devices=2, strategy="ddp_fork")
    assert largest_difference(two, one_batch_trajectory) < 1e-5


def test_learning_rate_is_a_cosine_over_optimiser_steps(tiny_model: str, chat: ChatFormat) -> None:
    rates: list[float] = []

    class Record(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    trainer = quiet_trainer(accumulate_grad_batches=4, max_epochs=2, callbacks=[Record()])
    trainer.fit(module_of(tiny_model, lr=1.0, warmup_steps=1), datamodule=Planned(chat, 2))
    expected = [0.5, *(0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(5))]
    assert rates == pytest.approx(expected)


def test_a_warm_up_that_outlasts_training_is_warned_of(tiny_model: str, chat: ChatFormat) -> None:
    with pytest.warns(UserWarning, match="`warmup_steps` to be below the 3 optimiser steps, but got 3"):
        quiet_trainer().fit(module_of(tiny_model, warmup_steps=3), datamodule=Planned(chat, 8))


def test_endless_training_is_refused(tiny_model: str, chat: ChatFormat) -> None:
    with pytest.raises(ValueError, match="number of optimiser steps to be known"):
        quiet_trainer(max_epochs=-1).fit(module_of(tiny_model), datamodule=Planned(chat, 8))


class Resumable(Planned):
    """Starts where the trainer stands, as the project's data module does."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(_From(super().train_dataloader().dataset, self.trainer), batch_size=None)


class _From(torch.utils.data.IterableDataset):
    def __init__(self, batches: Sequence[SSCBatch], trainer: Trainer) -> None:
        self.batches, self.trainer = batches, trainer

    def __iter__(self) -> Any:
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        yield from self.batches[done:]

    def __len__(self) -> int:
        return len(self.batches)


def test_a_resumed_run_draws_the_same_dropout(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    lora = replace(NO_DROPOUT, dropout=0.3)

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 4 and not (tmp_path / "four.ckpt").exists():
                trainer.save_checkpoint(tmp_path / "four.ckpt")

    torch.manual_seed(1)
    whole = module_of(tiny_model, lora=lora)
    trainer = quiet_trainer(accumulate_grad_batches=2, max_epochs=2, callbacks=[Save()])
    trainer.fit(whole, datamodule=Resumable(chat, 4))
    torch.manual_seed(2)
    resumed = module_of(tiny_model, lora=lora)
    trainer = quiet_trainer(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(resumed, datamodule=Resumable(chat, 4), ckpt_path=tmp_path / "four.ckpt")
    assert trainer.global_step == 6
    assert largest_difference(trained_state(whole), trained_state(resumed)) == 0.0
