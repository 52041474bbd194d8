"""Strategies that draw the whole budget at once: plain and weighted votes, best of N, and an oracle."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.inference.base import (
    Ask,
    Solving,
    add_up,
    check_budget,
    check_confidence_name,
    check_optional_confidence_name,
    make_verdict,
    vote_at_once,
    vote_confidence,
    weigh_votes,
)
from selfcal_lightning.inference.vectorised import (
    UNREADABLE,
    CurveOutcome,
    PoolArrays,
    Votes,
    as_budgets,
    first_crossing,
    leaders_at,
    outcome_of_budgets,
    power_of_two,
    vote_leader,
    votes_of,
)
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.consistency import masked_standardised_weights
from selfcal_lightning.records import Question, Sample


def _votes(pool: PoolArrays, grid: Sequence[int], *, weighted: bool = True) -> tuple[Integers, Votes]:
    """Return the budgets of ``grid`` and the votes within the largest of them."""
    budgets = as_budgets(grid)
    return budgets, votes_of(pool, weighted=weighted, width=int(budgets.max(initial=0)))


class _WeighedVote(ABC):
    """Draws the whole budget at once and votes; subclasses turn confidences into weights."""

    max_samples: int
    confidence: str

    def __post_init__(self) -> None:
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)

    @abstractmethod
    def weights(self, confidence: Floats) -> Floats:
        """Return the weights of a question's N >= 1 votes [N]."""

    def weigh(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return the weight of each answer in order of first appearance."""
        cast = [(s.answer, value) for s in samples if (value := vote_confidence(s, self.confidence)) is not None]
        weights = self.weights(np.array([value for _, value in cast])).tolist() if cast else []
        return add_up((str(answer), weight) for (answer, _), weight in zip(cast, weights, strict=True))

    def solve(self, question: Question) -> Solving:
        """Draw the whole budget at once and vote."""
        return vote_at_once(question, self.max_samples, self.weigh)


@dataclass(frozen=True)
class SelfConsistency:
    """Vote over all samples of the budget: argmax over answers a of ``sum_{i: y_i = a} w_i``.

    The weight w_i is 1, or the sample's confidence c_i where one is named. Samples that are unreadable or lack the
    confidence do not vote. If all weights are 0, the first answer seen wins. The verdict's confidence is the
    winner's share of the weight.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence that weights the votes; None counts them.

    Example:
        >>> SelfConsistency(max_samples=8, confidence="p_true").name
        'self_consistency'

    Reference:
        Wang et al., Self-Consistency Improves Chain of Thought Reasoning, arXiv 2203.11171; weighted by calibrated
        confidence: Huang et al., arXiv 2503.00031.
    """

    name: ClassVar[str] = "self_consistency"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str | None = None

    def __post_init__(self) -> None:
        check_budget(self.max_samples)
        check_optional_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Draw the whole budget at once and vote."""
        return vote_at_once(question, self.max_samples, partial(weigh_votes, confidence=self.confidence))

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets, votes = _votes(pool, grid, weighted=self.confidence is not None)
        return outcome_of_budgets(leaders_at(votes, budgets), budgets, pool.length)


# Far below what separates any two confidences, and far above what overflows.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class CISC(_WeighedVote):
    """Vote over all samples of the budget with the weights ``w_i = exp(c_i / T) / sum_j exp(c_j / T)``.

    c_i is the confidence in sample i, any real number, and T the temperature: a small T approaches best-of-N, a large T
    the plain majority. The sum runs over the question's votes; samples that are unreadable or lack the confidence are
    left out. The verdict's confidence is the winner's share of the weight.

    Attributes:
        temperature: T, in units of the confidence. Tune it for each model and confidence on held-out questions, as the
            paper does.
        max_samples: Samples to draw.
        confidence: Name of the confidence.

    Example:
        >>> CISC(temperature=0.5)
        CISC(temperature=0.5, max_samples=16, confidence='p_true')

    Reference:
        Taubenfeld et al., Confidence Improves Self-Consistency in LLMs, arXiv 2502.06233, section 3.
    """

    name: ClassVar[str] = "cisc"
    grid_parameter: ClassVar[str] = "max_samples"

    temperature: float = 0.5
    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        is_number = isinstance(self.temperature, int | float) and not isinstance(self.temperature, bool)
        if not is_number or not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise InputError(
                f"Expected `temperature` to be a number of at least {MIN_TEMPERATURE:g}, but got {self.temperature!r}."
            )
        super().__post_init__()

    def weights(self, confidence: Floats) -> Floats:
        """Return the weights, scaled so that the largest does not underflow."""
        mantissa, exponent = _split_exp(confidence, self.temperature)
        return np.asarray(mantissa * power_of_two(exponent - exponent.max()))

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets, votes = _votes(pool, grid)
        mantissa, exponent = _split_exp(votes.weight, self.temperature)
        weighted = replace(votes, weight=np.where(votes.is_vote, mantissa, 0.0), exponent=exponent)
        return outcome_of_budgets(leaders_at(weighted, budgets), budgets, pool.length)


def _split_exp(confidence: Floats, temperature: float) -> tuple[Floats, Integers]:
    """Return m in [1, 2) and e with ``exp(confidence / temperature) = m * 2 ** e``.

    Subtracting a question's largest exponent is then exact, so votes over the first n samples and over all of them use
    the same mantissas.
    """
    power = confidence / (temperature * math.log(2.0))
    exponent = np.floor(power)
    return np.exp2(power - exponent), exponent.astype(np.int64)


MAX_POWER = 100.0


@dataclass(frozen=True)
class BordaVoting(_WeighedVote):
    """Vote over all samples of the budget with the weights ``w_i = (N - rank_i + 1) ** p``.

    rank_i is the rank of sample i by confidence, 1 for the highest, ties to the first seen; N is the number of votes.
    Samples that are unreadable or lack the confidence do not vote. p = 0 is the majority, a large p best-of-N. Only the
    order of the confidences matters, so they may be on any scale. The verdict's
    confidence is the winner's share of the weight.

    Attributes:
        power: The power p, in [0, 100].
        max_samples: Samples to draw.
        confidence: Name of the confidence that ranks the samples.

    Example:
        >>> BordaVoting(power=1.0)
        BordaVoting(power=1.0, max_samples=16, confidence='p_true')

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
    """

    name: ClassVar[str] = "borda"
    grid_parameter: ClassVar[str] = "max_samples"

    power: float = 0.5
    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        is_number = isinstance(self.power, int | float) and not isinstance(self.power, bool)
        if not is_number or not 0.0 <= self.power <= MAX_POWER:
            raise InputError(f"Expected `power` to be a number in [0, {MAX_POWER:g}], but got {self.power!r}.")
        super().__post_init__()

    def weights(self, confidence: Floats) -> Floats:
        """Return each vote's points to the power."""
        by_rank = np.argsort(-confidence, kind="stable")  # ties keep their order
        points = np.empty(len(confidence), dtype=np.int64)
        points[by_rank] = np.arange(len(confidence), 0, -1)
        return np.array([float(number) ** self.power for number in points.tolist()])

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets, votes = _votes(pool, grid)
        num_questions, width = votes.code.shape
        scores = np.where(votes.is_vote, votes.weight, np.nan).T
        # Python's power, as in `weights`: NumPy's may differ in the last bit and turn a tie.
        weight_of_points = np.array([float(points) ** self.power for points in range(width + 1)])
        points = np.zeros((width, num_questions), dtype=np.int64)
        leaders = np.full((width + 1, num_questions), UNREADABLE, dtype=np.int32)
        wanted = set(np.minimum(budgets, width).tolist())
        for number in range(width):
            _admit(scores, points, number)
            if number + 1 in wanted:
                leaders[number + 1] = vote_leader(votes, weight_of_points[points[: number + 1]].T)
        return outcome_of_budgets(leaders[np.minimum(budgets, width)], budgets, pool.length)


def _admit(scores: Floats, points: Integers, number: int) -> None:
    """Give sample ``number`` its points, and each earlier vote that ranks above it one more [W, Q]; nan is no vote.

    A vote's points are N - rank + 1, one more than the number of votes below it; it ranks above later equals.
    """
    earlier, new = scores[:number], scores[number]
    points[:number] += earlier >= new
    points[number] = 1 + np.count_nonzero(earlier < new, axis=0)


@dataclass(frozen=True)
class BestOfN:
    """Return the answer of the most confident sample in the budget, the first one on ties.

    Samples that are unreadable or lack the confidence are never chosen. The verdict's confidence is that of the chosen
    sample.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence to compare.

    Example:
        >>> BestOfN(max_samples=4)
        BestOfN(max_samples=4, confidence='p_true')

    Reference:
        Cobbe et al., Training Verifiers to Solve Math Word Problems, arXiv 2110.14168; with the model's own confidence:
        Huang et al., arXiv 2503.00031.
    """

    name: ClassVar[str] = "best_of_n"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str = "p_true"

    def __post_init__(self) -> None:
        check_budget(self.max_samples)
        check_confidence_name(self.confidence)

    def solve(self, question: Question) -> Solving:
        """Draw the whole budget at once and take the best."""
        samples = yield Ask(self.max_samples)
        answer, best = None, None
        for sample in samples:
            value = vote_confidence(sample, self.confidence)
            if value is not None and (best is None or value > best):
                answer, best = sample.answer, value
        return make_verdict(question, samples, answer, confidence=best, stopped_early=False)

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets, votes = _votes(pool, grid)
        num_questions, width = votes.code.shape
        scores = np.where(votes.is_vote, votes.weight, -np.inf)
        # Column n holds what the first n samples say; before any vote the score is -inf and the best sample is none.
        best = np.maximum.accumulate(np.column_stack([np.full(num_questions, -np.inf), scores]), axis=1)
        is_new = best[:, 1:] > best[:, :-1]
        chosen = np.maximum.accumulate(np.where(is_new, np.arange(1, width + 1), 0), axis=1)
        chosen = np.column_stack([np.zeros(num_questions, dtype=np.int64), chosen])
        codes = np.column_stack([np.full(num_questions, UNREADABLE), votes.code])
        at_budget = chosen[:, np.minimum(budgets, width)]
        return outcome_of_budgets(np.take_along_axis(codes, at_budget, axis=1).T, budgets, pool.length)


@dataclass(frozen=True)
class StandardisedVoting(_WeighedVote):
    """Vote over all samples of the budget with the weights ``w_i = exp((c_i - mean) / std)``.

    c_i is the confidence in sample i, any real number; mean and standard deviation are taken over the question's votes
    within the budget. Samples that are unreadable or lack the confidence do not vote. The verdict's confidence is the
    winner's share of the weight.

    With ``token_steadiness`` these are SASC's weights by the spread of token entropies, with ``mean_logprob`` those by
    certainty.

    Attributes:
        max_samples: Samples to draw.
        confidence: Name of the confidence.

    Example:
        >>> StandardisedVoting(max_samples=8)
        StandardisedVoting(max_samples=8, confidence='mean_logprob')

    Reference:
        SASC's voting weights, `run_evaluation.py` of Multi-step Test-time Training with Data Selection.
    """

    name: ClassVar[str] = "standardised"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 16
    confidence: str = "mean_logprob"

    def weights(self, confidence: Floats) -> Floats:
        """Return the exponentials of the standardised confidences."""
        return np.asarray(masked_standardised_weights(confidence[:, None])[:, 0])

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets, votes = _votes(pool, grid)
        num_questions, width = votes.code.shape
        scores = np.where(votes.is_vote, votes.weight, np.nan).T
        leaders = np.full((width + 1, num_questions), UNREADABLE, dtype=np.int32)
        for number in set(np.minimum(budgets, width).tolist()):
            leaders[number] = vote_leader(votes, masked_standardised_weights(scores[:number]).T)
        return outcome_of_budgets(leaders[np.minimum(budgets, width)], budgets, pool.length)


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
        check_budget(self.max_samples)

    def solve(self, question: Question) -> Solving:
        """Draw the whole budget at once and look for a correct answer."""
        samples = yield Ask(self.max_samples)
        readable = [sample for sample in samples if sample.answer is not None]
        right = [sample for sample in readable if sample.correct]
        answer = next((sample.answer for sample in right + readable), None)
        return make_verdict(question, samples, answer, confidence=None, stopped_early=False)

    def curve(self, pool: PoolArrays, grid: Sequence[int]) -> CurveOutcome:
        """Return the outcome at every budget of ``grid``; equals ``solve`` on the samples in the pool's order."""
        budgets, votes = _votes(pool, grid, weighted=False)
        width = votes.code.shape[1]
        is_right = votes.is_vote & pool.correct[:, :width]
        first_right = first_crossing(is_right.astype(np.float64), [1.0])[0]
        first_readable = first_crossing(votes.is_vote.astype(np.float64), [1.0])[0]
        codes = np.column_stack([votes.code, np.full(len(pool.length), UNREADABLE)])
        rows = np.arange(len(codes))
        right, readable = codes[rows, first_right], codes[rows, first_readable]
        reach = np.minimum(budgets, width)[:, None]
        otherwise = np.where(first_readable < reach, readable, UNREADABLE)
        return outcome_of_budgets(np.where(first_right < reach, right, otherwise), budgets, pool.length)
