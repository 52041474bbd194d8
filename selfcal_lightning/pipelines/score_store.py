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
from selfcal_lightning.pipelines.score_targets import Entry, brings
from selfcal_lightning.records import QuestionSamples, question_hash
from selfcal_lightning.store import SampleStore
from selfcal_lightning.store_annotations import Annotation

COMMIT_SECONDS = 300.0


class StoreTarget:
    """A split of a store; scores become annotations, shown every five minutes and at the end.

    Args:
        store: The store.
        split: Split to score; None takes all.
        round: Generation round.
        task: Task to score; None takes all.
        shard: (i, n), this process's share of the questions.
    """

    def __init__(
        self, store: SampleStore, *, split: str | None, round: int, task: str | None, shard: tuple[int, int]
    ) -> None:
        self.store = store
        self._shards = store.manifest["shards"]
        index = store.index(split=split, round=round)
        keep = np.ones(len(index), dtype=bool) if task is None else index.task == task
        if shard[1] > 1:
            names, codes = np.unique(index.question_id, return_inverse=True)
            mine = np.array([question_hash(name) % shard[1] == shard[0] for name in names], dtype=bool)
            keep &= mine[codes] if len(names) else keep
        if not keep.any():
            raise ValueError(
                f"Expected {store.path} to hold joined samples of split {split!r}, round {round}, task {task!r} and "
                f"share {shard[0]}/{shard[1]}, but got none. Check the names, or finish `selfcal generate` first."
            )
        self.index = index.select(keep)
        self.num_responses = len(self.index)
        self._annotations: dict[str, Annotation] = {}
        self._known: dict[str, np.ndarray] = {}
        self._origins: dict[str, Mapping[str, Any]] = {}
        self._details: Mapping[str, Any] = {}
        self._overwrite = False
        self._buffer: dict[str, dict[int, float | None]] = {}
        self._committed = time.monotonic()

    def open(
        self, origins: Mapping[str, Mapping[str, Any]], *, details: Mapping[str, Any], overwrite: bool = False
    ) -> None:
        """Hold what will compute each confidence against what computed those that are there.

        Args:
            origins: Origin of each confidence, by its name in the store.
            details: What is worth knowing about the run; recorded, not compared.
            overwrite: Whether values of another origin may be replaced.

        Raises:
            ValueError: A name exists with another origin, or the rows bring a confidence of that name themselves.
        """
        self._details, self._overwrite = details, overwrite
        for name, origin in origins.items():
            if name in self.index.confidences:
                raise ValueError(
                    f"Expected `name` to be new to the rows of {self.store.path}, but got {name!r}, which they bring "
                    "with them. Choose another `name`."
                )
            annotation = Annotation(self.store.path, name)
            annotation.check_origin(origin, overwrite=overwrite)
            record = annotation.record
            same = record is not None and record["origin"] == json.loads(json.dumps(origin))
            nothing = np.zeros(self.num_responses, dtype=bool)
            self._known[name] = annotation.scored(self.index, self._shards) if same else nothing
            self._annotations[name], self._origins[name] = annotation, origin

    def __enter__(self) -> StoreTarget:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.commit()

    def num_bringing(self, name: str) -> int:
        """Return how many responses bring the confidence ``name`` in a column of their own."""
        columns = {P_TRUE: self.index.p_true, LOGPROB: self.index.logprob, MEAN_LOGPROB: self.index.logprob}
        return int(np.isfinite(columns[name]).sum()) if name in columns else 0

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
