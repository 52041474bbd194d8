"""What the strategies share in `solve`: which samples vote, the winner's share, and checks of their fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Ask, Solving, leader, make_verdict, weighted_votes

NEGATIVE_WEIGHT = (
    "Expected a confidence of at least 0 where it weighs votes, but got {value:g}. Scale it to a probability first, or "
    "take a strategy that only compares confidences (best_of_n, borda, cisc, standardised)."
)


def check_budget(value: int, name: str = "max_samples") -> None:
    """Raise ValueError unless ``value`` is a positive integer."""
    check_positive(value, name)


def check_threshold(value: float, name: str = "threshold") -> None:
    """Raise ValueError unless ``value`` is a number in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise InputError(f"Expected `{name}` to be a number in [0, 1], but got {value!r}.")


def check_confidence_name(value: str | None) -> None:
    """Raise ValueError unless ``value`` names a confidence, for the strategies that cannot do without one."""
    if not isinstance(value, str) or not value:
        raise InputError(
            f"Expected `confidence` to be the name of a confidence such as 'p_true', but got {value!r}. "
            "Plain votes are the strategy self_consistency."
        )


def check_optional_confidence_name(value: str | None) -> None:
    """Raise ValueError unless ``value`` is None (plain votes) or names a confidence."""
    if value is not None and (not isinstance(value, str) or not value):
        raise InputError(f"Expected `confidence` to be None or the name of a confidence, but got {value!r}.")


def vote_confidence(sample: Sample, confidence: str) -> float | None:
    """Return the confidence in a readable sample; None where it is unreadable or has none, and so is no vote."""
    return None if sample.answer is None else confidence_of(sample, confidence)


def weigh_votes(samples: Sequence[Sample], confidence: str | None) -> dict[str, float]:
    """Return the weight of each answer in the order first seen, as ``weighted_votes`` does.

    Raises:
        ValueError: If a weight is negative: the answer with the fewest samples would win.
    """
    for sample in samples if confidence is not None else ():
        value = vote_confidence(sample, str(confidence))
        if value is not None and value < 0.0:
            raise InputError(NEGATIVE_WEIGHT.format(value=value))
    return weighted_votes(samples, confidence)


def share_of(votes: dict[str, float], answer: str | None) -> float | None:
    """Return the share of the weight that ``answer`` holds, in [0, 1]; None without an answer or without weight.

    Example:
        >>> share_of({"7": 1.5, "8": 0.5}, "7")
        0.75
        >>> share_of({"7": 0.0}, "7") is None
        True
    """
    total = math.fsum(votes.values())
    return None if answer is None or total <= 0.0 else min(votes[answer] / total, 1.0)


def add_up(votes: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the weight of each answer in the order first seen.

    Example:
        >>> add_up([("7", 0.5), ("8", 0.25), ("7", 1.0)])
        {'7': 1.5, '8': 0.25}
    """
    total: dict[str, float] = {}
    for answer, weight in votes:
        total[answer] = total.get(answer, 0.0) + weight
    return total


def vote_at_once(
    question: Question, max_samples: int, weigh: Callable[[Sequence[Sample]], dict[str, float]]
) -> Solving:
    """Ask for the whole budget at once and vote; the verdict's confidence is the winner's share of the weight."""
    samples = yield Ask(max_samples)
    votes = weigh(samples)
    answer = leader(votes)
    return make_verdict(question, samples, answer, confidence=share_of(votes, answer), stopped_early=False)
