"""All tasks by name. A new data set is a class like those of `arithmetic.py` and one line here, or a plug-in."""

from __future__ import annotations

from typing import Protocol

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plan import QuestionCount
from selfcal_lightning.core.registry import Registry
from selfcal_lightning.data.tasks.answer_types import (
    ExpressionAnswers,
    FreeTextAnswers,
    LetterAnswers,
    NumberAnswers,
    ShortTextAnswers,
)
from selfcal_lightning.data.tasks.base import Part, Task, take_part
from selfcal_lightning.data.tasks.dataset import DatasetTask
from selfcal_lightning.data.tasks.local import LocalQuestions
from selfcal_lightning.data.tasks.public_datasets import (
    AIME,
    AIME25,
    ARC,
    GPQA,
    GSM8K,
    MMLU,
    SVAMP,
    AIMETrain,
    AquaRat,
    CommonsenseQA,
    LogiQA,
    Math,
    Math500,
    MathQA,
    ObjectCounting,
    OpenBookQA,
    ReClor,
    SciQ,
    SimpleQATrain,
    SimpleQAVerified,
    TriviaQA,
    WinoGrande,
)
from selfcal_lightning.data.tasks.word_problems import WordProblems
from selfcal_lightning.models.chat_format import Prompt, put_prompt
from selfcal_lightning.records import Question

TASKS: Registry[Task] = Registry("task")


def register_task(task: Task) -> None:
    """Add a task under its name, by which every verb and every YAML then knows it.

    Raises:
        InputError: If the name is taken.
    """
    TASKS.register(task)


def get_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        InputError: If there is none.

    Example:
        >>> get_task("gsm8k").answer_type
        'number'
    """
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
    """Return some questions of a task: ``limit`` of them after the first ``offset``."""
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
    LocalQuestions("local_expression", ExpressionAnswers(), verifier="mathematics"),
    LocalQuestions("local_text", FreeTextAnswers(), verifier="facts"),
    LocalQuestions("local_text_exact", ShortTextAnswers(), verifier="facts"),
):
    register_task(DatasetTask(_dataset))
register_task(WordProblems())


class QuestionPlace(Protocol):
    """Which questions of a task are taken: a source of training, a test set, the settings of a generation."""

    @property
    def split(self) -> str:
        """Split of the task's data set."""

    @property
    def path(self) -> str | None:
        """Local file, or None."""

    @property
    def part(self) -> Part | None:
        """The part of them that is taken; None takes all."""

    @property
    def chain_of_thought(self) -> bool:
        """Whether the prompt asks for reasoning before the answer."""

    @property
    def offset(self) -> int:
        """Questions that are skipped."""

    @property
    def limit(self) -> int | None:
        """The first so many questions after ``offset``; None takes all."""


def load_source(place: QuestionPlace, task: str, *, prompt: Prompt | None = None) -> list[Question]:
    """Return the questions of a place."""
    return load_some(
        task, place.split, path=place.path, chain_of_thought=place.chain_of_thought, part=place.part,
        offset=place.offset, limit=place.limit, prompt=prompt,
    )  # fmt: skip


def check_source(place: QuestionPlace, task: str) -> None:
    """Refuse a task, a split or a file that there is not, and a limit or an offset that leaves no question."""
    check_slice(place.offset, place.limit)
    get_task(task).check_source(place.split, path=place.path)


def count_source(place: QuestionPlace, task: str, *, role: str) -> QuestionCount:
    """Return how many questions a place has, as far as this machine knows: of the hub, the limit that was set."""
    known, path, limit = get_task(task), place.path, place.limit
    if known.is_remote(path=path):
        return QuestionCount(role, task, limit, is_limit=limit is not None)
    last = None if limit is None else place.offset + limit
    if place.part is not None:
        found = take_part(known.load(place.split, path=path), place.part)[:last]
    else:
        found = known.load(place.split, path=path, limit=last)
    return QuestionCount(role, task, max(0, len(found) - place.offset))
