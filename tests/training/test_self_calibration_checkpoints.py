"""Checkpoints of the module: small, of one base model and one adapter only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.module_batches import (
    MIXED,
    NO_DROPOUT,
    batch_of,
    largest_difference,
    module_of,
    quiet_trainer,
    trained_state,
)
from support.other_models import changed_copy, plain_copy
from torch.utils.data import DataLoader

from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.training.self_calibration import SelfCalibrationModule


@pytest.fixture(scope="module")
def tiny_model(shallow_model: str) -> str:
    return shallow_model


def _checkpoint(tiny_model: str, chat: ChatFormat, tmp_path: Path, **settings: Any) -> tuple[Path, Any]:
    module = module_of(tiny_model, **settings)
    trainer = quiet_trainer(tmp_path)
    trainer.fit(module, DataLoader([batch_of(MIXED[:8], chat)], batch_size=None))
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    return path, module


def test_checkpoint_holds_only_the_adapter_and_comes_back(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    path, module = _checkpoint(tiny_model, chat, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint["state_dict"]) == set(trained_state(module))
    assert checkpoint["base_model_identity"]["model"] == tiny_model
    assert checkpoint["hyper_parameters"]["lora"]["r"] == 4
    loaded = SelfCalibrationModule.load_from_checkpoint(path)
    assert largest_difference(trained_state(loaded), trained_state(module)) == 0.0
    assert loaded.lora == NO_DROPOUT


def test_checkpoint_of_another_base_model_is_refused(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    path, _ = _checkpoint(tiny_model, chat, tmp_path)
    other = changed_copy(tiny_model, tmp_path / "other")
    with pytest.raises(ValueError, match=r"base model '.*/other'.*but got one of '.*" + Path(tiny_model).name):
        SelfCalibrationModule.load_from_checkpoint(path, base_model=other)
    same = plain_copy(tiny_model, tmp_path / "copy")
    SelfCalibrationModule.load_from_checkpoint(path, base_model=same)  # the same weights in another folder


def test_checkpoint_of_another_adapter_is_refused(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    path, _ = _checkpoint(tiny_model, chat, tmp_path)
    for lora in (replace(NO_DROPOUT, r=8), replace(NO_DROPOUT, target_modules=("q_proj",)), None):
        with pytest.raises(ValueError, match="parameters that are trained here"):
            SelfCalibrationModule.load_from_checkpoint(path, lora=lora)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"].popitem()
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match="absent in the checkpoint"):
        SelfCalibrationModule.load_from_checkpoint(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora": replace(NO_DROPOUT, alpha=64)}, r"`lora\.alpha` to be 8, as in the .*, but got 64\. Restore"),
        ({"lora": replace(NO_DROPOUT, dropout=0.5)}, r"`lora\.dropout` to be 0\.0"),
        ({"lr": 1e-4, "omega": 0.7}, r"`lr` to be 0\.01 and `omega` to be 0\.1, .* but got 0\.0001 and 0\.7\."),
        ({"seed": 1}, "`seed` to be 0, as in the run that is resumed, but got 1.*or start a new run without"),
    ],
)
def test_training_does_not_go_on_with_other_settings(
    tiny_model: str, chat: ChatFormat, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    path, _ = _checkpoint(tiny_model, chat, tmp_path)
    rows = DataLoader([batch_of(MIXED[:8], chat)], batch_size=None)
    with pytest.raises(ValueError, match=message):
        quiet_trainer(tmp_path, max_epochs=2).fit(module_of(tiny_model, **settings), rows, ckpt_path=path)
    if "alpha" in message:
        with pytest.raises(ValueError, match=message):
            quiet_trainer(tmp_path).validate(module_of(tiny_model, **settings), rows, ckpt_path=path)
    else:
        quiet_trainer(tmp_path).validate(module_of(tiny_model, **settings), rows, ckpt_path=path)


def test_training_goes_on_from_another_folder_with_activations_recomputed(
    tiny_model: str, chat: ChatFormat, tmp_path: Path
) -> None:
    path, _ = _checkpoint(tiny_model, chat, tmp_path)
    moved = plain_copy(tiny_model, tmp_path / "moved")
    module = module_of(moved, gradient_checkpointing=True, attn_implementation="eager")
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, DataLoader([batch_of(MIXED[:8], chat)], batch_size=None), ckpt_path=path)
    assert trainer.global_step == 2
