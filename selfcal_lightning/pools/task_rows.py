"""Responses that lie in a data set's own rows: the columns of the task, and a list of texts in ``responses``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.line_format import PoolLine, read_pool
from selfcal_lightning.runtime.json_files import line_error, read_json_lines
from selfcal_lightning.tasks.base import Task

# A pool made elsewhere that names no split.
UNNAMED = "test"


def read_foreign_pool(
    path: Path, *, task: str | None, split: str | None, tasks: Callable[[str], Task], default_split: str | None = None
) -> Iterator[tuple[int, PoolLine]]:
    """Yield (line number, line) of a pool in either form: lines of a pool, or rows of a data set with ``responses``.

    The second form is meant where ``task`` is given and the first line has no ``id``.

    Args:
        path: The pool.
        task: Task of all questions; None takes the field ``task`` of every line.
        split: Split of all questions; None takes the field ``split`` of every line.
        tasks: Returns the task of a name.
        default_split: Split of the questions whose line has no field ``split``; None requires it.

    Raises:
        ValueError: A line is not as described, or repeats an id, with file and line.
    """
    first = next((line for _, line in islice(read_json_lines(path), 1)), {})
    if task is not None and "id" not in first and "responses" in first:
        lines = _read_rows(path, tasks(task), split or default_split or UNNAMED)
    else:
        lines = read_pool(path, task=task, split=split, default_split=default_split)
    seen: dict[str, int] = {}
    for number, line in lines:
        if (earlier := seen.setdefault(line.question.id, number)) != number:
            raise line_error(path, number, "`id` to be unique", f"{line.question.id!r} again, from line {earlier}")
        yield number, line


def _read_rows(path: Path, task: Task, split: str) -> Iterator[tuple[int, PoolLine]]:
    """Let the task read its own columns, and pair its questions with the texts."""
    texts: list[list[dict[str, str]]] = []
    for number, line in read_json_lines(path):
        responses = line.get("responses")
        if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
            raise line_error(path, number, "`responses` to be a list of texts", repr(responses))
        texts.append([{"text": text} for text in responses])
    questions = task.load(split, path=str(path))
    if len(questions) != len(texts):
        raise InputError(
            f"Expected task {task.name!r} to make a question of each of the {len(texts)} rows of {path}, but got "
            f"{len(questions)}. Take out the rows that it warns of."
        )
    for number, (question, responses) in enumerate(zip(questions, texts, strict=True), start=1):
        yield number, PoolLine(question, split, responses)
