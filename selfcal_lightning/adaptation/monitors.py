"""Label-free signs that a policy that learns from itself has moved too far from round 0."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.capability import agreeing_pairs
from selfcal_lightning.metrics.group_rewards import majority_answer

Answers = Sequence[str | None]


@dataclass(frozen=True)
class RoundMonitors:
    """A round of responses compared with round 0; None is unknown."""

    agreement: float | None
    majority_agreement: float | None
    vote_share: float | None
    unreadable: float | None
    length: float | None
    confidence_gap: float | None
    logprob_fall: float | None = None


def pool_agreement(answers: Answers, earlier: Answers) -> float | None:
    """Return the chance that responses of two pools give the same answer; unreadable ones differ.

    Example:
        >>> pool_agreement(["7", "7", "8", None], ["7", "9"])
        0.25
    """
    if not answers or not earlier:
        return None
    votes = Counter(answer for answer in earlier if answer)
    return sum(votes[answer] for answer in answers if answer) / (len(answers) * len(earlier))


def round_monitors(
    answers: Sequence[Answers],
    earlier: Sequence[Answers],
    *,
    confidences: Sequence[Sequence[float | None]],
    lengths: Sequence[Sequence[int | None]],
    is_first: bool,
) -> RoundMonitors:
    """Compare a round with round 0, the same questions in the same order."""
    if not answers:
        raise InputError("Expected `answers` to hold at least one question, but got none.")
    pairs = list(zip(answers, earlier, strict=True))
    # Of round 0 with itself: of two different responses.
    agreements = [
        agreeing_pairs([answer or None for answer in one]) if is_first else pool_agreement(one, other)
        for one, other in pairs
    ]
    leaders = [(majority_answer(one), majority_answer(other)) for one, other in pairs]
    flat = [answer for group in answers for answer in group]
    shares = [_shares(group) for group in answers]
    own = [share for group in shares for share in group]
    known = [value for group in confidences for value in group if value is not None]
    confidence, share = _mean(known), _mean(own)
    return RoundMonitors(
        agreement=_mean([value for value in agreements if value is not None]),
        majority_agreement=_mean([float(one == other) for one, other in leaders if other is not None]),
        vote_share=_mean([max(group, default=0.0) for group in shares]),
        unreadable=sum(not answer for answer in flat) / max(len(flat), 1),
        length=_mean([float(length) for group in lengths for length in group if length is not None]),
        confidence_gap=None if confidence is None or share is None else confidence - share,
    )


def collapse(
    now: RoundMonitors, first: RoundMonitors, *, agreement: float, unreadable: float, logprob_fall: float
) -> list[str]:
    """Return the signs of a collapse, in words."""
    found = []
    if now.agreement is not None and first.agreement is not None and now.agreement < first.agreement - agreement:
        found.append(f"agreement with round 0 is {now.agreement:.3f}, and {first.agreement:.3f} of round 0 with itself")
    if now.unreadable is not None and now.unreadable > (first.unreadable or 0.0) + unreadable:
        before = first.unreadable or 0.0
        found.append(f"{now.unreadable:.3f} of the responses cannot be read, and {before:.3f} in round 0")
    if now.logprob_fall is not None and not now.logprob_fall <= logprob_fall:
        found.append(f"a token of round 0 has lost {now.logprob_fall:.3f} nats")
    return found


def _shares(group: Answers) -> list[float]:
    votes = Counter(answer for answer in group if answer)
    return [votes[answer] / len(group) if answer else 0.0 for answer in group]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
