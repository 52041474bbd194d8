"""Writing rows, reward file and manifest of an export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from selfcal_lightning import __version__
from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.files import as_json_line, to_json, write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none
from selfcal_lightning.runtime.overwriting import check_apart, is_empty_folder
from selfcal_lightning.selection.files import Selection
from selfcal_lightning.selection.joining import examples
from selfcal_lightning.selection.key_steps.files import read_key_steps
from selfcal_lightning.selection.rl.formats import (
    Format,
    openrlhf_rows,
    reference_rows,
    trl_table,
    verl_sft_table,
    verl_table,
)
from selfcal_lightning.selection.rl.reward_file import reward_source
from selfcal_lightning.selection.rl.rows import ExportLabel, TrainingRow, counts_of_rows, training_rows
from selfcal_lightning.tasks.registry import get_task

MANIFEST_FILE, KIND, REWARD_FILE = "export.json", "rl_export", "reward.py"


@dataclass(frozen=True)
class RLExport:
    """What an export wrote.

    Attributes:
        path: Its folder.
        manifest: The content of ``export.json``.
    """

    path: Path
    manifest: dict[str, Any]


def check_export_target(output: str | Path, selection: Selection) -> None:
    """Raise InputError unless an export may be written to ``output``: new, empty, or an earlier export."""
    place = Path(output)
    check_apart(place, {"selection": selection.path, "store": selection.manifest["store"]["path"]}, option="output")
    own = json_object_or_none(place / MANIFEST_FILE) if (place / MANIFEST_FILE).is_file() else None
    if place.exists() and not (place.is_dir() and (is_empty_folder(place) or (own or {}).get("kind") == KIND)):
        raise InputError(
            f"Expected `output` to be a new folder or an earlier export, but got {output}, which is something else and "
            "is left as it is. Choose another name."
        )


def export_rl(
    selection: Selection,
    output: str | Path,
    *,
    format: Format,
    label: ExportLabel | None = None,
    reward_file: bool = True,
    store_dir: str | None = None,
) -> RLExport:
    """Write the kept questions of a selection for a trainer.

    Args:
        selection: The selection.
        output: Folder of the export.
        format: The trainer.
        label: What to label with; None takes the selection's label.
        reward_file: Whether to write the reward file; the reference system has none.
        store_dir: Folder of the store, where it was moved.

    Raises:
        InputError: The store is another one, or a task's reader cannot be written down.
    """
    check_export_target(output, selection)
    rows = training_rows(examples(selection, store_dir=store_dir), read_key_steps(selection), label=label)
    files = _rows_files(rows, format, selection)
    if reward_file and format != "reference":
        names = dict.fromkeys(row.row.task for row in rows)
        files[REWARD_FILE] = reward_source(get_task(name) for name in names).encode()
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _earlier_files(folder):
        (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        write_atomically(folder / name, data)
    settings = selection.manifest["settings"]
    manifest = {
        "kind": KIND,
        "version": __version__,
        "format": format,
        "label_kind": settings["label"] if label is None else label,
        "reads_reference": selection.reads_reference,
        "counts": dict(counts_of_rows(rows)),
        "selection_sha256": selection.sha256,
        "store": dict(selection.manifest["store"]),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(files.items())},
    }
    write_atomically(folder / MANIFEST_FILE, to_json(manifest))
    return RLExport(folder, manifest)


def _earlier_files(folder: Path) -> list[str]:
    """Return the files of an earlier export in a folder, its manifest first: another format has others."""
    file = folder / MANIFEST_FILE
    earlier = (json_object_or_none(file) or {}) if file.is_file() else {}
    return [MANIFEST_FILE, *(Path(name).name for name in earlier.get("files", ()))] if earlier else []


def _rows_files(rows: Sequence[TrainingRow], format: Format, selection: Selection) -> dict[str, bytes]:
    """Return the files of rows by name."""
    if format == "verl":
        table = verl_table(rows, selection_sha256=selection.sha256)
        return {"train.parquet": _parquet(table), "sft.parquet": _parquet(verl_sft_table(rows))}
    if format == "trl":
        return {"train.parquet": _parquet(trl_table(rows))}
    if format == "openrlhf":
        return {"train.jsonl": "".join(map(as_json_line, openrlhf_rows(rows))).encode()}
    return {"selected.json": (json.dumps(reference_rows(rows), indent=1, ensure_ascii=False) + "\n").encode()}


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()
