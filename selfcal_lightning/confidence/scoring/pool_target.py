"""Scores for a JSON-lines pool: they go into a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.scoring.targets import Entry, brings
from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.line_format import PoolLine, is_written_pool, judge_line
from selfcal_lightning.pools.task_rows import UNNAMED, read_foreign_pool
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.overwriting import check_replaceable
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.registry import get_task


class PoolTarget:
    """A JSON-lines pool; the scores go into a copy of it that appears when it is complete.

    Args:
        path: The pool.
        output: The copy, new, ``path`` itself, or a pool that was written before.
        task: Task of all questions; None takes the field ``task`` of every line.
        overwrite: Whether confidences that the responses bring under a name may be replaced.
        tasks: Returns the task of a name.

    Raises:
        ValueError: A line is not as described, an id occurs twice, there is no response, or something else lies in the
            place of the copy.
    """

    def __init__(
        self,
        path: Path,
        output: Path,
        *,
        task: str | None,
        overwrite: bool,
        tasks: Callable[[str], Task] = get_task,
    ) -> None:
        if not (output.exists() and output.samefile(path)):
            check_replaceable(output, is_written_pool, option="output", kind="a pool that was written before")
        self._output, self._overwrite, self._tasks = output, overwrite, tasks
        lines = read_foreign_pool(path, task=task, split=None, tasks=tasks, default_split=UNNAMED)
        self._lines: list[PoolLine] = [line for _, line in lines]
        self.num_responses = sum(len(line.responses) for line in self._lines)
        if not self.num_responses:
            raise InputError(f"Expected {path} to hold responses, but got none.")
        self._scores: dict[int, dict[str, float | None]] = {}

    def __enter__(self) -> PoolTarget:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            write_json_lines(self._output, self._contents())

    def num_left(self, names: Sequence[str]) -> int:
        """Return the number of responses, once for each name."""
        return self.num_responses * len(names)

    def entries(self, names: Sequence[str]) -> Iterator[Entry]:
        """Yield every question that has responses, judged by its task."""
        start = 0
        for line in self._lines:
            if line.responses:
                yield Entry(start, judge_line(line, self._tasks(line.question.task)))
            start += len(line.responses)

    def lacking(self, name: str, entry: Entry) -> list[int]:
        """Return the samples that do not bring the confidence ``name``; those that do lack it where it is replaced."""
        return [
            number
            for number, sample in enumerate(entry.samples.samples)
            if not brings(sample, name) and (self._overwrite or name not in sample.confidences)
        ]

    def put(self, name: str, positions: Sequence[int], values: Sequence[float | None]) -> None:
        """Keep scores in memory; an unknown one is left out of the copy."""
        for position, value in zip(positions, values, strict=True):
            self._scores.setdefault(position, {})[name] = value

    def _contents(self) -> Iterable[dict[str, Any]]:
        position = 0
        for line in self._lines:
            responses = []
            for response in line.responses:
                scores = self._scores.get(position, {})
                own = {name: value for name, value in response.get("confidence", {}).items() if name not in scores}
                confidence = own | {name: value for name, value in scores.items() if value is not None}
                changed = confidence or "confidence" in response
                responses.append({**response, "confidence": confidence} if changed else response)
                position += 1
            question = line.question
            yield {
                "id": question.id,
                "task": question.task,
                "split": line.split,
                "question": question.text,
                "messages": [asdict(message) for message in question.messages],
                "reference": question.reference,
                "responses": responses,
            }
