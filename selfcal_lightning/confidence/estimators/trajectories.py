"""Chain-of-Embedding as confidences: how the mean hidden state of a response moves from layer to layer.

The mean is over the positions that predict the response's tokens, the first of which is the last one of the prompt.
On arithmetic that was measured here it chooses among responses worse than chance (see the guide of selection); it is
offered for comparison.

Reference:
    Wang et al., Latent Space Chain-of-Embedding Enables Output-free LLM Self-Evaluation, arXiv 2410.13640.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.functional.trajectories import ChainOfEmbedding, chain_of_embedding
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.confidence.estimators.token_reader import ResponseStatistics, TokenReader


class _Trajectory(ABC):
    """What they have in common; a member adds its name, whether it normalises, and which number it takes.

    Args:
        tokens: Reads the states.
    """

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"
    normalize: ClassVar[bool] = True

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens
        tokens.watch(None)

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the score of every sample, [question][sample]; None where its trajectory is not defined."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the score of one response; nan without tokens or where its trajectory is not defined."""
        if not statistics.num_tokens:
            return math.nan
        chain = chain_of_embedding(statistics.trajectories[None][0], normalize=self.normalize)
        return math.nan if chain is None else self.pick(chain)

    @staticmethod
    @abstractmethod
    def pick(chain: ChainOfEmbedding) -> float:
        """Return the number."""


class _Difference(_Trajectory):
    @staticmethod
    def pick(chain: ChainOfEmbedding) -> float:
        """Return CoE-R."""
        return chain.coe_r


class _Plane(_Trajectory):
    @staticmethod
    def pick(chain: ChainOfEmbedding) -> float:
        """Return CoE-C."""
        return chain.coe_c


class CoeR(_Difference):
    """CoE-R: mean length of the steps between layers minus their mean angle, both in units of the whole way."""

    name = "coe_r"


class CoeC(_Plane):
    """CoE-C: length of the mean step in the plane of lengths and angles, both in units of the whole way."""

    name = "coe_c"


class RawCoeR(_Difference):
    """CoE-R of lengths and angles as they are; it follows the scale of the model's states."""

    name = "coe_r_raw"
    normalize = False


class RawCoeC(_Plane):
    """CoE-C of lengths and angles as they are; it follows the scale of the states and the length of the response."""

    name = "coe_c_raw"
    normalize = False


TRAJECTORIES: tuple[type[_Trajectory], ...] = (CoeR, CoeC, RawCoeR, RawCoeC)
