"""The columns of the store that fit in memory: everything about a sample but its text and its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from selfcal_lightning.store.shards import LENGTH

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
        no_mass: Likewise for No.
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
    """Return the index over ``tables``.

    Args:
        tables: Columns ``INDEX_COLUMNS`` of each shard, without the rows that are left out.
        rows: Row numbers in the shard's file that the rows of each table have.
        files: Name of each shard.
    """
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
