"""Fitted things as JSON files: one envelope with format, version and kind, checked when read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.features import required_confidences
from selfcal_lightning.confidence.registry import ESTIMATORS, TARGETS, KnownConfidence, pool_dependent
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_replaceable, json_object_or_none, parse_json, to_json, write_atomically
from selfcal_lightning.core.progress import say

FORMAT = "selfcal_lightning.fitted"
# 2: what is fitted says whether it needs the other responses, and thresholds say how many samples they were tested on.
VERSION = 2
THRESHOLD = "threshold"  # all other kinds are confidences
OLD_THRESHOLD = (
    " by `selfcal fit-threshold`: a threshold of version 1 does not say on how many samples it was tested, nor which "
    "files its confidence is computed by, so that nobody can hold what it promises"
)


def check_fitted_target(path: str | Path, kind: str, *, option: str = "output") -> None:
    """Raise ValueError unless ``path`` may be written: a threshold replaces a threshold, a confidence a confidence."""
    is_threshold = kind == THRESHOLD

    def is_own(file: Path) -> bool:
        record = json_object_or_none(file) or {}
        return record.get("format") == FORMAT and (record.get("kind") == THRESHOLD) == is_threshold

    named = "an earlier fitted threshold" if is_threshold else "an earlier fitted confidence"
    check_replaceable(path, is_own, option=option, kind=named)


def save_fitted(path: str | Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write ``content`` of ``kind`` to ``path``, which appears when it is complete; folders are made."""
    path = Path(path)
    check_fitted_target(path, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": VERSION, "kind": kind, **content}
    write_atomically(path, to_json(record))


def load_fitted(path: str | Path, kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return kind and content of a file that :func:`save_fitted` wrote."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a fitted confidence or threshold in {path}, but got no such file.")
    record = parse_json(path.read_bytes(), origin=str(path))
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise InputError(
            f"Expected {path} to have the format {FORMAT!r}, but got {found!r}. "
            "`selfcal fit-confidence` and `selfcal fit-threshold` write such files."
        )
    kind, version = record.get("kind"), record.get("version")
    is_old_threshold = kind == THRESHOLD and version == 1
    if version not in (1, VERSION) or is_old_threshold:
        why = OLD_THRESHOLD if is_old_threshold else ""
        raise InputError(f"Expected {path} to have version {VERSION}, but got {version!r}. Fit it again{why}.")
    if kind not in kinds:
        raise InputError(f"Expected {path} to hold one of {', '.join(kinds)}, but got {kind!r}.")
    return str(kind), record


def load_confidence(
    path: str | Path, kinds: Sequence[str], *, known: Sequence[KnownConfidence] = ()
) -> tuple[str, dict[str, Any]]:
    """Return kind and content of the file of a fitted confidence, as this version writes it."""
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
