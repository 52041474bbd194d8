"""Values computed after sampling: named columns, stored apart from the append-only rows.

Layout, below the store's folder::

    annotations/<name>/annotation.json              what computed a confidence of responses, and the files readers see
    annotations/<name>/<run>-<part>.parquet         the values of one writer: question_id, index, round, shard, value
    question_annotations/<name>/question_values.json  one value per question, with what computed them
    verdicts/<name>/verdicts.json                   one verdict per graded text, of a verifying model

A run becomes visible in one step, when ``annotation.json`` is replaced. A value belongs to a row *of one shard* (by the
sha256 of the shard that the response was first written to), so a question that was sampled again has none until it is
scored again, and one whose answers were re-extracted keeps it.
"""

import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.data.store import manifest
from selfcal_lightning.data.store.parts import PartLock
from selfcal_lightning.data.store.shards import SampleIndex, StoreCorruptError, parquet_bytes, read_parquet
from selfcal_lightning.records import QuestionSamples

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
KEYS = ["question_id", "index", "round", "shard"]
ANNOTATION_SCHEMA = pa.schema([
    ("question_id", pa.string()), ("index", pa.int32()), ("round", pa.int32()), ("shard", pa.string()),
    ("value", pa.float64()),
])  # fmt: skip


@dataclass(frozen=True)
class KeyedValues:
    """Values with their origin. Keys start with a question's id and the digest of its content."""

    origin: Mapping[str, Any]
    values: Mapping[tuple[str, ...], Any]


Kept = TypeVar("Kept", manifest.AnnotationRecord, KeyedValues)


