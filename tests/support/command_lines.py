"""What command lines ask for, without doing it."""

from __future__ import annotations

from typing import Any

import pytest

from selfcal_lightning.cli import parse_function, with_names

ON_CPU = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true")


def given_to(verb: str, arguments: list[str]) -> dict[str, Any]:
    """Return what a verb's function would be called with."""
    return parse_function(verb, with_names(verb, arguments))[1]


def instantiated(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the command line of a Trainer's verb with its model, data and trainer built, and nothing run."""
    from selfcal_lightning.commands.lightning_cli import SelfCalibrationCLI

    with monkeypatch.context() as patch:
        patch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
        return SelfCalibrationCLI(arguments)
