"""All tasks by name. A new data set is a row of ``PUBLIC_DATASETS``, or a plug-in."""

from dataclasses import dataclass
from typing import Protocol

from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.plan import QuestionCount
from selfcal_lightning.core.plugins import Registry
from selfcal_lightning.data.tasks import answer_types
from selfcal_lightning.data.tasks.base import Part, Task, take_part
from selfcal_lightning.data.tasks.dataset import DatasetTask, LocalQuestions
from selfcal_lightning.data.tasks.public_datasets import PUBLIC_DATASETS
from selfcal_lightning.data.tasks.word_problems import WordProblems
from selfcal_lightning.models.chat_format import Prompt, put_prompt
from selfcal_lightning.records import Question

TASKS: Registry[Task] = Registry("task")


def register_task(task: Task) -> None:
    """Add a task under its name, which every verb and every YAML then knows."""
    TASKS.register(task)


def get_task(name: str) -> Task:
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
    check_slice(offset, limit)
    last = None if limit is None else offset + limit
    wanted = last if part is None else None
    questions = get_task(task).load(split, path=path, chain_of_thought=chain_of_thought, limit=wanted)
    if part is not None:
        questions = take_part(questions, part)[:last]
    if offset and offset >= len(questions):
        most = f"the {len(questions):,} questions of split {split!r} of {task}"
        raise InputError(f"Expected `offset` to be less than {most}, but got {offset:,}.")
    return put_prompt(questions[offset:], prompt)


def check_slice(offset: int, limit: int | None) -> None:
    check_at_least(1, limit=limit)
    check_at_least(0, offset=offset)


@dataclass(frozen=True)
class QuestionSlice:
    """Questions of one task.

    Attributes:
        task: Name of the task.
        split: Split of the task's data set.
        path: Local file: questions for a `local_...` task, else rows with the columns of the task's hub data set. Null
            reads the hub or, for generated tasks, makes the questions.
        part: Takes only the part set aside for "train", "validation" or "calibration" (80, 10, 10 %, by a hash of the
            text); null takes all.
        limit: Takes only this many questions; null takes all.
        offset: Skips this many questions first, such as to keep validation apart in a data set without that split.
        chain_of_thought: Asks for reasoning before the answer.
    """

    task: str
    split: str = "test"
    path: str | None = None
    part: Part | None = None
    limit: int | None = None
    offset: int = 0
    chain_of_thought: bool = True

    def __post_init__(self) -> None:
        check_slice(self.offset, self.limit)


for _dataset in (
    *PUBLIC_DATASETS,
    LocalQuestions("local_number", answer_types.NumberAnswers()),
    LocalQuestions("local_choice", answer_types.LetterAnswers("ABCDEFGH")),
    LocalQuestions("local_expression", answer_types.ExpressionAnswers(), verifier="mathematics"),
    LocalQuestions("local_text", answer_types.FreeTextAnswers(), verifier="facts"),
    LocalQuestions("local_text_exact", answer_types.ShortTextAnswers(), verifier="facts"),
):
    register_task(DatasetTask(_dataset))
register_task(WordProblems())


class QuestionPlace(Protocol):
    """Which questions of a task are taken: a source of training, a test set, the settings of a generation."""

    @property
    def split(self) -> str: ...
    @property
    def path(self) -> str | None: ...
    @property
    def part(self) -> Part | None: ...
    @property
    def chain_of_thought(self) -> bool: ...
    @property
    def offset(self) -> int: ...
    @property
    def limit(self) -> int | None: ...


def load_source(place: QuestionPlace, task: str, *, prompt: Prompt | None = None) -> list[Question]:
    return load_some(
        task, place.split, path=place.path, chain_of_thought=place.chain_of_thought, part=place.part,
        offset=place.offset, limit=place.limit, prompt=prompt,
    )  # fmt: skip


def check_source(place: QuestionPlace, task: str) -> None:
    check_slice(place.offset, place.limit)
    get_task(task).check_source(place.split, path=place.path)


def count_source(place: QuestionPlace, task: str, *, role: str) -> QuestionCount:
    if get_task(task).is_remote(path=place.path):
        return QuestionCount(role, task, place.limit, is_limit=place.limit is not None)
    return QuestionCount(role, task, len(load_source(place, task)))
