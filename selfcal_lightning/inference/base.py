"""The interface of a test-time strategy: a generator that asks for samples and returns a verdict."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question, Sample, Verdict

Solving = Generator["Ask", list[Sample], Verdict]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for the next ``num_samples`` samples of the question, in index order.

    A list is sent back, which is shorter (or empty) only where there are no more samples. Only live sources can
    continue a prefix or stop at the end of a step.
    """

    num_samples: int
    prefix: tuple[int, ...] | None = None
    to_step_end: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(f"Expected `num_samples` to be at least 1, but got {self.num_samples}.")
        if self.prefix is not None and not self.prefix:
            raise InputError("Expected `prefix` to be None or to hold token ids, but got none. Leave it out.")

    @property
    def kind(self) -> AskKind:
        """Identity of a sample apart from its index."""
        return AskKind(self.prefix, self.to_step_end)


@dataclass(frozen=True, slots=True)
class AskKind:
    """Where a sample starts and ends; see :class:`Ask`."""

    prefix: tuple[int, ...] | None = None
    to_step_end: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole response, as in a recorded pool."""
        return self.prefix is None and not self.to_step_end


WHOLE = AskKind()


def refuse_parts(kind: AskKind) -> None:
    """Refuse anything but whole responses."""
    if not kind.is_whole:
        asked = "to continue a prefix" if kind.prefix is not None else "to end with a step"
        raise InputError(f"This strategy asks {asked}, which recorded samples cannot do. Run it live.")


class Strategy(Protocol):
    """Decides for each question when to stop sampling and which answer to give.

    The same code runs live and on recorded samples.
    """

    @property
    def name(self) -> str:
        """Short name, as on the command line and in tables."""

    @property
    def max_samples(self) -> int:
        """Maximum samples per question."""

    @property
    def confidence(self) -> str | None:
        """Name of the confidence it reads (see ``confidence.base.confidence_of``), or None."""

    def solve(self, question: Question) -> Solving:
        """Ask for samples and return the verdict; the driver fills in the costs."""


def make_verdict(
    question: Question, samples: Sequence[Sample], answer: str | None, *, confidence: float | None, stopped_early: bool
) -> Verdict:
    """Return the verdict ``answer``; ``correct`` is that of the samples with this answer.

    No answer is wrong, or unknown where the question has no reference.
    """
    if answer is None:
        correct = None if question.reference is None and all(s.correct is None for s in samples) else False
    else:
        correct = next((sample.correct for sample in samples if sample.answer == answer), None)
    return Verdict(question.id, answer, confidence, correct, len(samples), stopped_early)


def cast_votes(samples: Sequence[Sample], confidence: str | None) -> list[tuple[str, float]]:
    """Return answer and confidence of the samples that vote; each weighs 1 if ``confidence`` is None.

    Samples without a readable answer, or without the confidence, do not vote.
    """
    weights = [1.0 if confidence is None else confidence_of(sample, confidence) for sample in samples]
    pairs = zip(samples, weights, strict=True)
    return [(s.answer, weight) for s, weight in pairs if s.answer is not None and weight is not None]


def add_up(votes: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the weight of each answer in order of first appearance."""
    total: dict[str, float] = {}
    for answer, weight in votes:
        total[answer] = total.get(answer, 0.0) + weight
    return total


def weighted_votes(samples: Sequence[Sample], confidence: str | None) -> dict[str, float]:
    """Return the weight of each answer in order of first appearance, see :func:`cast_votes`."""
    return add_up(cast_votes(samples, confidence))


def leader(votes: dict[str, float]) -> str | None:
    """Return the answer with the largest weight, the first seen on ties; None without votes."""
    return max(votes, key=votes.__getitem__) if votes else None


def share_of(votes: dict[str, float], answer: str | None) -> float | None:
    """Return the answer's share of the total weight, in [0, 1]; None without an answer or any weight."""
    total = math.fsum(votes.values())
    return None if answer is None or total <= 0.0 else min(votes[answer] / total, 1.0)


def check_weights(lowest: float) -> None:
    """Refuse negative confidences as weights of votes."""
    if lowest < 0.0:
        raise InputError(
            f"Expected a confidence of at least 0 where it weighs votes, but got {lowest:g}. Scale it to a "
            "probability, or take a strategy that only compares confidences (best_of_n, borda, cisc, standardised)."
        )


def check_number(value: float, name: str, low: float = 0.0, high: float = 1.0) -> None:
    """Raise InputError unless ``value`` is a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"Expected `{name}` to be a number in [{low:g}, {high:g}], but got {value!r}.")


def check_confidence_name(value: str | None, *, optional: bool = False) -> None:
    """Raise InputError unless ``value`` names a confidence, or is None where that is allowed."""
    if not (optional and value is None) and (not isinstance(value, str) or not value):
        plain = "" if optional else " Plain votes are the strategy self_consistency."
        raise InputError(f"Expected `confidence` to be the name of a confidence, but got {value!r}.{plain}")
