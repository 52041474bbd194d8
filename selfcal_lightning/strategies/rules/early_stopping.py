"""Early stopping: draw samples one by one until one is confident enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question, Sample, Verdict
from selfcal_lightning.strategies.base import Ask, Solving, leader, make_verdict
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import (
    Votes,
    as_thresholds,
    first_crossing,
    outcome_at,
    vote_leader,
    votes_of,
)
from selfcal_lightning.strategies.votes import (
    check_budget,
    check_confidence_name,
    check_threshold,
    vote_confidence,
    weigh_votes,
)

Fallback = Literal["weighted_vote", "best", "last"]


@dataclass(frozen=True)
class EarlyStopping:
    """Stop at the first sample whose confidence is at least the threshold, and give its answer.

    Where no sample of the budget reaches it, the fallback decides: ``weighted_vote`` (the largest sum of confidences),
    ``best`` (the first sample of maximal confidence) or ``last`` (the last vote). Unreadable samples, and those without
    the confidence, neither stop it nor vote. The verdict's confidence is the highest among the samples that gave its
    answer, so that a verdict reached by the fallback never stands above one that reached the threshold.

    Attributes:
        threshold: Confidence, in [0, 1], that suffices.
        max_samples: Samples after which it gives up.
        confidence: Name of the confidence.
        fallback: What decides where no sample suffices.

    Example:
        >>> EarlyStopping(threshold=0.9).fallback
        'weighted_vote'

    Reference:
        Huang et al., Efficient Test-Time Scaling via Self-Calibration, arXiv 2503.00031, section 5. Its offline
        comparison falls back to the weighted vote, its online sampler to the last sample.
    """

    name: ClassVar[str] = "early_stopping"
    grid_parameter: ClassVar[str] = "threshold"

    threshold: float = 0.9
    max_samples: int = 16
    confidence: str = "p_true"
    fallback: Fallback = "weighted_vote"

    def __post_init__(self) -> None:
        check_threshold(self.threshold)
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)
        if self.fallback not in get_args(Fallback):
            known = ", ".join(map(repr, get_args(Fallback)))
            raise InputError(f"Expected `fallback` to be one of {known}, but got {self.fallback!r}.")

    def solve(self, question: Question) -> Solving:
        """Ask for one sample at a time; stop at the first that suffices."""
        samples: list[Sample] = []
        while len(samples) < self.max_samples:
            drawn = yield Ask(1)
            if not drawn:
                break
            samples += drawn
            value = vote_confidence(drawn[0], self.confidence)
            if value is not None and value >= self.threshold:
                return make_verdict(question, samples, drawn[0].answer, confidence=value, stopped_early=True)
        return self._give_up(question, samples)

    def _give_up(self, question: Question, samples: Sequence[Sample]) -> Verdict:
        votes = [(value, s.answer) for s in samples if (value := vote_confidence(s, self.confidence)) is not None]
        answer: str | None = None
        if votes and self.fallback == "last":
            answer = votes[-1][1]
        elif votes and self.fallback == "best":
            answer = max(votes, key=lambda vote: vote[0])[1]
        elif votes:
            answer = leader(weigh_votes(samples, self.confidence))
        best = max((value for value, given in votes if given == answer), default=None)
        return make_verdict(question, samples, answer, confidence=best, stopped_early=False)

    def curve(self, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
        """Return the outcome at every threshold of ``grid``; equals ``solve`` on the samples in the pool's order."""
        votes = votes_of(pool, weighted=True, width=self.max_samples)
        scores = np.where(votes.is_vote, votes.weight, -np.inf)
        crossing = first_crossing(scores, as_thresholds(grid))
        return outcome_at(crossing, votes.code, fallback=self._fallback_answer(votes, scores), length=pool.length)

    def _fallback_answer(self, votes: Votes, scores: NDArray[np.float64]) -> NDArray[np.integer]:
        """Return the code of the fallback's answer [Q]; -1 without votes."""
        if self.fallback == "weighted_vote":
            return vote_leader(votes, votes.weight)
        if not scores.shape[1]:
            return np.full(len(scores), UNREADABLE)
        if self.fallback == "best":
            position = scores.argmax(axis=1)
        else:
            position = votes.is_vote.shape[1] - 1 - votes.is_vote[:, ::-1].argmax(axis=1)
        # Where there is no vote at all, any position holds the code -1.
        return np.take_along_axis(votes.code, position[:, None], axis=1)[:, 0]
