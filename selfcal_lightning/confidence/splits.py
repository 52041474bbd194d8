"""Records of the questions something was fitted on, so that nothing is reported on them, and disjoint splits.

Questions are identified by id and by content, since one file read as two splits gives its lines different ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.confidence.base import split_hash
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.records import Question, QuestionSamples, question_hash


@dataclass(frozen=True)
class FittedOn:
    split_hash: str
    question_hashes: tuple[str, ...]
    content_hashes: tuple[str, ...]
    num_responses: int
    num_left_out: int = 0

    @property
    def num_questions(self) -> int:
        return len(self.question_hashes)

    @classmethod
    def from_questions(cls, questions: Iterable[str | Question], *, num_responses: int, num_left_out: int = 0) -> Self:
        found = list(map(_keys_of, questions))
        ids = {name for name, _ in found}
        contents = tuple(sorted({content for _, content in found if content is not None}))
        return cls(split_hash(ids), tuple(sorted(map(_hex_hash, ids))), contents, num_responses, num_left_out)

    @classmethod
    def from_pool(cls, pool: Sequence[QuestionSamples], used: NDArray[np.bool_] | None = None) -> Self:
        """Build the record of a pool; ``used`` tells which of its responses enter the fit, all if None."""
        total = sum(len(entry.samples) for entry in pool)
        count = total if used is None else int(used.sum())
        return cls.from_questions((e.question for e in pool), num_responses=count, num_left_out=total - count)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        ids, contents = (tuple(content[name]) for name in ("question_hashes", "content_hashes"))
        return cls(content["split_hash"], ids, contents, content["num_responses"], content["num_left_out"])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "num_questions": self.num_questions}

    def shared_questions(self, questions: Iterable[str | Question]) -> list[str]:
        """Return the ids of those ``questions`` that were fitted on, under any id, in order."""
        ids, contents = set(self.question_hashes), set(self.content_hashes)
        keys = map(_keys_of, questions)
        return list(dict.fromkeys(name for name, content in keys if _hex_hash(name) in ids or content in contents))


class Fitted(Protocol):
    """Something fitted on questions: a scaler, a fusion or a threshold."""

    @property
    def name(self) -> str: ...
    @property
    def fitted_on(self) -> FittedOn: ...


def content_hash(question: Question) -> str | None:
    """Return the hash of a question's task, messages and reference, as in the store; None without any text."""
    return question_digest(question) if any(message.content.strip() for message in question.messages) else None


def check_disjoint(
    first: Iterable[Question], second: Iterable[Question], *, names: tuple[str, str], way_out: str
) -> None:
    keys = list(map(_keys_of, first))
    ids = {name for name, _ in keys}
    contents = {content: name for name, content in reversed(keys) if content is not None}
    shared = [(q.id, q.id if q.id in ids else contents.get(content_hash(q) or "")) for q in second]
    shared = [(name, other) for name, other in shared if other is not None]
    if shared:
        name, other = min(shared)
        example = repr(name) if name == other else f"{other!r} and {name!r}, which are one question under two ids"
        found = f"{len(shared)} in both, for example {example}"
        raise InputError(f"Expected {names[0]} and {names[1]} to share no question, but got {found}. {way_out}")


def check_not_fitted_on(
    questions: Iterable[str | Question | QuestionSamples], fitted: Fitted | Iterable[Fitted]
) -> None:
    """Raise if ``fitted`` was fitted on any of ``questions``; call it before reporting on them."""
    asked = [item.question if isinstance(item, QuestionSamples) else item for item in questions]
    for one in fitted if isinstance(fitted, Iterable) else (fitted,):
        shared = one.fitted_on.shared_questions(asked)
        if shared:
            count = len({name for name, _ in map(_keys_of, asked)})
            found = f"{len(shared)} of {count} that it was, such as {shared[0]!r}"
            way_out = "Use another split or the other half. Different questions need different ids."
            raise InputError(f"Expected questions that {one.name!r} was not fitted on, but got {found}. {way_out}")


def split_in_halves(question_ids: Iterable[str], *, seed: int = 0) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split questions into two halves: the first for scalers and fusion, the second for thresholds.

    Questions are ordered by a hash of (seed, id), so the split is the same on every machine and for every order of ids.
    """
    ids = sorted(set(question_ids), key=lambda name: (question_hash(f"{seed}/{name}"), name))
    if len(ids) < 2:
        raise InputError(f"Expected at least 2 different questions to split into halves, but got {len(ids)}.")
    middle = (len(ids) + 1) // 2
    return tuple(sorted(ids[:middle])), tuple(sorted(ids[middle:]))


def halve_pool(
    pool: Sequence[QuestionSamples], *, seed: int = 0
) -> tuple[list[QuestionSamples], list[QuestionSamples]]:
    """Split a pool as :func:`split_in_halves` does, keeping questions with equal content together."""
    leaders = leading_ids([entry.question for entry in pool])
    halves = map(set, split_in_halves(leaders.values(), seed=seed))
    first, second = ([entry for entry in pool if leaders[entry.question.id] in half] for half in halves)
    return first, second


def leading_ids(questions: Sequence[Question]) -> dict[str, str]:
    """Map each question id to the smallest id with the same content."""
    by_id = sorted(questions, key=lambda question: question.id, reverse=True)
    first = {content: q.id for q in by_id if (content := content_hash(q)) is not None}  # the smallest is set last
    return {q.id: first.get(content_hash(q) or "", q.id) for q in questions}


def _keys_of(question: str | Question) -> tuple[str, str | None]:
    """Return the id of a question and the hash of its content, which an id alone does not tell."""
    return (question, None) if isinstance(question, str) else (question.id, content_hash(question))


def _hex_hash(question_id: str) -> str:
    return f"{question_hash(question_id):016x}"
