"""Statistics of a response's tokens under the model that is asked: how likely they were, and how sure it was of each.

The model is untempered, however the response was drawn, and the end-of-turn token is no part of the response.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.confidence.estimators.token_reader import ResponseStatistics, TokenReader


class _TokenStatistic(ABC):
    """What the statistics have in common; a member adds its name and how it is read.

    Args:
        tokens: Reads the tokens' statistics.
    """

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the statistic of every sample, [question][sample]; None where it has none, or no room is left."""
        return self._tokens.scores(pool, self.read)

    @staticmethod
    @abstractmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the statistic of a response; nan where it has no token to take a mean over."""


class SequenceLogprob(_TokenStatistic):
    """``sum_t log p(y_t | x, y_<t)`` over the response tokens, in nats; higher is better.

    Generation stores the same number with every sample.
    """

    name = LOGPROB

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the sum."""
        return statistics.logprob


class MeanLogprob(_TokenStatistic):
    """``1/n sum_t log p(y_t | x, y_<t)`` over the n response tokens, in nats; higher is better.

    Unlike the sum it does not favour short responses.
    """

    name = MEAN_LOGPROB

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the mean."""
        return statistics.logprob / statistics.num_tokens if statistics.num_tokens else math.nan


class LowestLogprob(_TokenStatistic):
    """``min_t log p(y_t | x, y_<t)``: how likely the least likely token was, in nats; higher is better."""

    name = "min_logprob"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the lowest one."""
        return statistics.tokens.logprob.min().item() if statistics.num_tokens else math.nan


class SelfCertainty(_TokenStatistic):
    """Mean ``KL(uniform || p_t)`` over the response tokens, in nats; higher is better.

    See ``functional.certainty.self_certainty``. It depends on the size of the vocabulary, so compare it within a model.

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
    """

    name = "self_certainty"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the mean divergence."""
        return statistics.certainty


class ResponseCertainty(_TokenStatistic):
    """Mean ``-1/V sum_v log p_t(v)`` over the response tokens, in nats, at least log V; higher is better.

    It is self-certainty plus log V, so that it orders responses as self-certainty does.
    """

    name = "response_certainty"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the mean cross-entropy."""
        return statistics.certainty + math.log(statistics.vocabulary_size) if statistics.num_tokens else math.nan


class TokenEntropy(_TokenStatistic):
    """*Minus* the mean entropy of the response tokens' distributions, in nats, at most 0; higher is better.

    The sign makes it a confidence: the value -0.2 says that the tokens were drawn at .2 nats of entropy on average.
    See ``functional.certainty.token_entropy`` for the entropy itself.
    """

    name = "token_entropy"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return minus the entropy."""
        return -statistics.entropy


class TokenSteadiness(_TokenStatistic):
    """*Minus* the standard deviation of the entropies of the response tokens, in nats, at most 0; higher is better.

    How unevenly a response was sure, whatever its mean. Votes that are weighed by how it stands out among the responses
    to a question are those of SASC: the strategy ``standardised``.
    """

    name = "token_steadiness"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return minus the deviation."""
        return -statistics.tokens.entropy.std(correction=0).item() if statistics.num_tokens else math.nan


class LowestGroupConfidence:
    """Confidence of the least sure stretch of a response, in nats; higher is better.

    The confidence of a token is the mean negative log-probability of the 20 likeliest ones at its place; that of a
    stretch is the mean over its tokens. A response that is shorter than ``window`` is one stretch.

    Args:
        tokens: Reads the tokens' statistics.
        window: Tokens of a stretch.
        lowest: Mean of which share of the stretches, the least sure ones, in [0, 1]; at least one is taken.

    Raises:
        ValueError: If a setting is out of its range.

    Reference:
        Fu et al., Deep Think with Confidence, arXiv 2508.15260.
    """

    name: ClassVar[str] = "lowest_group_confidence"
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader, *, window: int = 2048, lowest: float = 0.0) -> None:
        check_positive(window, "window")
        if not 0.0 <= lowest <= 1.0:
            raise InputError(f"Expected `lowest` to lie in [0, 1], but got {lowest}.")
        self._tokens, self._window, self._lowest = tokens, window, lowest

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None where it has no token, or no room is left."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the confidence of one response; nan without tokens."""
        from selfcal_lightning.functional.response_certainty import lowest_group_confidence

        found = lowest_group_confidence(statistics.top_confidence, window=self._window, share=self._lowest)
        return math.nan if found is None else found
