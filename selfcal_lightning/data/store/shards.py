"""The files of the sample store: encoding, reading and checking shards, and the index over their columns.

A shard is a Parquet file of whole questions: one row per sample and one row group per question, so that a question is
read without its neighbours.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

SCHEMA = pa.schema([
    ("question_id", pa.string()), ("task", pa.string()), ("split", pa.string()), ("round", pa.int32()),
    ("index", pa.int32()), ("messages", pa.string()), ("question_text", pa.string()), ("reference", pa.string()),
    ("question_sha256", pa.string()), ("prompt_ids", pa.list_(pa.int32())), ("num_prompt_tokens", pa.int32()),
    ("text", pa.string()), ("token_ids", pa.list_(pa.int32())), ("num_tokens", pa.int32()), ("finish", pa.string()),
    ("answer", pa.string()), ("correct", pa.bool_()), ("logprob", pa.float64()), ("yes_mass", pa.float64()),
    ("no_mass", pa.float64()), ("confidences", pa.string()),
])  # fmt: skip
# Columns of a sample that are stored as they are.
OWN = (
    "round", "index", "text", "token_ids", "num_tokens", "finish", "answer", "correct", "logprob", "yes_mass",
    "no_mass",
)  # fmt: skip


def read_parquet(source: bytes | Path) -> pa.Table:
    """Return the table of a Parquet file, or of its content.

    ``pq.read_table`` would start threads of Arrow, and the process aborts if they outlive the interpreter
    (apache/arrow#34314, #45017): 3 of 38 runs of `selfcal select` on busy cores.
    """
    return pq.ParquetFile(source if isinstance(source, Path) else pa.BufferReader(source)).read(use_threads=False)


class StoreCorruptError(RunError):
    """A file of the store is missing, truncated or changed."""


class StoreVersionError(StoreCorruptError):
    """A file of the store was written by a later version of this package."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    question: Question
    sample: Sample
    split: str
    prompt_ids: tuple[int, ...] | None


def group_rows(rows: Sequence[StoredRow]) -> QuestionSamples:
    first = rows[0]
    return QuestionSamples(first.question, tuple(row.sample for row in rows), first.split, first.prompt_ids)


@lru_cache(maxsize=1 << 14)  # a verb asks several times about each question
def question_digest(question: Question) -> str:
    """Return 16 hexadecimal digits that change with the question's task, messages or reference."""
    messages = [{"role": message.role, "content": message.content} for message in question.messages]
    key = [question.task, messages, question.reference]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def encode_question(group: QuestionSamples) -> pa.Table:
    question, samples = group.question, group.samples
    if any(sample.prefix_tokens for sample in samples):
        raise InputError(f"Expected whole samples of question {question.id!r}, but got some that continue a prefix.")
    same = {
        "question_id": question.id, "task": question.task, "split": group.split, "question_text": question.text,
        "messages": json.dumps([asdict(message) for message in question.messages], ensure_ascii=False),
        "reference": question.reference, "question_sha256": question_digest(question),
        "prompt_ids": None if group.prompt_ids is None else list(group.prompt_ids),
        "num_prompt_tokens": None if group.prompt_ids is None else len(group.prompt_ids),
    }  # fmt: skip
    repeated = {name: [value] * len(samples) for name, value in same.items()}
    own = {name: [getattr(sample, name) for sample in samples] for name in OWN}
    further = [json.dumps(dict(one.confidences), allow_nan=False) if one.confidences else None for one in samples]
    return pa.Table.from_pydict({**repeated, **own, "confidences": further}, schema=SCHEMA)


def decode_rows(table: pa.Table) -> list[StoredRow]:
    """Return the rows of ``table`` as records; inverse of :func:`encode_question`."""
    rows: list[StoredRow] = []
    question: Question | None = None
    for row in table.to_pylist():
        if question is None or question.id != row["question_id"]:
            question = decode_question(row)
        own: dict[str, Any] = {name: row[name] for name in OWN}
        own["token_ids"], prompt_ids = _tuple(own["token_ids"]), _tuple(row["prompt_ids"])
        confidences = {} if row["confidences"] is None else json.loads(row["confidences"])
        sample = Sample(question_id=question.id, confidences=confidences, **own)
        rows.append(StoredRow(question, sample, row["split"], prompt_ids))
    return rows


def decode_question(row: Mapping[str, Any]) -> Question:
    messages = tuple(Message(**message) for message in json.loads(row["messages"]))
    return Question(row["question_id"], row["task"], messages, row["reference"], row["question_text"])


def _tuple(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def encode_shard(tables: Sequence[pa.Table], metadata: Mapping[str, str]) -> bytes:
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({f"selfcal.{key}": value for key, value in metadata.items()})
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(schema.metadata))
    return sink.getvalue().to_pybytes()


def parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def read_shard(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=None if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, "a readable Parquet file", f"{type(error).__name__}: {str(error).rstrip('.')}") from error


def fingerprint_of(metadata: Mapping[bytes, bytes] | None) -> str:
    return (metadata or {}).get(b"selfcal.fingerprint", b"none").decode()


def check_shard(path: Path, *, size: int, sha256: str | None) -> None:
    try:
        found_size = path.stat().st_size
    except FileNotFoundError as error:
        raise corrupt(path, f"a shard of {size:,} bytes", "no such file") from error
    if found_size != size:
        raise corrupt(path, f"{size:,} bytes long", f"{found_size:,} bytes")
    if sha256 is not None:
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise corrupt(path, f"the file with sha256 {sha256}", f"sha256 {found}")


def corrupt(path: Path, expected: str, found: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"Expected {path} to be {expected}, but got {found}. Start `selfcal generate` again with `--repair true`, "
        "which moves the file aside and samples its questions again, or restore it from a copy."
    )


INDEX_COLUMNS = (
    "question_id", "task", "split", "index", "num_prompt_tokens", "num_tokens", "finish", "answer", "correct",
    "logprob", "yes_mass", "no_mass", "confidences",
)  # fmt: skip


@dataclass(frozen=True)
class SampleIndex:
    """R rows of one round, sorted by (question id, sample index).

    Text columns are object arrays whose equal entries share one string; numbers are float64 with nan, or int64 with -1,
    for unknown values.
    """

    question_id: np.ndarray
    question_index: np.ndarray  # rank of the question among those of this index
    task: np.ndarray
    split: np.ndarray
    sample_index: np.ndarray  # position among the samples of the question
    answer: np.ndarray  # canonical, or None if unreadable
    correct: np.ndarray  # 1 right, 0 wrong
    yes_mass: np.ndarray  # probability of Yes after the confidence query
    no_mass: np.ndarray
    logprob: np.ndarray  # of the response, in nats
    num_prompt_tokens: np.ndarray
    num_tokens: np.ndarray
    finish: np.ndarray  # "stop", "length" or None
    confidences: Mapping[str, np.ndarray]  # further ones by name
    shard: np.ndarray  # number of the row's file in ``files``
    row: np.ndarray  # in that file
    files: tuple[str, ...]  # relative to the store's folder

    def __len__(self) -> int:
        return len(self.row)

    @property
    def edges(self) -> list[int]:
        """Row at which each question begins, and the number of rows."""
        return np.flatnonzero(np.diff(self.question_index, prepend=-1, append=-1)).tolist()

    @property
    def p_true(self) -> np.ndarray:
        """Normalised P(True) = Yes / (Yes + No), nan if it was not asked or has no mass, float64 [R]."""
        total = self.yes_mass + self.no_mass
        return np.divide(self.yes_mass, total, out=np.full(len(self), np.nan), where=total > 0.0)

    @property
    def labels(self) -> np.ndarray:
        """``correct``, where an unreadable response is wrong if another response to its question has a label, [R]."""
        unreadable = np.array([answer is None for answer in self.answer], dtype=bool)
        unknown, codes = np.isnan(self.correct), np.unique(self.question_index, return_inverse=True)[1]
        return np.where(unknown & unreadable & (np.bincount(codes, ~unknown)[codes] > 0), 0.0, self.correct)

    def num_missing(self, name: str) -> int:
        return int(np.isnan(self.confidences[name]).sum())

    def select(self, rows: np.ndarray) -> Self:
        """Return the rows named by a mask [R] or by row numbers, in that order; ``question_index`` keeps its values."""
        names = {field.name for field in fields(self)} - {"confidences", "files"}
        columns = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **columns, confidences={name: values[rows] for name, values in self.confidences.items()})

    def locate(self, rows: Sequence[int] | np.ndarray) -> list[tuple[str, int]]:
        """Return (file, row in it) of each of ``rows``, for :meth:`SampleStore.read_rows`."""
        return [(self.files[self.shard[row]], int(self.row[row])) for row in rows]


