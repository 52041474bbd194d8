"""What command lines ask for, without doing it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest

from selfcal_lightning.cli import FUNCTION_VERBS, run_function

ON_CPU = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true")


def given_to(verb: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a verb's function would be called with."""
    room, name, _ = FUNCTION_VERBS[verb]
    module = importlib.import_module(f"selfcal_lightning.commands.{room}")
    called: dict[str, Any] = {}

    @functools.wraps(getattr(module, name))
    def record(*args: Any, **kwargs: Any) -> None:
        called.update(kwargs, args=args)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, record)
        run_function(verb, arguments)
    return called


def instantiated(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the command line of a Trainer's verb with its model, data and trainer built, and nothing run."""
    from lightning.pytorch import LightningDataModule, LightningModule

    from selfcal_lightning.commands.lightning_cli import SelfCalibrationCLI

    with monkeypatch.context() as patch:
        patch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
        return SelfCalibrationCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            args=arguments,
        )
