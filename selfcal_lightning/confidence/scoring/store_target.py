"""Scores for a sample store: they become annotations beside its rows, and a broken run goes on where it stopped."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.scoring.targets import Entry, brings
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import QuestionSamples, question_hash
from selfcal_lightning.store.annotations import Annotation
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore

COMMIT_SECONDS = 300.0


def select_rows(
    store: SampleStore, *, split: str | None, round: int, task: str | None, shard: tuple[int, int]
) -> SampleIndex:
    """Return the rows of a process's share.

    Args:
        store: The store.
        split: Split to score; None takes all.
        round: Generation round.
        task: Task to score; None takes all.
        shard: (i, n), this process's share of the questions.

    Raises:
        ValueError: There are none.
    """
    index = store.index(split=split, round=round)
    keep = np.ones(len(index), dtype=bool) if task is None else index.task == task
    if shard[1] > 1:
        names, codes = np.unique(index.question_id, return_inverse=True)
        mine = np.array([question_hash(name) % shard[1] == shard[0] for name in names], dtype=bool)
        keep &= mine[codes] if len(names) else keep
    if not keep.any():
        raise InputError(
            f"Expected {store.path} to hold joined samples of split {split!r}, round {round}, task {task!r} and "
            f"share {shard[0]}/{shard[1]}, but got none. Check the names, or finish `selfcal generate` first."
        )
    return index.select(keep)


def num_bringing(index: SampleIndex, name: str) -> int:
    """Return how many rows bring the confidence ``name`` in a column of their own."""
    mean_logprob = np.where(index.num_tokens > 0, index.logprob, np.nan)
    columns = {P_TRUE: index.p_true, LOGPROB: index.logprob, MEAN_LOGPROB: mean_logprob}
    return int(np.isfinite(columns[name]).sum()) if name in columns else 0


class StoreTarget:
    """Rows of a store; scores become annotations, shown every five minutes and at the end.

    What will compute each confidence is held against what computed those that are there.

    Args:
        store: The store.
        index: The rows, of :func:`select_rows`.
        origins: Origin of each confidence, by its name in the store.
        details: What is worth knowing about the run; recorded, not compared.
        overwrite: Whether values of another origin may be replaced.

    Raises:
        ValueError: A name exists with another origin, or the rows bring a confidence of that name themselves.
    """

    def __init__(
        self,
        store: SampleStore,
        index: SampleIndex,
        *,
        origins: Mapping[str, Mapping[str, Any]],
        details: Mapping[str, Any],
        overwrite: bool = False,
    ) -> None:
        self.store, self.index, self.num_responses = store, index, len(index)
        self._shards = store.manifest.shards
        self._origins, self._details, self._overwrite = origins, details, overwrite
        self._annotations = {name: Annotation(store.path, name) for name in origins}
        self._known = {name: self._scored(name) for name in origins}
        self._buffer: dict[str, dict[int, float | None]] = {}
        self._committed = time.monotonic()

    def _scored(self, name: str) -> np.ndarray:
        """Return which rows were scored in the same way before, bool [R]."""
        if name in self.index.confidences:
            raise InputError(
                f"Expected `name` to be new to the rows of {self.store.path}, but got {name!r}, which they bring with "
                "them. Choose another `name`."
            )
        annotation, origin = self._annotations[name], self._origins[name]
        annotation.check_origin(origin, overwrite=self._overwrite)
        record = annotation.record
        if record is None or record.origin != json.loads(json.dumps(origin)):
            return np.zeros(self.num_responses, dtype=bool)
        return annotation.scored(self.index, self._shards)

    def __enter__(self) -> StoreTarget:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.commit()

    def num_left(self, names: Sequence[str]) -> int:
        """Return how many scores are not there as annotations."""
        return sum(int((~self._known[name]).sum()) for name in names)

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        """Yield the questions that may lack one of ``names``, by id."""
        edges = np.flatnonzero(np.diff(self.index.question_index, prepend=-1, append=-1))
        for start, stop in pairwise(edges.tolist()):
            if all(self._known[name][start:stop].all() for name in names):
                continue
            rows = self.store.read_rows(self.index.locate(range(start, stop)))
            samples = tuple(row.sample for row in rows)
            yield Entry(start, QuestionSamples(rows[0].question, samples, rows[0].split, rows[0].prompt_ids))

    def lacking(self, name: str, entry: Entry) -> list[int]:
        """Return the samples that have no annotation ``name``, and no column of that name."""
        known = self._known[name][entry.start :]
        return [
            number
            for number, sample in enumerate(entry.samples.samples)
            if not known[number] and not brings(sample, name)
        ]

    def put(self, name: str, positions: Sequence[int], values: Sequence[float | None]) -> None:
        """Buffer scores, and show them to readers when the last time is five minutes ago."""
        self._buffer.setdefault(name, {}).update(zip(positions, values, strict=True))
        if time.monotonic() - self._committed > COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Write and publish what is buffered."""
        for name, scores in self._buffer.items():
            run, annotation = uuid.uuid4().hex[:12], self._annotations[name]
            rows = np.array(sorted(scores), dtype=np.int64)
            values = np.array([math.nan if scores[row] is None else scores[row] for row in rows.tolist()], dtype=float)
            annotation.write_part(run, "score", self.index.select(rows), values, self._shards)
            annotation.publish(
                run,
                ["score"],
                origin=self._origins[name],
                details={**self._details, "created": datetime.now(UTC).isoformat(timespec="seconds")},
                overwrite=self._overwrite,
            )
        self._buffer = {}
        self._committed = time.monotonic()
