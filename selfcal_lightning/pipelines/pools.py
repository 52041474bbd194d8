"""Recorded pools from wherever they lie: a JSON-lines file of responses made elsewhere, or a split of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.features import NUM_TOKENS
from selfcal_lightning.errors import InputError
from selfcal_lightning.pipelines.foreign import line_error, read_json_lines
from selfcal_lightning.pipelines.pool_lines import judge_line, response_length
from selfcal_lightning.pipelines.progress import Progress
from selfcal_lightning.pipelines.task_rows import UNNAMED, read_foreign_pool
from selfcal_lightning.records import QuestionSamples, Sample
from selfcal_lightning.store import SampleStore
from selfcal_lightning.store_annotations import Annotation
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.registry import get_task

Lengths = tuple[tuple[int | None, ...], ...]


@dataclass(frozen=True)
class RecordedPool:
    """The recorded samples of some questions.

    Attributes:
        entries: The questions with their samples, each at least one; ids are unique.
        lengths: Tokens of each response, [question][sample]; None where the pool does not say.
        query_tokens: Tokens of the confidence query that was put after each response; 0 where none was, or unknown.
        estimators: The estimator that computed each of the annotations that were merged in, by the annotation's name.
        sampled_by: "model", "prompt" and "sampling" of the store's fingerprint; None where nobody knows.
    """

    entries: tuple[QuestionSamples, ...]
    lengths: Lengths
    query_tokens: int = 0
    estimators: Mapping[str, str] = field(default_factory=dict)
    sampled_by: Mapping[str, Any] | None = None

    @property
    def has_lengths(self) -> bool:
        """Whether the length of every response is known."""
        return all(length is not None for lengths in self.lengths for length in lengths)

    @property
    def shortest(self) -> QuestionSamples:
        """The question with the fewest samples, the first of them."""
        return min(self.entries, key=lambda entry: len(entry.samples))

    def subset(self, question_ids: set[str]) -> RecordedPool:
        """Return the pool of these questions only, in the same order."""
        rows = [
            (entry, lengths)
            for entry, lengths in zip(self.entries, self.lengths, strict=True)
            if entry.question.id in question_ids
        ]
        return replace(self, entries=tuple(entry for entry, _ in rows), lengths=tuple(lengths for _, lengths in rows))


def load_pool(
    path: str | Path, *, split: str | None = None, task: str | None = None, confidences: Sequence[str] = ()
) -> list[QuestionSamples]:
    """Return the questions of a pool with their samples; see :func:`load_recorded_pool`."""
    return list(load_recorded_pool(path, split=split, task=task, confidences=confidences).entries)


def load_recorded_pool(
    path: str | Path,
    *,
    split: str | None = None,
    task: str | None = None,
    confidences: Sequence[str] = (),
    limit: int | None = None,
    tasks: Callable[[str], Task] = get_task,
) -> RecordedPool:
    """Read a JSON-lines pool, or a split of a sample store, into memory.

    What a JSON-lines pool does not state (``answer``, ``correct``) is read out of the text and verified by the task,
    as in ``selfcal import-pool``, which keeps the outcome for the next time.

    Args:
        path: File of JSON lines, or folder of a store (its round 0).
        split: Split to read; None reads all. Only lines that name another split are left out.
        task: Of a file: the task of all questions, None takes the field ``task`` of every line. Of a store: the task
            to read, None for all.
        confidences: Annotations of the store to merge in (``selfcal score`` and ``selfcal predict`` write them).
        limit: The first so many questions; None takes all.
        tasks: Returns the task of a name.

    Raises:
        FileNotFoundError: There is neither a file nor a store.
        InputError: The pool holds no question, the same question twice, or a line is not as described.
    """
    if limit is not None and limit < 1:
        raise InputError(f"Expected `limit` to be None or at least 1, but got {limit}.")
    path = check_place(path)
    if path.is_dir():
        pool = _from_store(path, split=split, task=task, confidences=confidences, limit=limit)
    else:
        if confidences:
            raise InputError(
                f"Expected {path} to be a store when `confidences` names annotations ({', '.join(confidences)}), but "
                "got a file. A file's responses carry their own; `selfcal import-pool` makes a store of it."
            )
        pool = _from_file(path, split=split, task=task, limit=limit, tasks=tasks)
    if not pool.entries:
        raise InputError(
            f"Expected {path} to hold questions of split {split!r} and task {task!r} with responses, but got none. "
            f"{_what_is_there(path)}"
        )
    return pool


def check_place(path: str | Path) -> Path:
    """Return where a pool lies. Raises FileNotFoundError where there is neither a file nor a folder."""
    place = Path(path)
    if not place.exists():
        raise FileNotFoundError(
            f"Expected a JSON-lines pool or the folder of a store at {path}, but got nothing there."
        )
    return place


def _what_is_there(path: Path) -> str:
    """Return which splits and tasks a pool holds, for whoever named another."""
    if path.is_dir():
        stored = list(SampleStore(path).rows())
        found = [(rows[0].split, rows[0].question.task) for rows in stored]
    else:
        found = [(str(line.get("split", UNNAMED)), str(line.get("task"))) for _, line in read_json_lines(path)]
    if not found:
        return "It holds none at all: finish `selfcal generate` first."
    splits, tasks = (", ".join(sorted(set(names))) for names in zip(*found, strict=True))
    return f"It holds the split {splits} and the task {tasks}."


def _from_store(
    path: Path, *, split: str | None, task: str | None, confidences: Sequence[str], limit: int | None
) -> RecordedPool:
    entries: list[QuestionSamples] = []
    lengths: list[tuple[int | None, ...]] = []
    store = SampleStore(path)
    fingerprint = store.round_manifest()["fingerprint"]
    suffix_ids = fingerprint["prompt"].get("suffix_ids", ())
    # Responses made elsewhere have a prompt of their own kind and no sampling settings.
    facts = {name: fingerprint[name] for name in ("model", "prompt", "sampling")} if fingerprint["sampling"] else None
    for rows in store.rows(split=split, task=task, confidences=confidences):
        if limit is not None and len(entries) == limit:
            break
        first = rows[0]
        entries.append(
            QuestionSamples(first.question, tuple(row.sample for row in rows), first.split, first.prompt_ids)
        )
        lengths.append(tuple(row.num_tokens for row in rows))
    return RecordedPool(
        tuple(entries), tuple(lengths), len(suffix_ids), annotation_estimators(path, confidences), facts
    )


def annotation_estimators(store: str | Path, names: Sequence[str]) -> dict[str, str]:
    """Return the estimator that computed each of the annotations ``names`` of a store, where it is known."""
    origins = {name: (Annotation(store, name).record or {"origin": {}})["origin"] for name in names}
    return {name: origin["estimator"] for name, origin in origins.items() if "estimator" in origin}


def _from_file(
    path: Path, *, split: str | None, task: str | None, limit: int | None, tasks: Callable[[str], Task]
) -> RecordedPool:
    """Read and judge the lines of a file; questions without a response are left out, as in an import."""
    entries: list[QuestionSamples] = []
    lengths: list[tuple[int | None, ...]] = []
    first: dict[str, int] = {}
    lines = [
        (number, line)
        for number, line in read_foreign_pool(path, task=task, split=None, tasks=tasks, default_split=split or UNNAMED)
        if split in (None, line.split) and line.responses
    ][:limit]
    with Progress(sum(len(line.responses) for _, line in lines), label=f"Reading {path.name}") as progress:
        for number, line in lines:
            name = line.question.id
            if name in first:
                raise line_error(path, number, "`id` to be unique", f"{name!r} again, from line {first[name]}")
            first[name] = number
            samples = judge_line(line, tasks(line.question.task))
            stated = [response_length(response) for response in line.responses]
            known = tuple(map(_length, samples, stated))
            samples = tuple(_with_length(sample, length) for sample, length in zip(samples, known, strict=True))
            entries.append(QuestionSamples(line.question, samples, line.split))
            lengths.append(known)
            progress.update(len(samples), unreadable=sum(sample.answer is None for sample in samples))
    return RecordedPool(tuple(entries), tuple(lengths))


def _length(sample: Sample, stated: int | None) -> int | None:
    """Return the length of a response: of its ids where these are given, else as stated."""
    return stated if sample.token_ids is None else len(sample.token_ids)


def _with_length(sample: Sample, length: int | None) -> Sample:
    """Keep a length without ids among the confidences, where a fusion looks for the feature of that name."""
    if length is None or sample.token_ids is not None:
        return sample
    return replace(sample, confidences={NUM_TOKENS: float(length), **sample.confidences})
