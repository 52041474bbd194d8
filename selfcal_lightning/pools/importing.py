"""Responses made elsewhere, a JSON-lines pool of them, into a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.json_lines import count_lines, open_imported
from selfcal_lightning.pools.line_format import PoolLine, judge_line
from selfcal_lightning.pools.task_rows import read_foreign_pool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.json_files import line_error
from selfcal_lightning.runtime.progress import Progress, Stage, counted
from selfcal_lightning.store.sample_store import StoredQuestion
from selfcal_lightning.tasks.answers.math_processes import Undecided, say_undecided
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.registry import get_task


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did.

    Attributes:
        questions: Questions read.
        reused: Those of them that the store had from an earlier import of the same file.
        without_responses: Those without a response, of which nothing can be stored.
        responses: Responses stored now.
        extracted: Answers that were not given and were read out of the text.
        verified: Verdicts that were not given and were found by comparison with the reference.
        unreadable: Stored responses without an answer.
        truncated: Stored responses that the token limit cut; those that state no answer are unreadable.
        undecided: Pairs of expressions that could not be compared within the limits and count as different.
    """

    questions: int
    reused: int
    without_responses: int
    responses: int
    extracted: int
    verified: int
    unreadable: int
    truncated: int
    undecided: int


COUNTED = ("reused", "without_responses", "responses", "extracted", "verified", "unreadable", "truncated")


def import_pool(
    path: str | Path,
    store_dir: str | Path,
    *,
    task: str | None = None,
    split: str | None = None,
    tasks: Callable[[str], Task] = get_task,
    questions_per_shard: int = 256,
) -> ImportReport:
    """Read a JSON-lines pool of responses made elsewhere into a store of its own.

    A file of the task's own columns with a list of texts in ``responses`` is read too, where ``task`` is given. The
    whole file is checked before the first row is stored. Equal answers are named by the first seen of their class.

    Args:
        path: The pool.
        store_dir: Folder of the store. Importing the same file again completes it.
        task: Task of all questions; None takes the field ``task`` of every line.
        split: Split of all questions; None takes the field ``split`` of every line.
        tasks: Returns the task of a name.
        questions_per_shard: Questions in one file of the store.

    Raises:
        InputError: A line is not as described, with the file and the number of the line.
    """
    path, before = Path(path), Undecided.so_far()
    responses: dict[str, int] = {}
    with Progress(count_lines(path), label=f"Checking {path.name}", unit="lines", only_if_slow=True) as progress:
        for _, line in counted(read_foreign_pool(path, task=task, split=split, tasks=tasks), progress):
            responses[line.question.id] = len(line.responses)
            tasks(line.question.task)
    if not responses:
        raise InputError(f"Expected {path} to hold a question on every line, but got an empty file.")
    with Stage(f"Hashing {path.name}"):
        store = open_imported(store_dir, path, {"task": task})
    counts: Counter[str] = Counter()
    with store.writer("import", questions_per_shard=questions_per_shard) as writer:
        stored = store.stored_questions(include_parts=True)
        total = sum(count for name, count in responses.items() if name not in stored)
        with Progress(total, label=f"Importing {path.name}") as progress:
            for number, line in read_foreign_pool(path, task=task, split=split, tasks=tasks):
                if line.question.id in stored:
                    _check_split(path, number, line, stored[line.question.id])
                    counts["reused"] += 1
                elif not line.responses:
                    counts["without_responses"] += 1
                else:
                    judged = judge_line(line, tasks(line.question.task))
                    writer.append(judged)
                    counts += _counted(line, judged)
                    unreadable = sum(sample.answer is None for sample in judged.samples)
                    progress.update(len(judged.samples), unreadable=unreadable)
    with Stage(f"Joining {store.path.name}"):
        store.join()
    return ImportReport(
        questions=len(responses), undecided=say_undecided(before), **{name: counts[name] for name in COUNTED}
    )


def _check_split(path: Path, number: int, line: PoolLine, stored: StoredQuestion) -> None:
    if stored.split != line.split:
        raise line_error(path, number, f"split {stored.split!r} as stored", repr(line.split))


def _counted(line: PoolLine, judged: QuestionSamples) -> Counter[str]:
    """Return the counts of a question that is stored now."""
    unverified = sum("correct" not in response for response in line.responses)
    return Counter(
        responses=len(judged.samples),
        extracted=sum("answer" not in response for response in line.responses),
        verified=0 if line.question.reference is None else unverified,
        unreadable=sum(sample.answer is None for sample in judged.samples),
        truncated=sum(sample.finish == "length" for sample in judged.samples),
    )
