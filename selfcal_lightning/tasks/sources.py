"""Sources of questions, checked and counted without asking the hub."""

from __future__ import annotations

from selfcal_lightning.runtime.plan import QuestionCount
from selfcal_lightning.tasks.parts import Part, take_part
from selfcal_lightning.tasks.registry import check_slice, get_task


def check_source(task: str, split: str, *, path: str | None, limit: int | None, offset: int = 0) -> None:
    """Refuse a task, a split or a file that there is not, and a limit or an offset that leaves no question.

    Raises:
        InputError: A name is unknown, or a number out of its range; the message says which there are.
        FileNotFoundError: There is no file ``path``.
    """
    check_slice(offset, limit)
    get_task(task).check_source(split, path=path)


def count_source(
    task: str,
    split: str,
    *,
    path: str | None,
    limit: int | None,
    offset: int = 0,
    part: Part | None = None,
    role: str,
) -> QuestionCount:
    """Return how many questions a source has, as far as this machine knows: of the hub, the limit that was set.

    Args:
        task: Its task.
        split: Split of the task's data set.
        path: Local file, or None.
        limit: The first so many questions after ``offset``; None takes all.
        offset: Questions that are skipped.
        part: The part of them that is taken, or None.
        role: Split in which they take part.
    """
    known = get_task(task)
    if known.is_remote(path=path):
        return QuestionCount(role, task, limit, is_limit=limit is not None)
    last = None if limit is None else offset + limit
    if part is not None:
        return QuestionCount(role, task, max(0, len(take_part(known.load(split, path=path), part)[:last]) - offset))
    return QuestionCount(role, task, max(0, len(known.load(split, path=path, limit=last)) - offset))
