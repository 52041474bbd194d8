"""Adaptive consistency: sample one at a time until the answers agree enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.functional.stopping import (
    beta_leader_probability,
    dirichlet_leader_probability,
    normalised_entropy,
)
from selfcal_lightning.records import Question, Sample
from selfcal_lightning.strategies.base import Ask, Solving, leader, make_verdict
from selfcal_lightning.strategies.vectorised.arrays import UNREADABLE, CurveOutcome, PoolArrays
from selfcal_lightning.strategies.vectorised.votes import (
    Floats,
    Integers,
    Votes,
    VoteStep,
    as_thresholds,
    first_crossing,
    outcome_at,
    votes_of,
    walk_votes,
)
from selfcal_lightning.strategies.votes import (
    NEGATIVE_WEIGHT,
    check_budget,
    check_confidence_name,
    check_threshold,
    vote_confidence,
)

Criterion = Literal["count_ratio", "confidence_ratio", "beta", "dirichlet", "entropy", "majority"]

# The thresholds of the reference systems; the two ratios have none of their own there.
THRESHOLDS: dict[str, float] = {
    "count_ratio": 0.8,
    "confidence_ratio": 0.8,
    "beta": 0.95,
    "dirichlet": 0.95,
    "entropy": 0.75,
    "majority": 0.8,
}
_RATIOS = ("count_ratio", "confidence_ratio", "majority")
# How many of the most frequent answers the probabilities look at.
_FIRST = {"beta": 2, "dirichlet": 5}


@dataclass(frozen=True)
class AdaptiveConsistency:
    """Stop as soon as the votes so far are clear; otherwise answer by the vote over the whole budget.

    With the votes ``v_k`` of the answers so far, it stops once at least ``min_samples`` samples have voted and

    - ``count_ratio``, ``majority``: ``max_k v_k / sum_k v_k >= threshold`` (one rule under the names of two papers);
    - ``confidence_ratio``: the same with ``v_k`` the sum of the confidences; without any weight it goes on;
    - ``beta``: ``P(the first is likelier than the second) >= threshold``;
    - ``dirichlet``: ``P(the first is the likeliest of five) >= threshold``;
    - ``entropy``: normalised entropy of the votes ``<= threshold``: here *less* is more certain.

    Unreadable answers are counted as used but are no votes, and so are, for ``confidence_ratio``, samples without the
    confidence. The verdict's confidence is the quantity compared, for the entropy one minus it.

    Attributes:
        criterion: The rule.
        threshold: What the rule compares with, in [0, 1]; None takes .8 for the ratios, .95 for the two probabilities
            and .75 for the entropy.
        max_samples: Budget for a question.
        confidence: What weighs the votes of ``confidence_ratio``, ``p_true`` when None; None for the others.
        min_samples: Votes before the rule may stop. A single vote always agrees with itself.

    Raises:
        ValueError: If a field is out of range, or a confidence is given to a criterion that counts; while solving, if
            a confidence is negative.

    Example:
        >>> AdaptiveConsistency("beta").threshold
        0.95
        >>> AdaptiveConsistency("confidence_ratio").confidence
        'p_true'

    Reference:
        Aggarwal et al., Let's Sample Step by Step, arXiv 2305.11860; with confidences, Huang et al., Efficient
        Test-Time Scaling via Self-Calibration, arXiv 2503.00031.
    """

    name: ClassVar[str] = "adaptive_consistency"
    grid_parameter: ClassVar[str] = "threshold"

    criterion: Criterion = "count_ratio"
    threshold: float | None = None
    max_samples: int = 16
    confidence: str | None = None
    min_samples: int = 2

    def __post_init__(self) -> None:
        if self.criterion not in THRESHOLDS:
            raise InputError(f"Expected `criterion` to be one of {', '.join(THRESHOLDS)}, but got {self.criterion!r}.")
        is_weighted = self.criterion == "confidence_ratio"
        if self.confidence is not None and not is_weighted:
            raise InputError(
                f"Expected `confidence` to be None for the criterion {self.criterion!r}, which counts answers, but got "
                f"{self.confidence!r}. Take the criterion 'confidence_ratio' to weigh them."
            )
        if self.threshold is None:
            object.__setattr__(self, "threshold", THRESHOLDS[self.criterion])
        if is_weighted and self.confidence is None:
            object.__setattr__(self, "confidence", P_TRUE)
        if is_weighted:
            check_confidence_name(self.confidence)
        check_threshold(self._threshold)
        check_budget(self.max_samples)
        check_positive(self.min_samples, "min_samples")

    def solve(self, question: Question) -> Solving:
        """Ask for ``min_samples`` samples, then for one at a time until the votes are clear."""
        samples: list[Sample] = []
        votes: dict[str, float] = {}
        total, num_votes, is_clear = 0.0, 0, False
        while len(samples) < self.max_samples and not is_clear:
            drawn = yield Ask(1 if samples else min(self.min_samples, self.max_samples))
            if not drawn:
                break
            samples += drawn
            for sample in drawn:
                weight = self._weight_of(sample)
                if sample.answer is not None and weight is not None:
                    votes[sample.answer] = votes.get(sample.answer, 0.0) + weight
                    total, num_votes = total + weight, num_votes + 1
            is_clear = num_votes >= self.min_samples and self._certainty(votes, total) >= self._bound(self._threshold)
        certainty = self._certainty(votes, total)
        confidence = None if total <= 0.0 else 1.0 + certainty if self.criterion == "entropy" else certainty
        return make_verdict(question, samples, leader(votes), confidence=confidence, stopped_early=is_clear)

    def curve(self, pool: PoolArrays, grid: Sequence[float]) -> CurveOutcome:
        """Return the outcome at every threshold of ``grid``; equals ``solve`` on the samples in the pool's order."""
        bounds = np.array([self._bound(value) for value in as_thresholds(grid)])
        votes = votes_of(pool, weighted=self.criterion == "confidence_ratio", width=self.max_samples)
        scores, leaders = self._scores(votes)
        fallback = leaders[:, -1] if leaders.shape[1] else np.full(len(leaders), UNREADABLE)
        return outcome_at(first_crossing(scores, bounds), leaders, fallback=fallback, length=pool.length)

    def _scores(self, votes: Votes) -> tuple[Floats, Integers]:
        """Return the rule's score after every sample, -inf before it may stop, and the leader's code, both [Q, W]."""
        num_questions, num_samples = votes.code.shape
        leaders = np.full((num_questions, num_samples), UNREADABLE, dtype=np.int64)
        scores = np.full((num_questions, num_samples), -np.inf)
        # Entropy needs the counts of all answers, so it is taken at once; the probabilities those of the first few.
        num_counts = _FIRST.get(self.criterion, max(int(votes.code.max(initial=0)) + 1, 1))
        counts = np.zeros((num_questions, num_counts))
        leading = np.zeros((num_questions, num_samples, _FIRST.get(self.criterion, 0)))
        for step in walk_votes(votes):
            column = step.num_samples - 1
            leaders[:, column] = step.leader
            if self.criterion in _RATIOS:
                np.divide(step.lead_weight, step.total_weight, out=scores[:, column], where=step.total_weight > 0.0)
                continue
            _count_vote(counts, votes, step)
            if self.criterion in _FIRST:
                leading[:, column] = counts
            else:
                scores[:, column] = _count_score(self.criterion, counts[:, : step.num_samples])
        if self.criterion in _FIRST:
            scores = _count_score(self.criterion, leading)
        return np.where(np.cumsum(votes.is_vote, axis=1) >= self.min_samples, scores, -np.inf), leaders

    @property
    def _threshold(self) -> float:
        return THRESHOLDS[self.criterion] if self.threshold is None else self.threshold

    def _bound(self, threshold: float) -> float:
        """Return what a score must reach: scores rise with certainty, so entropies have their sign turned."""
        return -threshold if self.criterion == "entropy" else threshold

    def _weight_of(self, sample: Sample) -> float | None:
        """Return the weight of the sample's vote; None where it is no vote."""
        if self.confidence is None:
            return None if sample.answer is None else 1.0
        weight = vote_confidence(sample, self.confidence)
        if weight is not None and weight < 0.0:
            raise InputError(NEGATIVE_WEIGHT.format(value=weight))
        return weight

    def _certainty(self, votes: dict[str, float], total: float) -> float:
        """Return the score of the votes so far; -inf without weight, which no threshold stops at."""
        if total <= 0.0:
            return -np.inf
        if self.criterion in _RATIOS:
            return max(votes.values()) / total
        return _cached_score(self.criterion, tuple(sorted(votes.values(), reverse=True)))


