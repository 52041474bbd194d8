"""The files of the sample store: how a shard is encoded, read and checked.

A shard is a Parquet file of whole questions, one row a sample and one row group a question, so that a question is read
without its neighbours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from selfcal_lightning.errors import InputError, RunError
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


class StoreCorruptError(RunError):
    """A file of the store is missing, cut short or changed; the message names it and the way out."""


class StoreVersionError(StoreCorruptError):
    """A file of the store was written by a later version of this package; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One sample as it lies in the store, with its question.

    Attributes:
        question: The question that the sample answers.
        sample: The sample.
        split: The split that the question belongs to.
        prompt_ids: Token ids of the rendered prompt, or None for responses made elsewhere.
    """

    question: Question
    sample: Sample
    split: str
    prompt_ids: tuple[int, ...] | None


def question_digest(question: Question) -> str:
    """Return 16 hexadecimal digits that change with the question's task, messages or reference."""
    key = [question.task, [asdict(message) for message in question.messages], question.reference]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def encode_question(group: QuestionSamples) -> pa.Table:
    """Return the rows of one question.

    Raises:
        InputError: A sample continues a prefix, which a row does not say.
    """
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
    """Hold a shard against what a manifest says of it. Raises StoreCorruptError, naming what was expected and found.

    Args:
        path: The shard.
        size: Its size in bytes.
        sha256: Its hash; None leaves the content unread.
    """
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
