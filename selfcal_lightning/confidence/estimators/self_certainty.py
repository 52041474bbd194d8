"""How sure the model was of each token of a response, by its whole next-token distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.confidence.estimators.token_reader import TokenReader


class SelfCertainty:
    """Mean ``KL(uniform || p_t)`` over the response tokens without end-of-turn, in nats; higher is better.

    See ``functional.certainty.self_certainty``. It depends on the size of the vocabulary, so compare it within a model.

    Args:
        tokens: Reads the tokens' statistics.

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
    """

    name: ClassVar[str] = "self_certainty"
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the certainty of every sample, [question][sample]; None without a token or room for the response."""
        return self._tokens.scores(pool, lambda statistics: statistics.certainty)


class TokenEntropy:
    """*Minus* the mean entropy of the response tokens' distributions, in nats, at most 0; higher is better.

    The sign makes it a confidence: the value -0.2 says that the tokens were drawn at .2 nats of entropy on average.
    See ``functional.certainty.token_entropy`` for the entropy itself.

    Args:
        tokens: Reads the tokens' statistics.
    """

    name: ClassVar[str] = "token_entropy"
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return minus the entropy of every sample, [question][sample]; None without a token or room for it."""
        return self._tokens.scores(pool, lambda statistics: -statistics.entropy)
