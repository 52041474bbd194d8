"""Responses made elsewhere, a JSON-lines pool of them, into a store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.json_lines import count_lines, open_imported
from selfcal_lightning.pools.line_format import PoolLine, judge_line
from selfcal_lightning.pools.sampled_files import read_sampled
from selfcal_lightning.pools.task_rows import read_foreign_pool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.json_files import line_error
from selfcal_lightning.runtime.progress import Progress, Stage, counted, say
from selfcal_lightning.store.sample_store import SampleStore, StoredQuestion
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
        dropped: Rows of `sampled.jsonl`, or records of prefixes, that were left out; a message says why.
        overruled: Its rows without an answer that were called right, and count as wrong.
        differing: Questions of which `ground_truth.jsonl` counts otherwise than the rows do.
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
    dropped: int = 0
    overruled: int = 0
    differing: int = 0


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
    lines = read_foreign_pool(path, task=task, split=split, tasks=tasks)
    counts = _store_lines(path, store, lines, responses, tasks=tasks, questions_per_shard=questions_per_shard)
    return ImportReport(
        questions=len(responses), undecided=say_undecided(before), **{name: counts[name] for name in COUNTED}
    )


def import_sampled(
    path: Path,
    store_dir: str | Path,
    *,
    task: str,
    split: str,
    stated: bool = True,
    tasks: Callable[[str], Task] = get_task,
    questions_per_shard: int = 256,
) -> ImportReport:
    """Read `sampled.jsonl`, with `ground_truth.jsonl` where it lies beside it, into a store of its own.

    Args:
        path: The file of responses.
        store_dir: Folder of the store. Importing the same file again completes it.
        task: Task of all questions.
        split: Split of all questions.
        stated: Whether answers and verdicts are those of the file; False reads and judges the texts anew.
        tasks: Returns the task of a name.
        questions_per_shard: Questions in one file of the store.

    Raises:
        InputError: A row is not as described, with the file and the number of the line.
    """
    before = Undecided.so_far()
    tasks(task)
    with Stage(f"Reading {path.name}"):
        pool = read_sampled(path, task=task, split=split, stated=stated)
    if not pool.lines:
        raise InputError(f"Expected {path} to hold responses to questions, but got none.")
    store = open_imported(store_dir, path, {"task": task, "stated": stated})
    sizes = {line.question.id: len(line.responses) for line in pool.lines}
    numbered = enumerate(pool.lines, start=1)
    counts = _store_lines(path, store, numbered, sizes, tasks=tasks, questions_per_shard=questions_per_shard)
    counts["without_responses"] = pool.without_responses
    if pool.dropped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in pool.dropped.most_common())
        say(f"Left out of {path}: {reasons}.")
    return ImportReport(
        questions=len(sizes), undecided=say_undecided(before), **{name: counts[name] for name in COUNTED},
        dropped=pool.dropped.total(), overruled=pool.overruled, differing=pool.differing,
    )  # fmt: skip


def _store_lines(
    path: Path,
    store: SampleStore,
    lines: Iterable[tuple[int, PoolLine]],
    responses: Mapping[str, int],
    *,
    tasks: Callable[[str], Task],
    questions_per_shard: int,
) -> Counter[str]:
    """Judge and store what the store lacks of ``lines``, and join it. Returns what is counted."""
    counts: Counter[str] = Counter()
    with store.writer("import", questions_per_shard=questions_per_shard) as writer:
        stored = store.stored_questions(include_parts=True)
        total = sum(count for name, count in responses.items() if name not in stored)
        with Progress(total, label=f"Importing {path.name}") as progress:
            for number, line in lines:
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
    return counts


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