def _count_score(criterion: str, counts: Floats) -> Floats:
    """Return the score of counts [..., K], largest first: higher is more certain."""
    if criterion == "beta":
        return beta_leader_probability(counts)
    if criterion == "dirichlet":
        return dirichlet_leader_probability(counts, top=_FIRST["dirichlet"])
    return -normalised_entropy(counts)


@lru_cache(maxsize=1 << 16)
def _cached_score(criterion: str, counts: tuple[float, ...]) -> float:
    """Return the score of one list of counts, largest first; a live run meets the same few again and again."""
    return float(_count_score(criterion, np.array(counts)))


def _count_vote(counts: Floats, votes: Votes, step: VoteStep) -> None:
    """Add the step's votes to the counts of every question, largest first [Q, C], in place.

    A count that rises by one keeps the order if it is the first of its equals, so nothing is sorted. Where the list is
    cut, a count below the last one can at most draw level with it, which changes nothing.
    """
    if not step.totals.shape[1]:
        return
    column = step.num_samples - 1
    rows = np.arange(len(counts))
    now = np.where(votes.is_vote[:, column], step.totals[rows, votes.code[:, column]], 0.0)
    is_place = counts <= now[:, None] - 1.0
    place = is_place.argmax(axis=1)
    counts[rows, place] += is_place[rows, place]
