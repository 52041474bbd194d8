"""The files of the sample store: how a shard is encoded, read and checked.

A shard is a Parquet file of whole questions, one row a sample and one row group a question, so that a question is read
without its neighbours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

SCHEMA = pa.schema(
    [
        ("question_id", pa.string()),
        ("task", pa.string()),
        ("split", pa.string()),
        ("round", pa.int32()),
        ("index", pa.int32()),
        ("messages", pa.string()),
        ("question_text", pa.string()),
        ("reference", pa.string()),
        ("question_sha256", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("num_prompt_tokens", pa.int32()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("num_tokens", pa.int32()),
        ("finish", pa.string()),
        ("answer", pa.string()),
        ("correct", pa.bool_()),
        ("logprob", pa.float64()),
        ("yes_mass", pa.float64()),
        ("no_mass", pa.float64()),
        ("confidences", pa.string()),
    ]
)
# A confidence of this name in an imported store of format 1 is the length of a response without token ids.
LENGTH = "num_tokens"


def read_parquet(source: bytes | Path) -> pa.Table:
    """Return the table of a Parquet file, or of its content.

    ``pq.read_table`` would scan it as a data set with threads of Arrow's own. Where they end later than the interpreter
    the process aborts (apache/arrow#34314, #45017): 3 of 38 runs of `selfcal select` on busy cores, with status 134.
    """
    return pq.ParquetFile(source if isinstance(source, Path) else pa.BufferReader(source)).read(use_threads=False)


class StoreCorruptError(RunError):
    """A file of the store is missing, cut short or changed; the message names it and the way out."""


class StoreVersionError(StoreCorruptError):
    """A file of the store was written by a later version of this package; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One sample as it lies in the store, with its question."""

    question: Question
    sample: Sample
    split: str
    prompt_ids: tuple[int, ...] | None


def question_digest(question: Question) -> str:
    """Return 16 hexadecimal digits that change with the question's task, messages or reference."""
    key = [question.task, [asdict(message) for message in question.messages], question.reference]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def encode_question(group: QuestionSamples) -> pa.Table:
    """Return the rows of one question."""
    question, samples = group.question, group.samples
    if any(sample.prefix_tokens for sample in samples):
        raise InputError(
            f"Expected whole samples of question {question.id!r} for the store, but got some that continue a prefix, "
            "which its rows do not tell apart. Keep these elsewhere."
        )
    same = {
        "question_id": question.id,
        "task": question.task,
        "split": group.split,
        "messages": json.dumps([asdict(message) for message in question.messages], ensure_ascii=False),
        "question_text": question.text,
        "reference": question.reference,
        "question_sha256": question_digest(question),
        "prompt_ids": None if group.prompt_ids is None else list(group.prompt_ids),
        "num_prompt_tokens": None if group.prompt_ids is None else len(group.prompt_ids),
    }
    own = {
        "round": [sample.round for sample in samples],
        "index": [sample.index for sample in samples],
        "text": [sample.text for sample in samples],
        "token_ids": [sample.token_ids for sample in samples],
        "num_tokens": [sample.num_tokens for sample in samples],
        "finish": [sample.finish for sample in samples],
        "answer": [sample.answer for sample in samples],
        "correct": [sample.correct for sample in samples],
        "logprob": [sample.logprob for sample in samples],
        "yes_mass": [sample.yes_mass for sample in samples],
        "no_mass": [sample.no_mass for sample in samples],
        "confidences": [
            json.dumps(dict(sample.confidences), allow_nan=False) if sample.confidences else None for sample in samples
        ],
    }
    repeated = {name: [value] * len(samples) for name, value in same.items()}
    return pa.Table.from_pydict({**repeated, **own}, schema=SCHEMA)


def decode_rows(table: pa.Table) -> list[StoredRow]:
    """Return the rows of ``table`` as records; inverse of :func:`encode_question`."""
    rows: list[StoredRow] = []
    question: Question | None = None
    for row in table.to_pylist():
        if question is None or question.id != row["question_id"]:
            messages = tuple(Message(**message) for message in json.loads(row["messages"]))
            question = Question(row["question_id"], row["task"], messages, row["reference"], row["question_text"])
        confidences = {} if row["confidences"] is None else json.loads(row["confidences"])
        stated = confidences.pop(LENGTH, None)
        sample = Sample(
            question_id=question.id,
            index=row["index"],
            round=row["round"],
            text=row["text"],
            token_ids=None if row["token_ids"] is None else tuple(row["token_ids"]),
            finish=row["finish"],
            answer=row["answer"],
            correct=row["correct"],
            logprob=row["logprob"],
            yes_mass=row["yes_mass"],
            no_mass=row["no_mass"],
            confidences=confidences,
            num_tokens=int(stated) if row["num_tokens"] is None and stated is not None else row["num_tokens"],
        )
        prompt_ids = None if row["prompt_ids"] is None else tuple(row["prompt_ids"])
        rows.append(StoredRow(question, sample, row["split"], prompt_ids))
    return rows


def encode_shard(tables: Sequence[pa.Table], metadata: Mapping[str, str]) -> bytes:
    """Return a Parquet file with one row group for each of ``tables``."""
    sink = pa.BufferOutputStream()
    schema = SCHEMA.with_metadata({f"selfcal.{key}": value for key, value in metadata.items()})
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.replace_schema_metadata(schema.metadata))
    return sink.getvalue().to_pybytes()


