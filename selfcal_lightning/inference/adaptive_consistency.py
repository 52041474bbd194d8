"""Adaptive consistency: sample one at a time until the answers agree enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, cast

import numpy as np
from scipy.special import betainc, entr, gammainc, gammaln

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.inference import base, vectorised
from selfcal_lightning.metrics.arrays import Array, Floats, Integers, as_array, check_positive
from selfcal_lightning.records import Question, Sample

# Integrals are exact to about as many decimals. Rounded, the same counts give the same number in every batch, and
# counts that reach a threshold such as .75 exactly meet it.
_DECIMALS = 12
_LARGEST_KEY = 2**62


def normalised_entropy(counts: Array) -> Floats:
    """Compute the entropy of the votes [..., K] over its largest possible value, in [0, 1]; lower is more certain.

    ``-sum_k p_k log(p_k) / log(D)`` with ``p_k = v_k / sum v`` and D the number of answers seen. A lone answer gets a
    phantom rival with one vote, as in the reference implementation, so that a single vote is no full agreement.
    """
    votes = np.asarray(as_array(counts), dtype=np.float64)
    distinct = np.count_nonzero(votes, axis=-1)
    phantom = (distinct == 1).astype(np.float64)
    total = np.maximum(votes.sum(axis=-1) + phantom, 1.0)
    # Added up one by one, so that zeros behind the counts change nothing, not even the last bit. Bits over bits, as in
    # the reference: where exact arithmetic meets a threshold (8, 3, 1 has 3/4), the last bit decides as it does there.
    shares = entr(votes / np.asarray(total)[..., None])
    bits = (np.cumsum(shares, axis=-1)[..., -1] + entr(phantom / total)) / np.log(2.0)
    return np.where(distinct == 0, 1.0, np.minimum(bits / np.log2(np.maximum(distinct, 2)), 1.0))


def beta_leader_probability(counts: Array) -> Floats:
    """Compute the probability that the leading answer is more likely than the runner-up, from counts [..., K].

    ``P(p > 1/2)`` for ``p ~ Beta(v_1 + 1, v_2 + 1)`` with the two largest counts v_1 and v_2.
    """
    return _by_combination(_largest(counts, 2), lambda v: np.asarray(betainc(v[:, 1] + 1.0, v[:, 0] + 1.0, 0.5)))


def dirichlet_leader_probability(counts: Array, *, top: int = 5) -> Floats:
    r"""Compute the probability that the leading answer is the most likely of the ``top`` most frequent ones."""
    return _by_combination(_largest(counts, top), _dirichlet_integral)


def _largest(counts: Array, number: int) -> Floats:
    """Return the ``number`` largest counts in descending order [..., number], padded with zeros."""
    votes = np.asarray(as_array(counts), dtype=np.float64)
    if votes.shape[-1] < number:
        votes = np.pad(votes, [(0, 0)] * (votes.ndim - 1) + [(0, number - votes.shape[-1])])
    return -np.sort(-votes, axis=-1)[..., :number]


def _by_combination(leading: Floats, function: Callable[[Integers], Floats]) -> Floats:
    """Apply ``function``, which takes rows of counts [R, top], to all rows [..., top], once per distinct row."""
    rows = leading.reshape(-1, leading.shape[-1]).astype(np.int64)
    radix = int(rows.max(initial=0)) + 1
    if radix ** rows.shape[1] > _LARGEST_KEY:  # thousands of votes
        first = inverse = np.arange(len(rows))
    else:
        keys = rows @ radix ** np.arange(rows.shape[1])
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return np.asarray(np.round(function(rows[first]), _DECIMALS)[inverse].reshape(leading.shape[:-1]))


def _dirichlet_integral(counts: Integers) -> Floats:
    """Return P(p_1 is the largest) for rows of counts [R, top], largest first; a second count of 0 takes part."""
    values = np.zeros(len(counts))
    for lead in np.unique(counts[:, 0]):
        rows = np.flatnonzero(counts[:, 0] == lead)
        weight, distribution = _gamma_tables(int(lead))
        product = weight * distribution[counts[rows, 1]]
        for rival in counts[rows, 2:].T:
            seen = np.flatnonzero(rival)
            product[seen] *= distribution[rival[seen]]
        values[rows] = product.sum(axis=-1)
    return values


@lru_cache(maxsize=4096)
def _gamma_tables(lead: int) -> tuple[Floats, Floats]:
    """Return the weights of M nodes [M] for Gamma(lead + 1), and the distributions of its rivals [lead + 1, M]."""
    shape = lead + 1.0
    reach = np.sqrt(74.0 / shape)
    step = min(0.3 / np.sqrt(shape), 0.1)
    x = shape * np.exp(np.arange(-37.0 / shape - reach, min(reach, 4.0), step))
    weight = np.exp(shape * np.log(x) - x - gammaln(shape)) * step  # f(x) x, since dx = x du
    return weight, gammainc(np.arange(1.0, shape + 1.0)[:, None], x)


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
    """Stop as soon as the votes are clear; otherwise answer by a vote over the whole budget.

    With the votes ``v_k`` of the answers so far, it stops once at least ``min_samples`` samples have voted and

    - ``count_ratio``, ``majority``: ``max_k v_k / sum_k v_k >= threshold`` (two papers' names for one rule);
    - ``confidence_ratio``: the same with ``v_k`` the sum of the confidences; if all are 0, sampling continues;
    - ``beta``: ``P(the leader is more likely than the runner-up) >= threshold``;
    - ``dirichlet``: ``P(the leader is the most likely of the top five) >= threshold``;
    - ``entropy``: normalised entropy of the votes ``<= threshold``; here *lower* is more certain.

    Unreadable answers, and for ``confidence_ratio`` samples without the confidence, do not vote. The verdict's
    confidence is the compared quantity, or one minus the entropy.

    Attributes:
        criterion: The rule.
        threshold: Threshold of the rule, in [0, 1]; None means .8 for the ratios, .95 for the two probabilities and .75
            for the entropy.
        max_samples: Maximum samples per question.
        confidence: Confidence that weights the votes of ``confidence_ratio``, ``p_true`` if None; must be None for the
            other rules.
        min_samples: Votes before the rule may stop. A single vote always agrees with itself.

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
            raise unknown_name("criterion", self.criterion, THRESHOLDS)
        is_weighted = self.criterion == "confidence_ratio"
        if self.confidence is not None and not is_weighted:
            raise InputError(
                f"Expected `confidence` to be None for {self.criterion!r}, which counts answers, but got "
                f"{self.confidence!r}. The criterion 'confidence_ratio' weighs them."
            )
        if self.threshold is None:
            object.__setattr__(self, "threshold", THRESHOLDS[self.criterion])
        if is_weighted and self.confidence is None:
            object.__setattr__(self, "confidence", P_TRUE)
        if is_weighted:
            base.check_confidence_name(self.confidence)
        base.check_number(self._threshold, "threshold")
        check_positive(self.max_samples, "max_samples")
        check_positive(self.min_samples, "min_samples")

    def solve(self, question: Question) -> base.Solving:
        samples: list[Sample] = []
        votes: dict[str, float] = {}
        total, num_votes, is_clear = 0.0, 0, False
        while len(samples) < self.max_samples and not is_clear:
            drawn = yield base.Ask(1 if samples else min(self.min_samples, self.max_samples))
            if not drawn:
                break
            samples += drawn
            for answer, weight in base.cast_votes(drawn, self.confidence):
                base.check_weights(weight)
                votes[answer] = votes.get(answer, 0.0) + weight
                total, num_votes = total + weight, num_votes + 1
            is_clear = num_votes >= self.min_samples and self._certainty(votes, total) >= self._bound(self._threshold)
        certainty = self._certainty(votes, total)
        confidence = None if total <= 0.0 else 1.0 + certainty if self.criterion == "entropy" else certainty
        return base.make_verdict(question, samples, base.leader(votes), confidence=confidence, stopped_early=is_clear)

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[float]) -> vectorised.CurveOutcome:
        bounds = np.array([self._bound(value) for value in vectorised.as_thresholds(grid)])
        votes = vectorised.votes_of(pool, weighted=self.criterion == "confidence_ratio", width=self.max_samples)
        scores, leaders = self._scores(votes)
        return vectorised.outcome_at(vectorised.first_crossing(scores, bounds), leaders, length=pool.length)

    def _scores(self, votes: vectorised.Votes) -> tuple[Floats, Integers]:
        """Return the rule's score after every sample, -inf before it may stop, and the leader's code, both [Q, W]."""
        num_questions, num_samples = votes.code.shape
        leaders = np.full((num_questions, num_samples), vectorised.UNREADABLE, dtype=np.int64)
        scores = np.full((num_questions, num_samples), -np.inf)
        # Entropy needs the counts of all answers, so it is taken at once; the probabilities those of the first few.
        num_counts = _FIRST.get(self.criterion, max(int(votes.code.max(initial=0)) + 1, 1))
        counts = np.zeros((num_questions, num_counts))
        leading = np.zeros((num_questions, num_samples, _FIRST.get(self.criterion, 0)))
        for step in vectorised.walk_votes(votes):
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
        return cast("float", self.threshold)  # set when it was made

    def _bound(self, threshold: float) -> float:
        """Return the score to reach; scores rise with certainty, so entropies are negated."""
        return -threshold if self.criterion == "entropy" else threshold

    def _certainty(self, votes: dict[str, float], total: float) -> float:
        """Return the score of the votes so far; -inf without any weight, which never stops."""
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
    """Return the score of one list of counts, largest first; cached, since live runs see the same few lists."""
    return float(_count_score(criterion, np.array(counts)))


def _count_vote(counts: Floats, votes: vectorised.Votes, step: vectorised.VoteStep) -> None:
    """Add the step's votes to every question's sorted counts [Q, C], in place.

    Incrementing the first of several equal counts keeps them sorted; a count that is cut off can at most tie.
    """
    if not step.totals.shape[1]:
        return
    column = step.num_samples - 1
    rows = np.arange(len(counts))
    now = np.where(votes.is_vote[:, column], step.totals[rows, votes.code[:, column]], 0.0)
    is_place = counts <= now[:, None] - 1.0
    place = is_place.argmax(axis=1)
    counts[rows, place] += is_place[rows, place]
