"""What is logged of an optimiser step: the time that validations take is not training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback
from support.module_batches import Planned, batch_of, module_of, quiet_trainer
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer


class Clock(Callback):
    """A clock that stands still, but for a second before a training batch and a thousand in a validation."""

    def __init__(self) -> None:
        self.now = 0.0
        self.validations = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1.0

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now += 1000.0
        self.validations += 1


@pytest.mark.parametrize("every", [None, 3, 4])
def test_a_validation_inside_a_step_does_not_change_the_speed(
    every: int | None, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches of a second each; validation comes after the third, after the fourth, or not at all."""
    chat = ChatFormat(load_tokenizer(tiny_model))
    data, clock = Planned(chat, 2), Clock()
    data.rows = data.rows[:8]
    data.val_dataloader = lambda: DataLoader([batch_of(data.rows[:2], chat)], batch_size=None)
    monkeypatch.setattr(
        "selfcal_lightning.training.self_calibration.time", SimpleNamespace(perf_counter=lambda: clock.now)
    )
    trainer = quiet_trainer(
        callbacks=[clock], accumulate_grad_batches=4, log_every_n_steps=1, num_sanity_val_steps=0,
        val_check_interval=every, limit_val_batches=0 if every is None else 1,
    )  # fmt: skip
    trainer.fit(module_of(tiny_model), datamodule=data)
    assert clock.validations == (every is not None)
    assert trainer.callback_metrics["train/speed/ResponsesPerSecond"].item() == pytest.approx(8 / 4)
