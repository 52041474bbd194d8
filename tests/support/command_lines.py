"""What command lines ask for, without doing it."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from selfcal_lightning.cli import parse_function, run, with_names
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.records import SamplingSettings

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


OF_SAMPLING = {field.name for field in fields(SamplingSettings)}
OF_ENGINE = {field.name for field in fields(EngineSettings)} - {"name"}


def nested(**options: Any) -> dict[str, Any]:
    """Return ``options`` with those of sampling and of the engine, whose name is "engine", in their records."""
    sampling = {name: options.pop(name) for name in OF_SAMPLING & options.keys()}
    engine = {name: options.pop(name) for name in OF_ENGINE & options.keys()}
    if "engine" in options:
        engine["name"] = options.pop("engine")
    records = {"sampling": SamplingSettings(**sampling)} if sampling else {}
    return options | records | ({"engine": EngineSettings(**engine)} if engine else {})
