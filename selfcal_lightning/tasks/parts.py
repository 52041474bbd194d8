"""One set of questions cut into parts: to train on, to validate on, and to calibrate thresholds and fusions on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.records import Question

Part = Literal["train", "validation", "calibration"]
# Of the questions; training takes the rest.
SHARES = {"validation": 0.1, "calibration": 0.1}
FEWEST = 10


def take_part(questions: Sequence[Question], part: Part) -> list[Question]:
    """Return the questions of one part, in their order: 80 % train, 10 % validation, 10 % calibration.

    Which part a question belongs to follows from a hash of its text: the order of a file does not matter, and a text
    that occurs twice is in one part.

    Raises:
        InputError: The part is unknown, or there are fewer than ten different questions.

    Example:
        >>> questions = [Question(str(i), "t", (), text=f"What is {i}+1?") for i in range(30)]
        >>> [len(take_part(questions, part)) for part in ("train", "validation", "calibration")]
        [24, 3, 3]
    """
    if part not in get_args(Part):
        raise unknown_name("part", part, get_args(Part))
    texts = sorted({question.text for question in questions}, key=_hash)
    if len(texts) < FEWEST:
        raise InputError(
            f"Expected at least {FEWEST} different questions to train, validate and calibrate on, but got "
            f"{len(texts)}. Add some, or name a source for every split in a configuration."
        )
    chosen, start = set[str](), 0
    for name, share in SHARES.items():
        end = start + max(1, round(share * len(texts)))
        chosen, start = (set(texts[start:end]) if name == part else chosen), end
    if part == "train":
        chosen = set(texts[start:])
    return [question for question in questions if question.text in chosen]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
