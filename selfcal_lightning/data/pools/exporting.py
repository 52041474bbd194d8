"""Samples of a store as a JSON-lines pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import check_replaceable, has_first_keys, write_json_lines
from selfcal_lightning.data.pools.importing import (
    GROUND_TRUTH,
    SAMPLED,
    SAMPLED_KEYS,
    TRUTH_KEYS,
    sampled_rows,
    truth_row,
)
from selfcal_lightning.data.pools.line_format import is_written_pool, pool_line
from selfcal_lightning.data.store.sample_store import SampleStore


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was written."""

    questions: int
    responses: int
    dropped: int = 0

    def __str__(self) -> str:
        left_out = f"; {self.dropped:,} unverified responses are left out" if self.dropped else ""
        return f"{self.responses:,} responses to {self.questions:,} questions{left_out}"


def export_pool(
    store_dir: str | Path,
    path: str | Path,
    *,
    split: str | None = None,
    round: int = 0,
    task: str | None = None,
    token_ids: bool = False,
    confidences: Sequence[str] = (),
) -> ExportReport:
    """Write joined samples of a store as a JSON-lines pool; :func:`import_pool` reads it back."""
    check_replaceable(path, is_written_pool, option="path", kind="a pool that was exported before")
    questions = responses = 0

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal questions, responses
        for rows in SampleStore(store_dir).rows(split=split, round=round, task=task, confidences=confidences):
            questions, responses = questions + 1, responses + len(rows)
            yield pool_line(rows, token_ids=token_ids)
        if not questions:
            raise InputError(
                f"Expected {store_dir} to hold joined samples of split {split!r}, round {round} and task {task!r}, "
                "but got none. Check the names, or finish `selfcal generate` first."
            )

    write_json_lines(Path(path), lines())
    return ExportReport(questions, responses)


def export_sampled(
    store_dir: str | Path, folder: str | Path, *, split: str | None = None, round: int = 0, task: str | None = None
) -> ExportReport:
    """Write joined samples of a store as `sampled.jsonl` and `ground_truth.jsonl`; an import reads them back."""
    place = Path(folder)
    for name, keys in ((SAMPLED, SAMPLED_KEYS), (GROUND_TRUTH, TRUTH_KEYS)):
        check_replaceable(
            place / name, partial(has_first_keys, keys), option="path", kind="an earlier file of its kind"
        )
    place.mkdir(parents=True, exist_ok=True)
    truths: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()

    def rows() -> Iterator[dict[str, Any]]:
        for group in SampleStore(store_dir).samples(split=split, round=round, task=task):
            written = list(sampled_rows(group)) if all(s.correct is not None for s in group.samples) else []
            counts.update(responses=len(written), dropped=len(group.samples) - len(written))
            if written:
                truths.append(truth_row(group))
            yield from written
        if not truths:
            raise InputError(
                f"Expected {store_dir} to hold verified samples of split {split!r}, round {round}, task {task!r}, but "
                f"got none, and {counts['dropped']:,} that are not verified. Name another split, or questions with "
                "reference answers."
            )

    write_json_lines(place / SAMPLED, rows())
    write_json_lines(place / GROUND_TRUTH, truths)
    return ExportReport(len(truths), counts["responses"], counts["dropped"])
