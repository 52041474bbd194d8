"""Places that questions come from: checked and counted without asking the hub, and loaded."""

from __future__ import annotations

from typing import Protocol

from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.records import Question
from selfcal_lightning.runtime.plan import QuestionCount
from selfcal_lightning.tasks.parts import Part, take_part
from selfcal_lightning.tasks.registry import check_slice, get_task, load_some


class QuestionPlace(Protocol):
    """Which questions of a task are taken: a source of training, a test set, the settings of a generation."""

    @property
    def split(self) -> str:
        """Split of the task's data set."""
        ...

    @property
    def path(self) -> str | None:
        """Local file, or None."""
        ...

    @property
    def part(self) -> Part | None:
        """The part of them that is taken; None takes all."""
        ...

    @property
    def chain_of_thought(self) -> bool:
        """Whether the prompt asks for reasoning before the answer."""
        ...

    @property
    def offset(self) -> int:
        """Questions that are skipped."""
        ...

    @property
    def limit(self) -> int | None:
        """The first so many questions after ``offset``; None takes all."""
        ...


def load_source(place: QuestionPlace, task: str, *, prompt: Prompt | None = None) -> list[Question]:
    """Return the questions of a place.

    Args:
        place: The place.
        task: Their task.
        prompt: How they are put to the model; None is their task's own way.

    Raises:
        InputError: There is no such task, split or part, or no question is left.
        FileNotFoundError: There is no such file.
    """
    return load_some(
        task, place.split, path=place.path, chain_of_thought=place.chain_of_thought, part=place.part,
        offset=place.offset, limit=place.limit, prompt=prompt,
    )  # fmt: skip


def check_source(place: QuestionPlace, task: str) -> None:
    """Refuse a task, a split or a file that there is not, and a limit or an offset that leaves no question.

    Raises:
        InputError: A name is unknown, or a number out of its range; the message says which there are.
        FileNotFoundError: There is no such file.
    """
    check_slice(place.offset, place.limit)
    get_task(task).check_source(place.split, path=place.path)


def count_source(place: QuestionPlace, task: str, *, role: str) -> QuestionCount:
    """Return how many questions a place has, as far as this machine knows: of the hub, the limit that was set.

    Args:
        place: The place.
        task: Their task.
        role: Split in which they take part.
    """
    known, path, limit = get_task(task), place.path, place.limit
    if known.is_remote(path=path):
        return QuestionCount(role, task, limit, is_limit=limit is not None)
    last = None if limit is None else place.offset + limit
    if place.part is not None:
        found = take_part(known.load(place.split, path=path), place.part)[:last]
    else:
        found = known.load(place.split, path=path, limit=last)
    return QuestionCount(role, task, max(0, len(found) - place.offset))
