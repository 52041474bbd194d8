"""Fitted confidences from files of this version and of the one before, as far as these say enough.

A file of version 1 does not say whether what it was fitted to depends on the other responses to a question, which
decides whether a strategy that reads it looks ahead. Of the confidences of this package, and of what other files add,
that is known. It knows its questions by their ids alone, too, so that nobody sees that it was fitted on one under
another id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.dependence import TARGETS, KnownConfidence, pool_dependent
from selfcal_lightning.confidence.estimators.registry import ESTIMATORS
from selfcal_lightning.confidence.fitting.features import required_confidences
from selfcal_lightning.confidence.fitting.files import load_fitted
from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.progress import say


def load_confidence(
    path: str | Path, kinds: Sequence[str], *, known: Sequence[KnownConfidence] = ()
) -> tuple[str, dict[str, Any]]:
    """Return kind and content of the file of a fitted confidence, as this version writes it.

    Args:
        path: The file.
        kinds: Kinds that the caller can read.
        known: Scorers that add what it may read.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It is no such file, or one of version 1 that reads what only its author can judge.
    """
    kind, content = load_fitted(path, kinds)
    if content["version"] != 1:
        return kind, content
    reads = content.get("features", [content.get("source")])  # a scaler has the one; who reads it sees what is missing
    names = required_confidences([name for name in reads if isinstance(name, str)])
    _check_known(path, names, known)
    say(f"{path} is of version 1: the questions that it was fitted on are known by their ids, not by their content.")
    fitted_on = {"content_hashes": [], **_mapping(content.get("fitted_on"))}
    needs_pool = bool(content.get("needs_pool")) or bool(pool_dependent(names, known))
    return kind, {**content, "needs_pool": needs_pool, "fitted_on": fitted_on}


def _check_known(path: str | Path, names: Sequence[str], known: Sequence[KnownConfidence]) -> None:
    judged = {*STORED, *ESTIMATORS, *(one.name for one in (*TARGETS, *known))}
    unknown = [name for name in names if name not in judged]
    if unknown:
        raise InputError(
            f"Expected {path}, of version 1, to read confidences of this package or of files before it, but got "
            f"{', '.join(unknown)}: that version does not say whether they depend on the other responses. Fit it again "
            "by `selfcal fit-confidence`."
        )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