def build_index(tables: Sequence[pa.Table], rows: Sequence[np.ndarray], files: Sequence[str]) -> SampleIndex:
    schema_only = pa.table({name: pa.array([], pa.string()) for name in INDEX_COLUMNS})
    table = pa.concat_tables(tables) if tables else schema_only
    codes, ids = _codes(table["question_id"])
    names, ranks = np.unique(_objects(ids), return_inverse=True)
    codes = ranks[codes]
    sample_index = _numbers(table["index"], int)
    order = np.lexsort((sample_index, codes))
    shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in rows])
    row = np.concatenate([np.empty(0, np.int32), *rows]).astype(np.int32)
    texts = {name: _shared(table[name])[order] for name in ("task", "split", "answer", "finish")}
    numbers = {name: _numbers(table[name], float)[order] for name in ("correct", "yes_mass", "no_mass", "logprob")}
    lengths = {name: _numbers(table[name], int)[order] for name in ("num_prompt_tokens", "num_tokens")}
    confidences = {name: values[order] for name, values in _confidences(table["confidences"]).items()}
    return SampleIndex(
        question_id=names[codes][order], question_index=codes[order], sample_index=sample_index[order],
        confidences=confidences, shard=shard[order], row=row[order], files=tuple(files), **texts, **numbers, **lengths,
    )  # fmt: skip


def _codes(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """Return (position in the list of distinct values or -1 for null, that list)."""
    encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _shared(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column of text as an object array whose equal entries are one string; null is None."""
    codes, values = _codes(column)
    return _objects([*values, None])[codes]


def _objects(values: Sequence[str | None]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _numbers(column: pa.ChunkedArray, kind: type[int] | type[float]) -> np.ndarray:
    stored, unknown = (pa.float64(), math.nan) if kind is float else (pa.int64(), -1)
    return column.cast(stored).fill_null(unknown).to_numpy().astype(kind)


def _confidences(column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Return one array for every name in a column of JSON objects."""
    columns: dict[str, np.ndarray] = {}
    start = 0
    for chunk in column.chunks:  # one shard each, so that few texts are Python strings at a time
        for position, content in enumerate(chunk.to_pylist(), start=start):
            for name, value in json.loads(content).items() if content is not None else ():
                if name not in columns:
                    columns[name] = np.full(len(column), np.nan)
                columns[name][position] = value
        start += len(chunk)
    return dict(sorted(columns.items()))
