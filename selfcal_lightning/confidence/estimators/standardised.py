"""How a response stands out among those to its question: ``exp`` of standardised statistics of its tokens.

A value says nothing alone: it depends on which other responses there are, and is a weight of a vote or a criterion
within a question, never across questions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.estimators.token_statistics import TokenSteadiness
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.settings import Steps

if TYPE_CHECKING:
    from selfcal_lightning.confidence.estimators.token_reader import ResponseStatistics, TokenReader

Read = Callable[["ResponseStatistics"], float]


class _Standardised(ABC):
    """What the weights have in common; a member adds its name and the scores that are standardised.

    Args:
        tokens: Reads the tokens' statistics.
    """

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the weight of every sample, [question][sample]; None where it has no score, or no room is left."""
        found = [self._tokens.scores(pool, read) for read in self.scores()]
        return [_weights(columns) for columns in zip(*found, strict=True)]

    @abstractmethod
    def scores(self) -> Sequence[Read]:
        """Return what reads the scores of a response, each higher where it is surer; nan where there is none."""


class SteadyTokens(_Standardised):
    """``exp(-z)`` of the standard deviation of the entropies of a response's tokens: the steadier, the more."""

    name = "sasc_std"

    def scores(self) -> Sequence[Read]:
        """Return what reads minus the deviation."""
        return (TokenSteadiness.read,)


class LikelyTokens(_Standardised):
    """``exp(z)`` of the mean log-probability of a response's tokens."""

    name = "sasc_certainty"

    def scores(self) -> Sequence[Read]:
        """Return what reads the mean."""
        return (lambda statistics: statistics.tokens.logprob.mean().item(),)


class SteadySteps(_Standardised):
    """``exp(-z - z')`` of the deviations of the entropies of tokens, and of the mean entropies of steps.

    Args:
        tokens: Reads the tokens' statistics.
        steps: Where steps end; "auto" takes the coarsest rule that finds some.
    """

    name = "sasc_double"

    def __init__(self, tokens: TokenReader, *, steps: Steps = "auto") -> None:
        super().__init__(tokens)
        self._steps = steps

    def scores(self) -> Sequence[Read]:
        """Return what reads minus both deviations."""
        return TokenSteadiness.read, self._minus_step_spread

    def _minus_step_spread(self, statistics: ResponseStatistics) -> float:
        from selfcal_lightning.functional.response_certainty import span_means

        spans = self._tokens.steps(statistics.token_ids, self._steps)
        return -span_means(statistics.tokens.entropy, spans).std(correction=0).item() if spans else math.nan


def _weights(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the weight of each response to one question; None where one of its scores is unknown."""
    from selfcal_lightning.functional.standardised_weights import standardised_weights

    samples = list(zip(*columns, strict=True))
    known = [number for number, scores in enumerate(samples) if None not in scores]
    weights = standardised_weights(*([column[number] for number in known] for column in columns))
    found = dict(zip(known, weights.tolist(), strict=True))
    return [found.get(number) for number in range(len(samples))]


WEIGHTS = (SteadyTokens, LikelyTokens, SteadySteps)
