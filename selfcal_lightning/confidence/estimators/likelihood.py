"""Log-probability of a response under the model that is asked, whole and per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.confidence.estimators.token_reader import TokenReader


class SequenceLogprob:
    """``sum_t log p(y_t | x, y_<t)`` over the response tokens without end-of-turn, in nats; higher is better.

    The model is untempered, however the response was drawn. Generation stores the same number with every sample.

    Args:
        tokens: Reads the tokens' statistics.
    """

    name: ClassVar[str] = LOGPROB
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the log-probability of every sample, [question][sample]; None without a response or room for it."""
        return self._tokens.scores(pool, lambda statistics: statistics.logprob)


class MeanLogprob:
    """``1/n sum_t log p(y_t | x, y_<t)`` over the n response tokens without end-of-turn, in nats; higher is better.

    Unlike the sum it does not favour short responses.

    Args:
        tokens: Reads the tokens' statistics.
    """

    name: ClassVar[str] = MEAN_LOGPROB
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the mean of every sample, [question][sample]; None without a token or room for the response."""
        return self._tokens.scores(pool, lambda s: s.logprob / s.num_tokens if s.num_tokens else float("nan"))
