"""Samples of a store as a JSON-lines pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.line_format import is_written_pool, pool_line
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.overwriting import check_replaceable
from selfcal_lightning.store.sample_store import SampleStore


@dataclass(frozen=True, slots=True)
class ExportReport:
    """How many questions and responses were written."""

    questions: int
    responses: int


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
    """Write joined samples of a store as a JSON-lines pool; :func:`import_pool` reads it back.

    Args:
        store_dir: Folder of the store.
        path: The pool, new or of an earlier export; appears when it is complete.
        split: Split to write; None writes all.
        round: Generation round to write.
        task: Task to write; None writes all.
        token_ids: Whether ``tokens`` is the list of ids instead of their number.
        confidences: Annotations of the store that are written with the responses' own confidences.

    Raises:
        ValueError: There are no such samples, or something else lies in the place of the pool.
    """
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
