"""What command lines ask for, without doing it."""

from collections.abc import Callable
from typing import Any

import pytest

from selfcal_lightning.cli import parse_function, run, with_names

Refused = Callable[[list[str]], str]  # the fixture `refused`
ON_CPU = ("--trainer.accelerator", "cpu", "--trainer.precision", "32-true")


def exit_status(arguments: list[str]) -> int:
    """Return the status of a command; its parser ends in an exit."""
    try:
        return run(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def given_to(verb: str, arguments: list[str]) -> dict[str, Any]:
    """Return what a verb's function would be called with."""
    return parse_function(verb, with_names(verb, arguments))[1]


def instantiated(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the command line of a Trainer's verb with its model, data and trainer built, and nothing run."""
    from selfcal_lightning.commands.lightning_cli import SelfCalibrationCLI

    with monkeypatch.context() as patch:
        patch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
        return SelfCalibrationCLI(arguments)
