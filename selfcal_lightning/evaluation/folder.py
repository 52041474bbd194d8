"""The folder of an evaluation: what it replaces there is its own, and its arguments lie beside its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.files import to_json, write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none

ARGUMENTS = "evaluation.json"
FORMAT = "selfcal_lightning.evaluation"
RESULTS = "results.json"
# Everything that an evaluation writes beside the samples, whose stores look after themselves.
WRITTEN = (
    ARGUMENTS, RESULTS, "results.csv", "results.md", "reliability.png", "votes.md", "votes.png", "strategies.md",
    "curves.csv", "accuracy_*.png", "risk_coverage_*.png", "reliability_*.png", "fitted", "paper",
)  # fmt: skip


def check_evaluation_folder(folder: Path) -> None:
    """Raise InputError where an evaluation would replace what is not of an earlier one.

    Args:
        folder: New, of an earlier evaluation, or with nothing in it that an evaluation would replace.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"Expected `output_dir` to be a folder, but got {folder}, which is a file.")
    taken = sorted({path.name for pattern in WRITTEN for path in folder.glob(pattern)})
    if taken and not is_evaluation(folder):
        raise InputError(
            f"Expected `output_dir` to be new, or to hold an earlier evaluation, but got {folder}, where "
            f"{', '.join(taken[:3])} would be replaced and is something else. Choose another folder."
        )


def open_evaluation_folder(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Make the folder of an evaluation, and leave its arguments there before anything else is written.

    So an evaluation that was stopped before its results is still known as one, and its files may be replaced.

    Args:
        folder: As :func:`check_evaluation_folder` demands.
        arguments: JSON-able.

    Raises:
        InputError: Something else has the name of a file that would be written.
    """
    check_evaluation_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": 1, "arguments": dict(arguments)}
    write_atomically(folder / ARGUMENTS, to_json(record))


def is_evaluation(folder: Path) -> bool:
    """Return whether an evaluation wrote into ``folder``; earlier versions left their arguments in the results only."""
    if (folder / ARGUMENTS).is_file():
        return (json_object_or_none(folder / ARGUMENTS) or {}).get("format") == FORMAT
    results = (json_object_or_none(folder / RESULTS) or {}) if (folder / RESULTS).is_file() else {}
    settings = results.get("settings")
    return isinstance(settings, dict) and {"output_dir", "num_reshuffles"} <= settings.keys()