def read_shard(path: Path, *, columns: Sequence[str] | None = None) -> pa.Table:
    """Return ``columns`` of the shard ``path``, or all. Raises StoreCorruptError when it cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns=None if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, "a readable Parquet file", f"{type(error).__name__}: {str(error).rstrip('.')}") from error


def check_shard(path: Path, *, size: int, sha256: str | None) -> None:
    """Hold a shard against what a manifest says of it. Raises StoreCorruptError, naming what was expected and found."""
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
    """Return the error for a damaged shard, with the way out."""
    return StoreCorruptError(
        f"Expected {path} to be {expected}, but got {found}. Start `selfcal generate` again with `--repair true`: the"
        " file is moved aside and its questions are sampled again; or restore the file from a copy."
    )


INDEX_COLUMNS = (
    "question_id",
    "task",
    "split",
    "index",
    "num_prompt_tokens",
    "num_tokens",
    "finish",
    "answer",
    "correct",
    "logprob",
    "yes_mass",
    "no_mass",
    "confidences",
)


@dataclass(frozen=True)
class SampleIndex:
    """R rows of one round, sorted by (question id, sample index).

    Columns of text hold Python strings that equal rows share, so that a row costs eight bytes a column.

    Attributes:
        question_id: Question of each row, object [R].
        question_index: Rank of the question among those of this index, int64 [R].
        task: Task of each row, object [R].
        split: Split of each row, object [R].
        sample_index: Position among the samples of the question, int64 [R].
        answer: Canonical answer, or None where unreadable, object [R].
        correct: 1 right, 0 wrong, nan unknown, float64 [R].
        yes_mass: Probability of Yes after the confidence query, nan where not asked, float64 [R].
        no_mass: The same for No.
        logprob: Log-probability of the response in nats, nan where unknown, float64 [R].
        num_prompt_tokens: Length of the prompt in tokens, -1 where unknown, int64 [R].
        num_tokens: Length of the response in tokens, -1 where unknown, int64 [R].
        finish: "stop", "length" or None where unknown, object [R].
        confidences: Further confidences by name, nan where a row has none, float64 [R] each.
        shard: Number of the row's file in ``files``, int32 [R].
        row: Row in that file, int32 [R].
        files: Shards, relative to the store's folder.
    """

    question_id: np.ndarray
    question_index: np.ndarray
    task: np.ndarray
    split: np.ndarray
    sample_index: np.ndarray
    answer: np.ndarray
    correct: np.ndarray
    yes_mass: np.ndarray
    no_mass: np.ndarray
    logprob: np.ndarray
    num_prompt_tokens: np.ndarray
    num_tokens: np.ndarray
    finish: np.ndarray
    confidences: Mapping[str, np.ndarray]
    shard: np.ndarray
    row: np.ndarray
    files: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def p_true(self) -> np.ndarray:
        """Normalised P(True) = Yes / (Yes + No), nan where it was not asked or has no mass, float64 [R]."""
        total = self.yes_mass + self.no_mass
        return np.divide(self.yes_mass, total, out=np.full(len(self), np.nan), where=total > 0.0)

    def num_missing(self, name: str) -> int:
        """Return how many rows have no confidence ``name``."""
        return int(np.isnan(self.confidences[name]).sum())

    def select(self, rows: np.ndarray) -> SampleIndex:
        """Return the rows named by a mask [R] or by row numbers, in that order; ``question_index`` keeps its values."""
        columns = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if field.name not in {"confidences", "files"}
        }
        return replace(self, **columns, confidences={name: values[rows] for name, values in self.confidences.items()})

    def locate(self, rows: Sequence[int] | np.ndarray) -> list[tuple[str, int]]:
        """Return where each of ``rows`` lies, as (file, row in it), for :meth:`SampleStore.read_rows`."""
        return [(self.files[self.shard[row]], int(self.row[row])) for row in rows]


def build_index(tables: Sequence[pa.Table], rows: Sequence[np.ndarray], files: Sequence[str]) -> SampleIndex:
    """Return the index over ``tables``."""
    schema_only = pa.table({name: pa.array([], pa.string()) for name in INDEX_COLUMNS})
    table = pa.concat_tables(tables) if tables else schema_only
    codes, names = _ranks(table["question_id"])
    sample_index = _integers(table["index"])
    order = np.lexsort((sample_index, codes))
    shard = np.repeat(np.arange(len(files), dtype=np.int32), [len(part) for part in rows])
    row = np.concatenate([np.empty(0, np.int32), *rows]).astype(np.int32)
    num_tokens, confidences = _integers(table["num_tokens"]), _confidences(table["confidences"])
    if (stated := confidences.pop(LENGTH, None)) is not None:
        num_tokens = np.where((num_tokens < 0) & ~np.isnan(stated), np.nan_to_num(stated), num_tokens).astype(np.int64)
    return SampleIndex(
        question_id=names[codes][order],
        question_index=codes[order],
        task=_shared(table["task"])[order],
        split=_shared(table["split"])[order],
        sample_index=sample_index[order],
        answer=_shared(table["answer"])[order],
        correct=_floats(table["correct"])[order],
        yes_mass=_floats(table["yes_mass"])[order],
        no_mass=_floats(table["no_mass"])[order],
        logprob=_floats(table["logprob"])[order],
        num_prompt_tokens=_integers(table["num_prompt_tokens"])[order],
        num_tokens=num_tokens[order],
        finish=_shared(table["finish"])[order],
        confidences={name: values[order] for name, values in confidences.items()},
        shard=shard[order],
        row=row[order],
        files=tuple(files),
    )


def _codes(column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
    """Return (position in the list of distinct values or -1 for null, that list)."""
    encoded = column.cast(pa.string()).combine_chunks().dictionary_encode()
    return encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _shared(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column of text as an object array whose equal entries are one string; null is None."""
    codes, values = _codes(column)
    return _objects([*values, None])[codes]


def _ranks(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return (rank of each row's value, the values in order)."""
    codes, values = _codes(column)
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = np.empty(len(values), np.int64)
    ranks[order] = np.arange(len(values))
    return ranks[codes], _objects([values[position] for position in order])


def _objects(values: Sequence[str | None]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.float64()).fill_null(float("nan")).to_numpy().astype(np.float64)


def _integers(column: pa.ChunkedArray) -> np.ndarray:
    return column.cast(pa.int64()).fill_null(-1).to_numpy().astype(np.int64)


def _confidences(column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Return one array for every name in a column of JSON objects."""
    columns: dict[str, np.ndarray] = {}
    start = 0
    for chunk in column.chunks:  # of a shard each, so that few of these texts are Python strings at a time
        for position, content in enumerate(chunk.to_pylist(), start=start):
            for name, value in json.loads(content).items() if content is not None else ():
                if name not in columns:
                    columns[name] = np.full(len(column), np.nan)
                columns[name][position] = value
        start += len(chunk)
    return dict(sorted(columns.items()))
