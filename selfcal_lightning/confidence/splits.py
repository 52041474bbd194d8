"""Which questions something was fitted on, so that nothing is reported on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from selfcal_lightning.confidence.base import split_hash
from selfcal_lightning.records import QuestionSamples, question_hash


@dataclass(frozen=True)
class FittedOn:
    """The questions of a fit.

    Attributes:
        split_hash: sha256 of the set of their ids (``confidence.base.split_hash``).
        question_hashes: Hash of each id as 16 hexadecimal digits, sorted; they show an overlap, not only identity.
        num_responses: Responses that entered the fit.
        num_left_out: Responses of these questions that did not, for want of a confidence or of a target.
    """

    split_hash: str
    question_hashes: tuple[str, ...]
    num_responses: int
    num_left_out: int = 0

    @property
    def num_questions(self) -> int:
        """Number of questions."""
        return len(self.question_hashes)

    @classmethod
    def from_questions(cls, question_ids: Iterable[str], *, num_responses: int, num_left_out: int = 0) -> FittedOn:
        """Build the record from question ids.

        Example:
            >>> FittedOn.from_questions(["b", "a", "b"], num_responses=12).num_questions
            2
        """
        ids = set(question_ids)
        return cls(split_hash(ids), tuple(sorted(map(_hex_hash, ids))), num_responses, num_left_out)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FittedOn:
        """Read what :meth:`as_json` wrote.

        Raises:
            KeyError: A field is missing.
        """
        hashes = tuple(str(value) for value in content["question_hashes"])
        return cls(str(content["split_hash"]), hashes, int(content["num_responses"]), int(content["num_left_out"]))

    def as_json(self) -> dict[str, Any]:
        """Return the record as plain JSON types."""
        return {
            "split_hash": self.split_hash,
            "num_questions": self.num_questions,
            "num_responses": self.num_responses,
            "num_left_out": self.num_left_out,
            "question_hashes": list(self.question_hashes),
        }

    def shared_questions(self, question_ids: Iterable[str]) -> list[str]:
        """Return those of ``question_ids`` that were fitted on, in their order."""
        known = set(self.question_hashes)
        return [name for name in dict.fromkeys(question_ids) if _hex_hash(name) in known]


class Fitted(Protocol):
    """Something with a ``name`` that was fitted on questions: a scaler, a fusion, a threshold."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def fitted_on(self) -> FittedOn:
        """The questions of the fit."""
        ...


def check_not_fitted_on(
    questions: Iterable[str] | Sequence[QuestionSamples], fitted: Fitted | Iterable[Fitted]
) -> None:
    """Raise unless ``fitted`` never saw any of ``questions``; call it before anything is reported on them.

    Args:
        questions: Ids, or a pool.
        fitted: One or several scalers, fusions or thresholds.

    Raises:
        ValueError: A question was in the fitting split.

    Example:
        >>> from types import SimpleNamespace
        >>> scaler = SimpleNamespace(name="fused", fitted_on=FittedOn.from_questions(["a", "b"], num_responses=4))
        >>> check_not_fitted_on(["c"], scaler)
        >>> check_not_fitted_on(["c", "b"], scaler)
        Traceback (most recent call last):
        ValueError: Expected questions that 'fused' was not fitted on, but got 1 of 2 that it was, such as 'b'. ...
    """
    ids = [item.question.id if isinstance(item, QuestionSamples) else item for item in questions]
    for one in fitted if isinstance(fitted, Iterable) else (fitted,):
        shared = one.fitted_on.shared_questions(ids)
        if shared:
            raise ValueError(
                f"Expected questions that {one.name!r} was not fitted on, but got {len(shared)} of {len(set(ids))} "
                f"that it was, such as {shared[0]!r}. Numbers on a fitting split flatter: use another split, or the "
                "other half (`split_in_halves`)."
            )


def split_in_halves(question_ids: Iterable[str], *, seed: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Deal questions into two halves: the first for scalers and fusion, the second for thresholds.

    The order is that of a hash of (seed, id): the same on every machine, and independent of the order of the ids.

    Args:
        question_ids: The questions.
        seed: Another one deals another way.

    Returns:
        Two disjoint tuples of sorted ids; with an odd number the first holds one more.

    Raises:
        ValueError: If there are fewer than two questions.

    Example:
        >>> first, second = split_in_halves(["a", "b", "c"])
        >>> len(first), len(second), sorted(first + second)
        (2, 1, ['a', 'b', 'c'])
    """
    ids = sorted(set(question_ids), key=lambda name: (question_hash(f"{seed}/{name}"), name))
    if len(ids) < 2:
        raise ValueError(f"Expected `question_ids` to hold at least 2 questions, but got {len(ids)}.")
    middle = (len(ids) + 1) // 2
    return tuple(sorted(ids[:middle])), tuple(sorted(ids[middle:]))


def take_questions(pool: Iterable[QuestionSamples], question_ids: Iterable[str]) -> list[QuestionSamples]:
    """Return the entries of ``pool`` whose question is among ``question_ids``, in the order of the pool."""
    wanted = set(question_ids)
    return [entry for entry in pool if entry.question.id in wanted]


def _hex_hash(question_id: str) -> str:
    return f"{question_hash(question_id):016x}"
