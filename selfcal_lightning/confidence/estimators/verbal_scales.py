r"""Scales on which a model states in words how sure it is, and how its reply is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from selfcal_lightning.tasks.answers.extraction import final_part

VERBAL_QUERY = (
    "How likely is it that your answer is correct? Reply with one probability between 0.0 (surely wrong) and 1.0 "
    "(surely correct), written as \\boxed{probability}."
)
# Ten equal intervals from 0 to 1.
WORDS = (
    "almost no chance", "highly unlikely", "chances are slight", "unlikely", "less than even", "better than even",
    "likely", "very good chance", "highly likely", "almost certain",
)  # fmt: skip
_LONGEST_BARE = 60
# One level of braces inside is enough for \text{0.9}.
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\quad|[\s~$]")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(%?)")
_BARE_REPLY = re.compile(r"(?:(?:my\s+)?(?:confidence|probability)(?:\s+is)?\W*?)?([0-9.]+\s*%?)\.?", re.IGNORECASE)
_BARE_WORDS = re.compile(r"(?:(?:my\s+)?(?:confidence|probability)(?:\s+is)?\W*)?([a-z ]+?)\W*", re.IGNORECASE)


@dataclass(frozen=True)
class VerbalScale:
    """How a model is asked, and how it is understood.

    Attributes:
        after: The question about a response.
        before: The question about a question that has not been answered yet.
        parse: Returns the probability that a reply states, in [0, 1], or None.
    """

    after: str
    before: str
    parse: Callable[[str], float | None]


def parse_confidence(text: str) -> float | None:
    r"""Return the probability that a reply states, in [0, 1], or None.

    The last ``\boxed{}`` counts that holds a number in [0, 1] or a percentage, in ``\text{}`` and with spaces too.
    Without any box, a reply that is nothing but such a number is taken. What stands in an open reasoning block is no
    reply.

    Example:
        >>> parse_confidence(r"About \boxed{85\%}."), parse_confidence(r"\boxed{42} so \boxed{0.7}")
        (0.85, 0.7)
        >>> [parse_confidence(text) for text in (r"\boxed{1.5}", r"<think>\boxed{0.5}", "Confidence: 0.9")]
        [None, None, 0.9]
    """
    return _last(text, _BARE_REPLY, _probability)


def parse_percentage(text: str) -> float | None:
    r"""Return the percentage that a reply states, as a probability in [0, 1], or None.

    It is read as by :func:`parse_confidence`, but a number without a sign is one of percent; a fraction of one, such as
    0.85, can only be meant as a probability.

    Example:
        >>> [parse_percentage(text) for text in (r"\boxed{85}", r"\boxed{85\%}", r"\boxed{0.85}", "1", r"\boxed{120}")]
        [0.85, 0.85, 0.85, 0.01, None]
    """
    return _last(text, _BARE_REPLY, _percentage)


def parse_words(text: str) -> float | None:
    r"""Return the middle of the interval that a reply names by one of ``WORDS``, or a probability; None for neither.

    Example:
        >>> [parse_words(text) for text in (r"\boxed{\text{Almost certain}}", "Highly unlikely.", r"\boxed{0.7}")]
        [0.95, 0.15, 0.7]
        >>> parse_words(r"\boxed{perhaps}") is None
        True
    """
    found = _last(text, _BARE_WORDS, _word)
    return found if found is not None else parse_confidence(text)


NUMBERS = VerbalScale(
    VERBAL_QUERY,
    "Do not answer the question yet. How likely is it that your answer to it would be correct? Reply with one "
    "probability between 0.0 (surely wrong) and 1.0 (surely correct), written as \\boxed{probability}.",
    parse_confidence,
)
PERCENTAGES = VerbalScale(
    "How likely is it that your answer is correct? Reply with one percentage from 0 to 100, written as "
    "\\boxed{percentage\\%}.",
    "Do not answer the question yet. How likely is it that your answer to it would be correct? Reply with one "
    "percentage from 0 to 100, written as \\boxed{percentage\\%}.",
    parse_percentage,
)
_TEN = "; ".join(f"{word} ({place / 10:.1f} to {(place + 1) / 10:.1f})" for place, word in enumerate(WORDS))
TEN_WORDS = VerbalScale(
    f"How likely is it that your answer is correct? Choose one of these: {_TEN}. Reply with it, written as "
    "\\boxed{choice}.",
    "Do not answer the question yet. How likely is it that your answer to it would be correct? Choose one of these: "
    f"{_TEN}. Reply with it, written as \\boxed{{choice}}.",
    parse_words,
)


def _last(text: str, bare: re.Pattern[str], read: Callable[[str], float | None]) -> float | None:
    """Return what the last box gives that gives anything; without boxes, what a reply gives that is nothing else."""
    reply = final_part(text)
    if reply is None:
        return None
    contents = _BOXED.findall(reply)
    short = reply.strip()
    if "\\boxed" not in reply and len(short) <= _LONGEST_BARE and (match := bare.fullmatch(short)):
        contents = [match[1]]
    values = [value for content in contents if (value := read(content)) is not None]
    return values[-1] if values else None


def _number(content: str) -> re.Match[str] | None:
    plain = _SPACING.sub("", _WRAPPED.sub(r"\1", content)).replace("\\%", "%")
    return _NUMBER.fullmatch(plain)


def _probability(content: str) -> float | None:
    match = _number(content)
    if match is None:
        return None
    value = float(match[1]) / (100.0 if match[2] else 1.0)
    return value if value <= 1.0 else None


def _percentage(content: str) -> float | None:
    match = _number(content)
    if match is None:
        return None
    value = float(match[1])
    is_fraction = not match[2] and "." in match[1] and value <= 1.0
    value = value if is_fraction else value / 100.0
    return value if value <= 1.0 else None


def _word(content: str) -> float | None:
    plain = " ".join(_WRAPPED.sub(r"\1", content).lower().strip(" .!'\"*").split())
    return (WORDS.index(plain) + 0.5) / len(WORDS) if plain in WORDS else None
