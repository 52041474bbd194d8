"""The sets of questions of an adaptation: those adapted on, and others that nothing is learnt from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question
from selfcal_lightning.store.shards import question_digest
from selfcal_lightning.tasks.parts import Part
from selfcal_lightning.tasks.registry import check_slice
from selfcal_lightning.tasks.sources import load_source

TRANSDUCTIVE, INDUCTIVE, OUT_OF_DOMAIN = "transductive", "inductive", "out_of_domain"


@dataclass(frozen=True)
class QuestionSlice:
    """Questions of one task.

    Attributes:
        task: Name of the task.
        split: Split of the task's data set.
        path: Local file of a `local_...` task, or with the columns of the task's hub data set; None reads the hub.
        part: "train", "validation" or "calibration": a part of the questions by a hash of their texts; None takes all.
        limit: Take the first so many questions; None takes all.
        offset: Skip so many questions before that.
        chain_of_thought: Whether the prompt asks for reasoning before the answer.
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


def load_sets(slices: Mapping[str, QuestionSlice]) -> dict[str, list[Question]]:
    """Return the questions of all sets.

    Raises:
        InputError: Two sets share a question.
    """
    found = {name: load_source(place, place.task) for name, place in slices.items()}
    contents = {name: {question_digest(question): question.id for question in own} for name, own in found.items()}
    for one, other in combinations(contents, 2):
        if shared := sorted(contents[one].keys() & contents[other].keys()):
            raise InputError(
                f"Expected `{one}` and `{other}` to share no question, but got {len(shared)} in both, for example "
                f"{contents[one][shared[0]]!r}. Take other splits, or slices (`offset`, `limit`) that do not overlap."
            )
    return found