class NamedRecord(Generic[Kept]):
    """One named annotation of a store, with its origin. Opening it reads and writes nothing."""

    place: ClassVar[tuple[str, str]]  # the folder of all such annotations, and the file in that of one
    held_to: ClassVar[str]
    _from_json: Callable[[Mapping[str, Any]], Kept]

    def __init__(self, store_path: str | Path, name: str) -> None:
        if not NAME.fullmatch(name):
            raise InputError(f"Expected `name` to be letters, digits, dots, dashes or underscores, but got {name!r}.")
        self.name, self.path = name, Path(store_path, self.place[0], name, self.place[1])
        self.folder = self.path.parent

    @property
    def record(self) -> Kept | None:
        return manifest.read_record(self.path, self._from_json) if self.path.exists() else None

    def check_origin(self, origin: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Refuse an origin that differs from that of the stored values, unless they may be replaced."""
        record = self.record
        if record is None or overwrite:
            return
        if differences := manifest.origin_differences(record.origin, origin):
            kind, how = self.held_to.split(" ", 1)
            raise InputError(
                f"Expected the {kind} {self.name!r} in {self.folder} {how}, but got {'; '.join(differences)}. Set "
                "`overwrite` to replace them, or choose another `name`."
            )


class KeyedRecord(NamedRecord[KeyedValues]):
    """Values by key in one JSON file, where ``field`` lists them as [*key, value]."""

    field: ClassVar[str] = "values"

    def _from_json(self, content: Mapping[str, Any]) -> KeyedValues:
        return KeyedValues(content["origin"], {tuple(key): value for *key, value in content[self.field]})

    def known(self, origin: Mapping[str, Any]) -> dict[Any, Any]:
        """Return the stored values of this origin; none if they have another."""
        record = self.record
        return {} if record is None or manifest.origin_differences(record.origin, origin) else dict(record.values)

    def write(self, values: Mapping[Any, Any], *, origin: Mapping[str, Any], overwrite: bool = False) -> None:
        """Add values; stored ones of the same origin stay unless a new one has their key."""
        if strange := [key[0] for key, one in values.items() if isinstance(one, float) and not math.isfinite(one)]:
            raise InputError(f"Expected values to be finite or None, but got another for {strange[0]!r}.")
        plain = json.loads(json.dumps(dict(origin)))
        self.folder.mkdir(parents=True, exist_ok=True)
        with PartLock(self.folder):
            self.check_origin(origin, overwrite=overwrite)
            listed = [[*key, value] for key, value in {**self.known(plain), **values}.items()]
            manifest.write_record(self.path, {"origin": plain, self.field: listed})


class Annotation(NamedRecord[manifest.AnnotationRecord]):
    """One named confidence of the rows of a store. Opening it reads and writes nothing."""

    place = "annotations", "annotation.json"
    held_to = "confidences to have been computed in the same way"
    _from_json = manifest.AnnotationRecord.from_json

    def write_part(
        self, run: str, part: str, index: SampleIndex, values: np.ndarray, shards: Sequence[manifest.ShardEntry]
    ) -> None:
        """Write the values of one process; readers do not see them before :meth:`publish`."""
        if np.isinf(values).any() or len(values) != len(index):
            raise InputError(f"Expected {len(index)} finite values or nan, but got {len(values)}: {values}.")
        known = {entry.file: entry for entry in shards}
        origins, hashes = row_origins(index, shards)
        columns = {
            "question_id": index.question_id.tolist(),
            "index": index.sample_index,
            "round": np.array([known[file].round for file in index.files], dtype=np.int32)[index.shard],
            "shard": np.array(hashes, dtype=object)[origins].tolist(),
            "value": pa.array(values, pa.float64(), from_pandas=True),  # nan becomes null
        }
        written = parquet_bytes(pa.table(columns, schema=ANNOTATION_SCHEMA))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{run}-{part}.parquet", written)

    def publish(
        self, run: str, parts: list[str], *, origin: dict[str, Any], details: dict[str, Any], overwrite: bool = False
    ) -> int:
        """Show readers the parts of a run in one step, and return their rows. One process does this, once all wrote."""
        files = [f"{run}-{part}.parquet" for part in parts]
        if absent := [file for file in files if not (self.folder / file).exists()]:
            raise RunError(
                f"Expected {self.folder} to hold the parts of all {len(parts)} processes, but got none of {absent}. "
                "All processes must see one file system."
            )
        with PartLock(self.folder):
            self.check_origin(origin, overwrite=overwrite)
            record = self.record
            origin = json.loads(json.dumps(origin))
            earlier = () if record is None else record.parts
            fresh = [self._enter(file, details) for file in files]
            table = pa.concat_tables([self._read(entry) for entry in fresh])
            same = record is not None and record.origin == origin
            own = table.select(KEYS)
            kept = [e for e in earlier if same and self._read(e).join(own, keys=KEYS, join_type="left anti").num_rows]
            shown = {entry.file for entry in [*kept, *fresh]}
            total = pa.concat_tables([*(self._read(entry) for entry in kept), table]).group_by(KEYS).aggregate([])
            shown_now = manifest.AnnotationRecord(self.name, origin, total.num_rows, (*kept, *fresh))
            manifest.write_record(self.path, shown_now.as_json())
            for entry in earlier:
                if entry.file not in shown:
                    (self.folder / entry.file).unlink(missing_ok=True)
        return table.num_rows

    def annotate(self, index: SampleIndex, shards: Sequence[manifest.ShardEntry]) -> SampleIndex:
        """Return ``index`` with this confidence, nan for rows without one; their number is logged."""
        record = self.record
        if record is None:
            raise InputError(
                f"Expected `confidences` to name annotations of the store, but got {self.name!r}; it has "
                f"{annotation_names(self.folder.parent.parent)}. `selfcal score` and `selfcal predict` write them."
            )
        if self.name in index.confidences:
            raise InputError(f"Expected {self.name!r} to be an annotation only, but the rows have that confidence too.")
        values, _ = self._find(index, shards, record.parts)
        index = replace(index, confidences={**index.confidences, self.name: values})
        missing = index.num_missing(self.name)
        if missing:
            logger.warning("%d of %d responses in %s have no %r.", missing, len(index), self.folder, self.name)
        return index

    def scored(self, index: SampleIndex, shards: Sequence[manifest.ShardEntry]) -> np.ndarray:
        """Return which rows of ``index`` were scored, bool [R], including those whose value is unknown."""
        record = self.record
        return self._find(index, shards, () if record is None else record.parts)[1]

    def _find(
        self, index: SampleIndex, shards: Sequence[manifest.ShardEntry], parts: Sequence[manifest.AnnotationPart]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the value of each row, nan if unknown, float64 [R], and whether it was scored, bool [R]."""
        origins, hashes = row_origins(index, shards)
        digests = pa.array(hashes, pa.string())
        values, scored = np.full(len(index), np.nan), np.zeros(len(index), dtype=bool)
        names, codes = np.unique(index.question_id, return_inverse=True)
        stride = int(index.sample_index.max(initial=0)) + 1
        keys = codes * stride + index.sample_index
        for entry in parts if len(index) else ():
            table = self._read(entry)
            question = _positions(table["question_id"], pa.array(names.tolist(), pa.string()))
            shard = _positions(table["shard"], digests)
            sample = table["index"].to_numpy()
            key = np.where((question >= 0) & (sample < stride), question * stride + sample, -1)
            place = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            found = (keys[place] == key) & (origins[place] == shard)
            values[place[found]] = table["value"].to_numpy()[found]
            scored[place[found]] = True
        return values, scored

    def _enter(self, file: str, details: dict[str, Any]) -> manifest.AnnotationPart:
        data = (self.folder / file).read_bytes()
        rows = pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows
        return manifest.AnnotationPart(file, rows, len(data), hashlib.sha256(data).hexdigest(), details)

    def _read(self, entry: manifest.AnnotationPart) -> pa.Table:
        path = self.folder / entry.file
        data = path.read_bytes() if path.is_file() else b""
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry.sha256:
            absent = "something that is not a regular file" if path.exists() else "no such file"
            found = f"{len(data):,} bytes with sha256 {digest}" if path.is_file() else absent
            raise StoreCorruptError(
                f"Expected {path} to be {entry.bytes:,} bytes with sha256 {entry.sha256}, but got {found}. "
                f"Delete {self.folder} and run the `selfcal score` or `selfcal predict` that wrote it again."
            )
        return read_parquet(data).select(ANNOTATION_SCHEMA.names).cast(ANNOTATION_SCHEMA)


def annotation_names(store_path: str | Path) -> list[str]:
    return sorted(file.parent.name for file in Path(store_path).glob("annotations/*/annotation.json"))


def remove_annotation(store_path: Path, name: str) -> None:
    """Remove what is published under ``name``, the record first, so that files left by a kill are never read."""
    folder = Annotation(store_path, name).folder
    for file in (folder / "annotation.json", *folder.glob("*.parquet")):
        file.unlink(missing_ok=True)


def add_confidences(group: QuestionSamples, index: SampleIndex, start: int, names: Sequence[str]) -> QuestionSamples:
    """Return samples with the confidences ``names`` of ``index`` from row ``start`` on, without nan."""
    samples = []
    for position, sample in enumerate(group.samples, start):
        values = {name: float(index.confidences[name][position]) for name in names}
        known = {name: value for name, value in values.items() if value == value}
        samples.append(replace(sample, confidences={**sample.confidences, **known}))
    return replace(group, samples=tuple(samples))


def _positions(column: pa.ChunkedArray, values: pa.Array) -> np.ndarray:
    return pc.index_in(column, value_set=values).fill_null(-1).to_numpy().astype(np.int64)


def row_origins(index: SampleIndex, shards: Sequence[manifest.ShardEntry]) -> tuple[np.ndarray, list[str]]:
    """Return the shard that each row was first written to, as a number [R] in a list of hashes, and that list."""
    known = {entry.file: entry for entry in shards}
    entries = [known[file] for file in index.files]
    hashes = list(dict.fromkeys(sha for e in entries for sha in (e.origin, *(each[2] for each in e.continues))))
    number = {sha: place for place, sha in enumerate(hashes)}
    origins = np.array([number[entry.origin] for entry in entries], dtype=np.int64)[index.shard]
    if not any(entry.continues for entry in entries):
        return origins, hashes
    names, questions = np.unique(index.question_id, return_inverse=True)
    place_of = {name: place for place, name in enumerate(names.tolist())}
    order = np.argsort(questions, kind="stable")  # rows may come in any order, as those of `selfcal predict` do
    edges = np.searchsorted(questions[order], np.arange(len(names) + 1))
    # A later copy is longer: from the longest to the shortest, the first shard of a row is set last.
    for name, count, sha in sorted((each for e in entries for each in e.continues), key=lambda each: -each[1]):
        if name in place_of:
            place = place_of[name]
            rows = order[edges[place] : edges[place + 1]]
            origins[rows[index.sample_index[rows] < count]] = number[sha]
    return origins, hashes


Key = tuple[str, str]  # id of a question, digest of its content


class QuestionAnnotation(KeyedRecord):
    """One named value of the questions of a store, by (question id, digest of its content)."""

    place = "question_annotations", "question_values.json"
    held_to = "values to have been computed in the same way"


def question_annotation_names(store_path: str | Path) -> list[str]:
    return sorted(file.parent.name for file in Path(store_path).glob("question_annotations/*/question_values.json"))


def question_values(store_path: str | Path, name: str, keys: Sequence[Key]) -> list[float | None]:
    """Return the values of questions, in their order; None for a question without one."""
    record = QuestionAnnotation(store_path, name).record
    if record is None:
        known = question_annotation_names(store_path)
        raise InputError(
            f"Expected {name!r} to be a value of the questions in {store_path}, but got {known or 'none at all'}. "
            "`selfcal score-questions` writes them."
        )
    return [record.values.get(key) for key in keys]
