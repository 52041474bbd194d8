"""A selection on disk: ``selection.parquet``, one row a question, and ``manifest.json``, which knows what was read.

Rows point into the store by question, round and sample; texts are joined when they are needed. The manifest holds the
digests of the store, of the scores, of the settings and of the rows, and says whether any gold answer was read.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from selfcal_lightning import __version__
from selfcal_lightning.confidence.base import split_hash
from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.files import write_atomically
from selfcal_lightning.runtime.json_files import json_object_or_none
from selfcal_lightning.runtime.overwriting import check_apart, is_empty_folder
from selfcal_lightning.selection.loading import Source, digest_of
from selfcal_lightning.selection.picking import Selected
from selfcal_lightning.selection.records import Label, SelectedRow
from selfcal_lightning.selection.settings import SelectionSettings
from selfcal_lightning.store.records import read_record, write_record
from selfcal_lightning.store.shards import StoreCorruptError

ROWS_FILE, MANIFEST_FILE, KIND = "selection.parquet", "manifest.json", "selection"
_SCORE = "score."
_FIELDS = (
    ("question_id", pa.string()),
    ("round", pa.int32()),
    ("index", pa.int32()),
    ("task", pa.string()),
    ("split", pa.string()),
    ("answer", pa.string()),
    ("label", pa.string()),
    ("label_kind", pa.string()),
    ("label_share", pa.float64()),
    ("ssc", pa.float64()),
    ("label_margin", pa.float64()),
    ("pick_score", pa.float64()),
    ("keep_score", pa.float64()),
    ("num_samples", pa.int32()),
    ("num_unreadable", pa.int32()),
    ("kept", pa.bool_()),
    ("reason", pa.string()),
    ("shard", pa.string()),
)


@dataclass(frozen=True)
class Selection:
    """A selection that was read from disk.

    Attributes:
        path: Its folder.
        rows: One a question, kept or not.
        manifest: What was read and how it was chosen.
    """

    path: Path
    rows: tuple[SelectedRow, ...]
    manifest: Mapping[str, Any]

    @property
    def kept(self) -> tuple[SelectedRow, ...]:
        """The rows that are training data."""
        return tuple(row for row in self.rows if row.kept)

    @property
    def sha256(self) -> str:
        """Digest of the rows."""
        return str(self.manifest["rows_sha256"])

    @property
    def reads_reference(self) -> bool:
        """Whether a gold answer was read."""
        return bool(self.manifest["reads_reference"])


def check_selection_target(output: str | Path, *, store_dir: str) -> None:
    """Raise InputError unless a selection may be written to ``output``: new, empty, or an earlier selection."""
    place = Path(output)
    check_apart(place, {"store": store_dir}, option="output")
    if place.is_dir() and not is_empty_folder(place) and not is_selection(place):
        raise InputError(
            f"Expected `output` to be a new folder or an earlier selection, but got {output}, which is something else "
            "and is left as it is. Choose another name."
        )
    if place.exists() and not place.is_dir():
        raise InputError(f"Expected `output` to be the name of a folder, but got the file {output}.")


def is_selection(folder: Path) -> bool:
    """Return whether a folder holds a selection."""
    file = folder / MANIFEST_FILE
    return file.is_file() and (json_object_or_none(file) or {}).get("kind") == KIND


def write_selection(output: str | Path, selected: Selected, source: Source, settings: SelectionSettings) -> Selection:
    """Write a selection and return what :func:`read_selection` gives of it."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    data = _parquet([_with_shard(row, source) for row in selected.rows])
    chosen = asdict(settings)
    manifest = {
        "kind": KIND,
        "version": __version__,
        "rows_sha256": hashlib.sha256(data).hexdigest(),
        "reads_reference": settings.references,
        "store": source.store,
        "scores": source.scores,
        "settings": chosen,
        "settings_sha256": digest_of(chosen),
        "fusion": None if selected.fusion is None else selected.fusion.as_json(),
        "threshold": {
            "value": selected.threshold,
            "chosen_on": {
                "split": source.store["split"],
                "questions_sha256": split_hash(row.question_id for row in selected.rows),
            },
        },
        "counts": counts_of(selected.rows),
    }
    # A manifest over other rows would be believed: the old one goes first, and a kill leaves no selection.
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    write_atomically(folder / ROWS_FILE, data)
    write_record(folder / MANIFEST_FILE, manifest)
    return read_selection(folder)


def counts_of(rows: Sequence[SelectedRow]) -> dict[str, Any]:
    """Return how many questions and responses there are, and what became of them."""
    return {
        "questions": len(rows),
        "kept": sum(row.kept for row in rows),
        "dropped": dict(sorted(Counter(row.reason for row in rows if row.reason is not None).items())),
        "responses": sum(row.num_samples for row in rows),
        "unreadable": sum(row.num_unreadable for row in rows),
        "without_label": sum(row.kept and row.label.text is None for row in rows),
    }


def read_selection(path: str | Path) -> Selection:
    """Read a selection.

    Raises:
        InputError: There is none, or its rows are not those that its manifest knows.
    """
    folder = Path(path)
    if not is_selection(folder):
        raise InputError(f"Expected {path} to be the folder of a selection, but got none. `selfcal select` makes one.")
    try:
        manifest = read_record(folder / MANIFEST_FILE, dict)
    except StoreCorruptError as error:
        raise InputError(
            f"Expected {folder / MANIFEST_FILE} to be as it was written, but it was changed or is damaged. Run "
            "`selfcal select` again."
        ) from error
    file = folder / ROWS_FILE
    data = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(data).hexdigest() != manifest["rows_sha256"]:
        raise InputError(
            f"Expected {file} to be the rows that its manifest knows, but got others. Run `selfcal select` again."
        )
    return Selection(folder, tuple(map(_from_json, pq.read_table(io.BytesIO(data)).to_pylist())), manifest)


def _with_shard(row: SelectedRow, source: Source) -> dict[str, Any]:
    label = row.label
    plain = asdict(row)
    scores = plain.pop("scores")
    return {
        **plain,
        "label": label.text,
        "label_kind": label.kind,
        "label_share": label.share,
        "ssc": label.confidence,
        "label_margin": label.margin,
        "shard": source.shards[row.question_id],
        **{f"{_SCORE}{name}": value for name, value in scores.items()},
    }


def _parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    scores = [(name, pa.float64()) for name in rows[0] if name.startswith(_SCORE)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=pa.schema([*_FIELDS, *scores])), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _from_json(row: Mapping[str, Any]) -> SelectedRow:
    label = Label(row["label_kind"], row["label"], row["label_share"], row["ssc"], row["label_margin"])
    own = {field.name for field in fields(SelectedRow)} - {"label", "scores"}
    scores = {name.removeprefix(_SCORE): value for name, value in row.items() if name.startswith(_SCORE)}
    return SelectedRow(**{name: value for name, value in row.items() if name in own}, label=label, scores=scores)
