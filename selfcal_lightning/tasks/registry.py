"""All tasks by name. A new data set is a class like those of `arithmetic.py` and one line here."""

from __future__ import annotations

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.tasks.answers import ExpressionAnswers, LetterAnswers, NumberAnswers, ShortTextAnswers
from selfcal_lightning.tasks.arithmetic import GSM8K, SVAMP, ObjectCounting
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.choice import (
    ARC,
    GPQA,
    AquaRat,
    CommonsenseQA,
    MathQA,
    OpenBookQA,
    SciQ,
    WinoGrande,
)
from selfcal_lightning.tasks.competition import Math500
from selfcal_lightning.tasks.dataset import DatasetTask
from selfcal_lightning.tasks.local import LocalQuestions
from selfcal_lightning.tasks.reading import LogiQA, ReClor
from selfcal_lightning.tasks.word_problems import WordProblems

TASKS: dict[str, Task] = {}


def register(task: Task) -> None:
    """Add a task under its name.

    Raises:
        InputError: If the name is taken.
    """
    if task.name in TASKS:
        raise InputError(f"Expected `task.name` to be new, but {task.name!r} is registered already.")
    TASKS[task.name] = task


def get_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        InputError: If there is none.

    Example:
        >>> get_task("gsm8k").answer_type
        'number'
    """
    if name not in TASKS:
        raise unknown_name("task", name, sorted(TASKS))
    return TASKS[name]


for _dataset in (
    GSM8K(),
    SVAMP(),
    ObjectCounting(),
    MathQA(),
    AquaRat(),
    SciQ(),
    CommonsenseQA(),
    OpenBookQA(),
    ARC("easy"),
    ARC("challenge"),
    WinoGrande(),
    ReClor(),
    LogiQA(),
    GPQA(),
    Math500(),
    LocalQuestions("local_number", NumberAnswers()),
    LocalQuestions("local_choice", LetterAnswers("ABCDEFGH")),
    LocalQuestions("local_expression", ExpressionAnswers()),
    LocalQuestions("local_text", ShortTextAnswers()),
):
    register(DatasetTask(_dataset))
register(WordProblems())
