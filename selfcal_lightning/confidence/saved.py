"""Fitted things as JSON files: one envelope with format, version and kind, checked when read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.files import to_json, write_atomically

FORMAT = "selfcal_lightning.fitted"
VERSION = 1


def save_fitted(path: str | Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write ``content`` of ``kind`` to ``path``, which appears when it is complete; folders are made.

    Raises:
        ValueError: A number in it is infinite or nan.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"format": FORMAT, "version": VERSION, "kind": kind, **content}
    write_atomically(path, to_json(record))


def load_fitted(path: str | Path, kinds: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return kind and content of a file that :func:`save_fitted` wrote.

    Args:
        path: The file.
        kinds: Kinds that the caller can read.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no such JSON file, of another version, or of another kind.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a fitted confidence or threshold in {path}, but got no such file.")
    try:
        record = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"Expected {path} to be JSON, but got {error}.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f"Expected {path} to have the format {FORMAT!r}, but got {found!r}. "
            "`selfcal fit-confidence` and `selfcal fit-threshold` write such files."
        )
    if record.get("version") != VERSION:
        raise ValueError(f"Expected {path} to have version {VERSION}, but got {record.get('version')!r}. Fit it again.")
    kind = record.get("kind")
    if kind not in kinds:
        raise ValueError(f"Expected {path} to hold one of {', '.join(kinds)}, but got {kind!r}.")
    return str(kind), record
