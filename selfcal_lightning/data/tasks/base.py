"""The task interface: where questions come from, how answers are extracted and verified."""

import hashlib
import inspect
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, Protocol, get_args

from selfcal_lightning import __version__
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.records import Question

AnswerType = Literal["number", "option letter", "expression", "short text"]
# What a verifying model is asked: whether an answer is right, wrong or not attempted; whether two are equivalent.
VerifierForm = Literal["facts", "mathematics"]


class Task(Protocol):
    """A family of questions with one way to read and verify answers."""

    name: str
    answer_type: AnswerType

    def load(
        self, split: str, *, path: str | None = None, chain_of_thought: bool = True, limit: int | None = None
    ) -> list[Question]:
        """Return the questions of ``split`` from the hub, or of the local file ``path`` with the hub's columns."""

    def check_source(self, split: str, *, path: str | None = None) -> None:
        """Refuse a split or a file that does not exist; nothing is read or downloaded."""

    def is_remote(self, *, path: str | None = None) -> bool:
        """Return whether loading asks the hub."""

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the canonical answer of a response, or None when none can be read.

        A response that was not ``finished`` (the token limit cut it) has an answer only where it states one, in a box
        or an answer field: the last number of an interrupted calculation does not count.
        """

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether ``answer`` equals ``reference``; None is never correct."""

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return ``answers`` with equal ones replaced by the first seen of their class; None stays None."""


def verifier_form(task: object) -> VerifierForm | None:
    """Return how a model verifies the answers of a task or a data set; None if it does not."""
    return getattr(task, "verifier", None)


ROOM = Path(__file__).parent


def reader_version(task: Task) -> str:
    """Return the version of this package and a hash over the sources of its tasks."""
    source = inspect.getsourcefile(type(task))
    own = () if source is None or ROOM in Path(source).parents else (source,)
    return f"selfcal_lightning {__version__}, {_hash(own)}"


@lru_cache
def _hash(own: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in (*sorted(ROOM.rglob("*.py")), *map(Path, own)):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


Part = Literal["train", "validation", "calibration"]
FEWEST = 10


def take_part(questions: Sequence[Question], part: Part) -> list[Question]:
    """Return the questions of one part, in their order: 80 % train, 10 % validation, 10 % calibration.

    The part follows from a hash of the text: the order of a file does not matter, and a repeated text is in one part.
    """
    if part not in get_args(Part):
        raise unknown_name("part", part, get_args(Part))
    texts = sorted({question.text for question in questions}, key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(texts) < FEWEST:
        raise InputError(
            f"Expected at least {FEWEST} different questions for the three parts, but got {len(texts)}. Add some, or "
            "name a source for every split in a configuration."
        )
    tenth = max(1, round(0.1 * len(texts)))
    parts = {"validation": texts[:tenth], "calibration": texts[tenth : 2 * tenth], "train": texts[2 * tenth :]}
    chosen = set(parts[part])
    return [question for question in questions if question.text in chosen]
