"""Which questions a process samples: its share of them, and what the store lacks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import (
    Question,
    duplicate_ids,
    question_hash,
)
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.store.shards import question_digest

if TYPE_CHECKING:
    pass


def check_questions(questions: Sequence[Question]) -> None:
    """Raise ValueError when there are no questions or an id occurs twice."""
    if not questions:
        raise InputError("Expected `questions` to hold at least one question, but got none.")
    if repeated := duplicate_ids(questions):
        raise InputError(
            f"Expected question ids to be unique, but got {len(repeated)} more than once, the first of them "
            f"{repeated[0]!r}. Give every question an id of its own, or name every task once."
        )


def select_share(questions: Sequence[Question], shard: tuple[int, int]) -> list[Question]:
    """Return the questions of share i of n, ``shard = (i, n)``.

    Example:
        >>> questions = [Question(str(i), "t", ()) for i in range(10)]
        >>> sum(len(select_share(questions, (i, 3))) for i in range(3))
        10
    """
    number, total = shard
    if not 0 <= number < total:
        raise InputError(f"Expected `shard` to be (i, n) with 0 <= i < n, but got {shard}.")
    return [question for question in questions if question_hash(question.id) % total == number]


def missing_questions(questions: Sequence[Question], store: SampleStore, *, split: str, round: int) -> list[Question]:
    """Return the questions that no part of the store has committed, or with fewer samples than are wanted of them.

    Those are as many as the store was opened for, or as it says that questions of the split have.

    Raises:
        ValueError: A question lies there with another wording or reference, or in another split.
    """
    stored = store.stored_questions(round=round, include_parts=True)
    for question in questions:
        found = stored.get(question.id)
        if found is not None and found.split != split:
            raise InputError(
                f"Expected question {question.id!r} to be in split {split!r}, but got {found.split!r} in the store "
                f"{store.path}. A question belongs to one split: remove it from one, or use another `store_dir`."
            )
        if found is not None and found.digest != question_digest(question):
            raise InputError(
                f"Expected question {question.id!r} to be as it was when the store {store.path} was sampled, but got "
                "another task, wording or reference. Use another `store_dir`, or go back to the earlier questions."
            )
    wanted = store.num_samples or store.round_manifest(round).samples_of(split) or 0
    return [question for question in questions if question.id not in stored or stored[question.id].samples < wanted]
