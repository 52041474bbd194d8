"""Labels of questions: votes of the responses, or the gold answer where it may be read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.functional.rewards import majority_answer
from selfcal_lightning.records import QuestionSamples, Sample
from selfcal_lightning.selection.records import Label
from selfcal_lightning.selection.settings import LabelKind


def label_of(entry: QuestionSamples, kind: LabelKind, *, picked: str | None) -> Label:
    """Return the label of a question.

    Args:
        entry: The question with its responses; unreadable ones vote for nothing and count among all.
        kind: Where the label comes from.
        picked: Answer of the chosen response.
    """
    answers = [sample.answer for sample in entry.samples]
    text = {
        "majority": majority_answer(answers),
        "ssc": _most_confident(entry.samples),
        "picked": picked,
        "reference": entry.question.reference,
        "none": None,
    }[kind] or None
    if text is None:
        return Label(kind, None, None, None, None)
    votes = Counter(answer for answer in answers if answer)
    agreeing = _votes_for_reference(entry.samples) if kind == "reference" else votes[text]
    others = [count for answer, count in votes.items() if answer != text]
    size = len(answers)
    margin = None if kind == "reference" else (agreeing - max(others, default=0)) / size
    return Label(kind, text, agreeing / size, confidence_share(entry.samples, text), margin)


def confidence_share(samples: Sequence[Sample], answer: str) -> float | None:
    """Return the share of P(True) over the readable responses that lies on an answer; None without any.

    Example:
        >>> from selfcal_lightning.records import Sample
        >>> def sample(answer, yes):
        ...     return Sample("q", 0, 0, "", None, None, answer, None, yes_mass=yes, no_mass=1 - yes)
        >>> confidence_share([sample("7", 0.75), sample("8", 0.25), sample(None, 0.9)], "7")
        0.75
    """
    masses = _masses(samples)
    total = math.fsum(masses.values())
    return masses.get(answer, 0.0) / total if total > 0.0 else None


def _most_confident(samples: Sequence[Sample]) -> str | None:
    """Return the answer with the most P(True) on it, the first seen on ties."""
    masses = _masses(samples)
    return max(masses, key=masses.__getitem__) if masses and max(masses.values()) > 0.0 else None


def _masses(samples: Sequence[Sample]) -> dict[str, float]:
    masses: dict[str, float] = defaultdict(float)
    for sample in samples:
        confidence = confidence_of(sample, P_TRUE)
        if sample.answer and confidence is not None:
            masses[sample.answer] += confidence
    return masses


def _votes_for_reference(samples: Sequence[Sample]) -> int:
    """Return how many responses were judged right: the gold answer may be written in another way than theirs."""
    return sum(bool(sample.correct) for sample in samples)
