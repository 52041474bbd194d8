"""The contract of a task: where questions come from, how an answer is read, how it is judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from selfcal_lightning.records import Question

AnswerType = Literal["number", "option letter", "expression", "short text"]
# What a model that judges is asked: whether an answer is right, wrong or not attempted; whether two are equivalent.
JudgeForm = Literal["facts", "mathematics"]


class Task(Protocol):
    """A family of questions with one way to read and judge answers.

    Beats of every task, in this order: ``load`` questions, ``extract`` an answer, ``verify`` it, ``group`` answers.
    """

    name: str
    answer_type: AnswerType

    def load(
        self, split: str, *, path: str | None = None, chain_of_thought: bool = True, limit: int | None = None
    ) -> list[Question]:
        """Return the questions of ``split`` from the hub, or of the local file ``path`` with the hub's columns."""
        ...

    def check_source(self, split: str, *, path: str | None = None) -> None:
        """Refuse a split or a file that is not there; nothing is read or downloaded."""
        ...

    def is_remote(self, *, path: str | None = None) -> bool:
        """Return whether loading asks the hub."""
        ...

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the canonical answer that ``text`` gives, or None when none can be read.

        Args:
            text: The response.
            finished: Whether the model ended it. One that the token limit cut has an answer only where it states one,
                in a box or an answer field: the last number of a calculation that broke off is none.
        """
        ...

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether ``answer`` equals ``reference``; None is never correct."""
        ...

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return ``answers`` with equal ones replaced by the first seen of their class; None stays None."""
        ...


@runtime_checkable
class NamesJudge(Protocol):
    """A task, or a data set, whose answers a model may judge where comparing texts falls short.

    Attributes:
        judge: What that model is asked; None where comparing decides.
    """

    judge: JudgeForm | None


def judge_form(task: object) -> JudgeForm | None:
    """Return what a model is asked that judges the answers of a task or a data set; None where it names nothing."""
    return task.judge if isinstance(task, NamesJudge) else None
