"""Samples from and for elsewhere: JSON-lines pools in both directions, and published training records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.dependence import check_name_tells, recorded_confidences
from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.json_lines import count_lines, open_imported
from selfcal_lightning.pools.line_format import PoolLine, is_written_pool, judge_line, pool_line
from selfcal_lightning.pools.published_records import RecordsReport, import_training_records
from selfcal_lightning.pools.recorded import annotation_estimators
from selfcal_lightning.pools.task_rows import read_foreign_pool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.json_files import line_error
from selfcal_lightning.runtime.overwriting import check_replaceable
from selfcal_lightning.runtime.progress import Progress, Stage, counted, say
from selfcal_lightning.store.sample_store import SampleStore, StoredQuestion
from selfcal_lightning.tasks.answers.math_processes import Undecided, allow_undecided, say_undecided
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


@dataclass(frozen=True, slots=True)
class ExportReport:
    """How many questions and responses were written."""

    questions: int
    responses: int


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


def run_import_pool(
    path: str, store_dir: str, task: str | None = None, split: str | None = None, undecided_seconds: float = 120.0
) -> ImportReport:
    """Read a JSON-lines pool of responses made elsewhere into a store.

    Args:
        path: The pool, one question a line; or rows of the task's data set with a list of texts in "responses".
        store_dir: Folder of the store.
        task: Task of all questions; null takes the field "task" of every line.
        split: Split of all questions; null takes the field "split" of every line.
        undecided_seconds: Time that pairs of expressions may take together which cannot be decided. Pairs that come
            after it has been spent count as different without a try, and are counted.
    """
    allow_undecided(undecided_seconds)
    report = import_pool(path, store_dir, task=task, split=split)
    say(f"Imported {path} to {store_dir}: {report}")
    return report


def run_export_pool(
    store_dir: str,
    path: str,
    split: str | None = None,
    round: int = 0,
    task: str | None = None,
    token_ids: bool = False,
    confidences: list[str] | None = None,
) -> ExportReport:
    """Write the samples of a store as a JSON-lines pool.

    Args:
        store_dir: Folder of the store.
        path: The pool, new or of an earlier export.
        split: Split to write; null writes all.
        round: Generation round to write.
        task: Task to write; null writes all.
        token_ids: Whether to write token ids instead of their number.
        confidences: Names of further confidences to write, which `selfcal score` or `selfcal predict` left in the
            store.
    """
    for one in recorded_confidences(annotation_estimators(store_dir, confidences or ())):
        check_name_tells(one)
    report = export_pool(
        store_dir, path, split=split, round=round, task=task, token_ids=token_ids, confidences=confidences or ()
    )
    say(f"Exported {store_dir} to {path}: {report}")
    return report


def run_import_records(
    path: str,
    store_dir: str,
    prompt_separator: str,
    task: str,
    split: str = "train",
    end_of_turn: str = "",
    model: str | None = None,
    revision: str | None = None,
) -> RecordsReport:
    """Read published training records (input, answer, weighted_consistency, consistency) into a store.

    Args:
        path: JSON-lines or Parquet file.
        store_dir: Folder of the store.
        prompt_separator: Text at which a record's prompt ends: what opens the assistant's turn in its chat template.
        task: Task of the questions.
        split: Split under which they are stored.
        end_of_turn: Text of the end-of-turn token, to be cut off responses that end with it.
        model: Model whose tokenizer made the prompts; needed to train on the records.
        revision: Its revision on the hub.
    """
    report = import_training_records(
        path,
        store_dir,
        prompt_separator=prompt_separator,
        task=task,
        split=split,
        end_of_turn=end_of_turn,
        model=model,
        revision=revision,
    )
    say(f"Imported {path} to {store_dir}: {report}")
    return report
