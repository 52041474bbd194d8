"""All tasks by name. A new data set is a class like those of `arithmetic.py` and one line here, or a plug-in."""

from __future__ import annotations

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.prompts.given import Prompt, put_prompt
from selfcal_lightning.records import Question
from selfcal_lightning.tasks.answers.types import ExpressionAnswers, LetterAnswers, NumberAnswers, ShortTextAnswers
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.dataset import DatasetTask
from selfcal_lightning.tasks.families.arithmetic import GSM8K, SVAMP, ObjectCounting
from selfcal_lightning.tasks.families.choice import (
    ARC,
    GPQA,
    MMLU,
    AquaRat,
    CommonsenseQA,
    MathQA,
    OpenBookQA,
    SciQ,
    WinoGrande,
)
from selfcal_lightning.tasks.families.competition import AIME, AIME25, AIMETrain, Math, Math500
from selfcal_lightning.tasks.families.facts import SimpleQATrain, SimpleQAVerified, TriviaQA
from selfcal_lightning.tasks.families.local import LocalQuestions
from selfcal_lightning.tasks.families.reading import LogiQA, ReClor
from selfcal_lightning.tasks.families.word_problems import WordProblems
from selfcal_lightning.tasks.parts import Part, take_part

TASKS: dict[str, Task] = {}


def register_task(task: Task) -> None:
    """Add a task under its name, by which every verb and every YAML then knows it.

    Raises:
        InputError: If the name is taken.
    """
    if task.name in TASKS:
        raise InputError(f"Expected `task.name` to be new, but {task.name!r} is registered already.")
    TASKS[task.name] = task


register = register_task  # its name before there were registries for more than tasks


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


def load_some(
    task: str,
    split: str,
    *,
    path: str | None = None,
    chain_of_thought: bool = True,
    part: Part | None = None,
    offset: int = 0,
    limit: int | None = None,
    prompt: Prompt | None = None,
) -> list[Question]:
    """Return some questions of a task: ``limit`` of them after the first ``offset``.

    Args:
        task: Name of the task.
        split: Split of its data set.
        path: Local file with the columns of the data set; None reads the hub.
        chain_of_thought: Whether the prompt asks for reasoning before the answer.
        part: The part of them that is set aside for this (``tasks.parts``); None takes all.
        offset: Questions to skip.
        limit: Most questions; None takes all that are left.
        prompt: How they are put to the model; None is the task's own way.

    Raises:
        ValueError: A number is negative, or no question is left.

    Example:
        >>> [question.id for question in load_some("word_problems", "test_id", offset=2, limit=2)]
        ['word_problems/test_id/000002', 'word_problems/test_id/000003']
    """
    check_slice(offset, limit)
    last = None if limit is None else offset + limit
    wanted = last if part is None else None
    questions = get_task(task).load(split, path=path, chain_of_thought=chain_of_thought, limit=wanted)
    if part is not None:
        questions = take_part(questions, part)[:last]
    if offset and offset >= len(questions):
        raise InputError(
            f"Expected `offset` to be less than the {len(questions):,} questions of split {split!r} of {task}, but got "
            f"{offset:,}."
        )
    return put_prompt(questions[offset:], prompt)


def check_slice(offset: int, limit: int | None) -> None:
    """Raise ValueError unless ``offset`` and ``limit`` can cut questions out of a split."""
    if limit is not None and limit < 1:
        raise InputError(f"Expected `limit` to be None or at least 1, but got {limit}.")
    if offset < 0:
        raise InputError(f"Expected `offset` to be at least 0, but got {offset}.")


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
    MMLU(),
    Math500(),
    Math(),
    AIME25(),
    AIME(),
    AIMETrain(),
    TriviaQA(),
    SimpleQAVerified(),
    SimpleQATrain(),
    LocalQuestions("local_number", NumberAnswers()),
    LocalQuestions("local_choice", LetterAnswers("ABCDEFGH")),
    LocalQuestions("local_expression", ExpressionAnswers(), judge="mathematics"),
    LocalQuestions("local_text", ShortTextAnswers(), judge="facts"),
):
    register_task(DatasetTask(_dataset))
register_task(WordProblems())
