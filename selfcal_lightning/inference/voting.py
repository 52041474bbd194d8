"""Strategies that draw the whole budget at once: plain and weighted votes, best of N, and an oracle."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.inference import base, vectorised
from selfcal_lightning.metrics.arrays import Floats, Integers, check_positive
from selfcal_lightning.metrics.consistency import masked_standardised_weights
from selfcal_lightning.records import Question, Sample

Codes = NDArray[np.integer]


class _Vote(ABC):
    """Draws the whole budget at once and votes; members differ in the weights that they make of confidences.

    Samples that are unreadable or lack the confidence do not vote. If all weights are 0, the first answer seen wins.
    The verdict's confidence is the winner's share of the weight.
    """

    grid_parameter: ClassVar[str] = "max_samples"
    needs_confidence: ClassVar[bool] = True

    max_samples: int
    confidence: str | None

    def __post_init__(self) -> None:
        check_positive(self.max_samples, "max_samples")
        base.check_confidence_name(self.confidence, optional=not self.needs_confidence)

    @abstractmethod
    def weights(self, confidence: Floats) -> Floats:
        """Return the weights of N >= 1 votes [N, Q]; nan is no vote."""

    def leaders(self, votes: vectorised.Votes, budgets: Integers) -> Codes:
        """Return the winners' codes at each budget [G, Q], by the weights of the first votes."""
        scores = _scores(votes)
        return _leaders_of(votes, budgets, lambda number: self.weights(scores[:number]))

    def weigh(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the weight of each answer in order of first appearance."""
        cast = base.cast_votes(samples, self.confidence)
        weights = self.weights(np.array([[value] for _, value in cast]))[:, 0].tolist() if cast else []
        return base.add_up((answer, weight) for (answer, _), weight in zip(cast, weights, strict=True))

    def solve(self, question: Question) -> base.Solving:
        samples = yield base.Ask(self.max_samples)
        votes = self.weigh(samples)
        answer = base.leader(votes)
        return base.make_verdict(
            question, samples, answer, confidence=base.share_of(votes, answer), stopped_early=False
        )

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[int]) -> vectorised.CurveOutcome:
        budgets = vectorised.as_budgets(grid)
        votes = vectorised.votes_of(pool, weighted=self.confidence is not None, width=int(budgets.max(initial=0)))
        return vectorised.outcome_of_budgets(self.leaders(votes, budgets), budgets, pool.length)


def _leaders_of(votes: vectorised.Votes, budgets: Integers, weights: Callable[[int], Floats]) -> Codes:
    """Return the winners [G, Q] of votes whose weights [n, Q] depend on the budget n, which only rises."""
    num_questions, width = votes.code.shape
    reached = np.minimum(budgets, width)
    leaders = np.full((width + 1, num_questions), vectorised.UNREADABLE, dtype=np.int32)
    for number in sorted(set(reached.tolist()) - {0}):
        leaders[number] = vectorised.vote_leader(votes, weights(number).T)
    return leaders[reached]


def _scores(votes: vectorised.Votes) -> Floats:
    """Return the confidences [W, Q]; nan where a sample does not vote."""
    return np.where(votes.is_vote, votes.weight, np.nan).T


@dataclass(frozen=True)
class SelfConsistency(_Vote):
    """Vote over all samples of the budget: argmax over answers a of ``sum_{i: y_i = a} w_i``.

    The weight w_i is 1, or the sample's confidence c_i where one is named. Samples that are unreadable or lack the
    confidence do not vote. If all weights are 0, the first answer seen wins.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence that weights the votes; None counts them.

    Reference:
        Wang et al., Self-Consistency Improves Chain of Thought Reasoning, arXiv 2203.11171; weighted by calibrated
        confidence: Huang et al., arXiv 2503.00031.
    """

    name: ClassVar[str] = "self_consistency"
    needs_confidence: ClassVar[bool] = False

    max_samples: int = 16
    confidence: str | None = None

    def weights(self, confidence: Floats) -> Floats:
        base.check_weights(confidence.min())
        return confidence

    def leaders(self, votes: vectorised.Votes, budgets: Integers) -> Codes:
        num_questions, width = votes.code.shape
        leaders = np.full((width + 1, num_questions), vectorised.UNREADABLE, dtype=np.int32)
        for step in vectorised.walk_votes(votes):
            leaders[step.num_samples] = step.leader
        return leaders[np.minimum(budgets, width)]


# Far below what separates any two confidences, and far above what overflows.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class CISC(_Vote):
    """Vote over all samples of the budget with the weights ``w_i = exp(c_i / T) / sum_j exp(c_j / T)``.

    c_i is the confidence in sample i, any real number, and T the temperature: a small T approaches best-of-N, a large T
    the plain majority. The sum runs over the question's votes.

    Attributes:
        temperature: T, in units of the confidence. Tune it for each model and confidence on held-out questions, as the
            paper does.
        max_samples: Samples to draw.
        confidence: Name of the confidence.

    Reference:
        Taubenfeld et al., Confidence Improves Self-Consistency in LLMs, arXiv 2502.06233, section 3.
    """

    name: ClassVar[str] = "cisc"

    temperature: float = 0.5
    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        base.check_number(self.temperature, "temperature", MIN_TEMPERATURE, sys.float_info.max)
        super().__post_init__()

    def weights(self, confidence: Floats) -> Floats:
        """Return the weights relative to the largest: none overflows, and the largest does not underflow."""
        return np.asarray(np.exp((confidence - np.fmax.reduce(confidence)) / self.temperature))


MAX_POWER = 100.0


@dataclass(frozen=True)
class BordaVoting(_Vote):
    """Vote over all samples of the budget with the weights ``w_i = (N - rank_i + 1) ** p``.

    rank_i is the rank of sample i by confidence, 1 for the highest, ties to the first seen; N is the number of votes.
    p = 0 is the majority, a large p best-of-N. Only the order of the confidences matters, so they may be on any scale.

    Attributes:
        power: The power p, in [0, 100].
        max_samples: Samples to draw.
        confidence: Name of the confidence that ranks the samples.

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
    """

    name: ClassVar[str] = "borda"

    power: float = 0.5
    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        base.check_number(self.power, "power", 0.0, MAX_POWER)
        super().__post_init__()

    def weights(self, confidence: Floats) -> Floats:
        return self._weights_of_first(confidence)(len(confidence))

    def leaders(self, votes: vectorised.Votes, budgets: Integers) -> Codes:
        return _leaders_of(votes, budgets, self._weights_of_first(_scores(votes)))

    def _weights_of_first(self, scores: Floats) -> Callable[[int], Floats]:
        """Return what gives the weights of the first n votes [n, Q] for n that only rises; nan is no vote."""
        points, admitted = np.zeros(scores.shape, dtype=np.int64), 0
        # Python's power: NumPy's may differ in the last bit between one question and many, and turn a tie.
        weight_of_points = np.array([float(number) ** self.power for number in range(len(scores) + 1)])

        def weights(number: int) -> Floats:
            nonlocal admitted
            for place in range(admitted, number):
                # A vote has one point more than there are votes below it; it ranks above later equals.
                earlier, new = scores[:place], scores[place]
                points[:place] += earlier >= new
                points[place] = 1 + np.count_nonzero(earlier < new, axis=0)
            admitted = number
            return np.asarray(weight_of_points[points[:number]])

        return weights


def _best(pool: vectorised.PoolArrays, grid: Sequence[int]) -> vectorised.CurveOutcome:
    """Return the answer of the sample with the highest confidence within each budget, the first on ties."""
    budgets = vectorised.as_budgets(grid)
    votes = vectorised.votes_of(pool, weighted=True, width=int(budgets.max(initial=0)))
    num_questions, width = votes.code.shape
    scores = np.where(votes.is_vote, votes.weight, -np.inf)
    # Column n holds what the first n samples say; before any vote the score is -inf and the best sample is none.
    best = np.maximum.accumulate(np.column_stack([np.full(num_questions, -np.inf), scores]), axis=1)
    is_new = best[:, 1:] > best[:, :-1]
    chosen = np.maximum.accumulate(np.where(is_new, np.arange(1, width + 1), 0), axis=1)
    chosen = np.column_stack([np.zeros(num_questions, dtype=np.int64), chosen])
    codes = np.column_stack([np.full(num_questions, vectorised.UNREADABLE), votes.code])
    at_budget = chosen[:, np.minimum(budgets, width)]
    return vectorised.outcome_of_budgets(np.take_along_axis(codes, at_budget, axis=1).T, budgets, pool.length)


@dataclass(frozen=True)
class BestOfN:
    """Return the answer of the most confident sample in the budget, the first one on ties.

    Samples that are unreadable or lack the confidence are never chosen. The verdict's confidence is that of the chosen
    sample.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence to compare.

    Reference:
        Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168; with the model's own confidence:
        Huang et al., arXiv 2503.00031.
    """

    name: ClassVar[str] = "best_of_n"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        check_positive(self.max_samples, "max_samples")
        base.check_confidence_name(self.confidence)

    def solve(self, question: Question) -> base.Solving:
        samples = yield base.Ask(self.max_samples)
        cast = base.cast_votes(samples, self.confidence)
        answer, best = max(cast, key=itemgetter(1)) if cast else (None, None)
        return base.make_verdict(question, samples, answer, confidence=best, stopped_early=False)

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[int]) -> vectorised.CurveOutcome:
        return _best(pool, grid)


@dataclass(frozen=True)
class StandardisedVoting(_Vote):
    """Vote over all samples of the budget with the weights ``w_i = exp((c_i - mean) / std)``.

    c_i is the confidence in sample i, any real number; mean and standard deviation are taken over the question's votes
    within the budget.

    With ``token_steadiness`` these are SASC's weights by the spread of token entropies, with ``mean_logprob`` those by
    certainty.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence.

    Reference:
        SASC's voting weights, `run_evaluation.py` of Multi-step Test-time Training with Data Selection.
    """

    name: ClassVar[str] = "standardised"

    max_samples: int = 16
    confidence: str = "mean_logprob"

    def weights(self, confidence: Floats) -> Floats:
        return masked_standardised_weights(confidence)


@dataclass(frozen=True)
class PassAtN:
    """Return the first *correct* answer within the budget, or the first readable one if none is correct.

    An oracle: it reads the reference, so it is an upper bound for any choice among these samples and cannot answer
    questions. It has no confidence.
    """

    name: ClassVar[str] = "pass_at_n"
    grid_parameter: ClassVar[str] = "max_samples"
    confidence: ClassVar[None] = None

    max_samples: int = 16

    def __post_init__(self) -> None:
        check_positive(self.max_samples, "max_samples")

    def solve(self, question: Question) -> base.Solving:
        samples = yield base.Ask(self.max_samples)
        readable = [sample for sample in samples if sample.answer is not None]
        right = [sample for sample in readable if sample.correct]
        answer = next((sample.answer for sample in right + readable), None)
        return base.make_verdict(question, samples, answer, confidence=None, stopped_early=False)

    def curve(self, pool: vectorised.PoolArrays, grid: Sequence[int]) -> vectorised.CurveOutcome:
        return _best(replace(pool, confidence=pool.correct.astype(np.float64)), grid)
