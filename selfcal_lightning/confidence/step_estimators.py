"""Step confidences: a metric of each step's tokens, combined with their probability.

A step scores ``metric^(1 - weight) * exp(mean log p)^weight``. Its tokens are found by character positions; headings
and white space between steps belong to no step. See ``confidence.certainty``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.estimators import p_true_of, sequence_behind
from selfcal_lightning.confidence.token_ids import ResponseIds, entry_ids, step_ends_of
from selfcal_lightning.confidence.trajectories import ChainOfEmbedding, chain_of_embedding
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Aggregation, Steps
from selfcal_lightning.data.steps import Span, aggregate
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from torch import Tensor

    from selfcal_lightning.confidence.token_reader import ResponseStatistics, TokenReader
    from selfcal_lightning.models.chat_format import ChatFormat


class _StepStatistic(ABC):
    """Base of the step estimators; subclasses add a name and the step scores."""

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(
        self, tokens: TokenReader, *, steps: Steps = "auto", weight: float = 0.5, over_steps: Aggregation = "mean"
    ) -> None:
        if not 0.0 <= weight <= 1.0:
            raise InputError(f"Expected `weight` to lie in [0, 1], but got {weight}.")
        aggregate((), over_steps)  # which knows the names
        self._tokens, self._steps, self._weight, self._over_steps = tokens, steps, weight, over_steps

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the score of every sample, [question][sample]; None if it has no step or is too long for the model."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the score of a response; nan if it has no step, or a step without a score."""
        spans = self._tokens.steps(statistics.token_ids, self._steps)
        found = self.of_steps(statistics, spans) if spans else None
        score = None if found is None else aggregate(found.tolist(), self._over_steps)
        return math.nan if score is None else score

    @abstractmethod
    def of_steps(self, statistics: ResponseStatistics, spans: Sequence[Span]) -> Tensor | None:
        """Return the score of each step [S]; None where they have none."""


class StepCertainty(_StepStatistic):
    """The metric is the mean of ``-1/V sum_v log p(v)`` over the step's tokens: self-certainty plus log V."""

    name = "step_certainty"

    def of_steps(self, statistics: ResponseStatistics, spans: Sequence[Span]) -> Tensor:
        """Return the score of each step, at least 0 [S]."""
        from selfcal_lightning.confidence.certainty import step_certainty

        return step_certainty(statistics.tokens, spans, vocabulary_size=statistics.vocabulary_size, weight=self._weight)


class StepEntropy(_StepStatistic):
    """The metric is one minus the mean entropy of the step's tokens in units of log V, in [0, 1]."""

    name = "step_entropy"

    def of_steps(self, statistics: ResponseStatistics, spans: Sequence[Span]) -> Tensor:
        """Return the score of each step, in [0, 1] [S]."""
        from selfcal_lightning.confidence.certainty import step_entropy

        return step_entropy(statistics.tokens, spans, vocabulary_size=statistics.vocabulary_size, weight=self._weight)


class StepTrajectory(_StepStatistic):
    """The metric is CoE-C of the step's mean states, with unnormalised lengths and angles."""

    name = "step_coe_c"
    normalize: ClassVar[bool] = False

    def __init__(
        self, tokens: TokenReader, *, steps: Steps = "auto", weight: float = 0.5, over_steps: Aggregation = "mean"
    ) -> None:
        super().__init__(tokens, steps=steps, weight=weight, over_steps=over_steps)
        tokens.watch(steps)

    def of_steps(self, statistics: ResponseStatistics, spans: Sequence[Span]) -> Tensor | None:
        """Return the score of each step [S]; None where a trajectory is not defined."""
        from selfcal_lightning.confidence.certainty import span_means

        found = [chain_of_embedding(means, normalize=self.normalize) for means in statistics.trajectories[self._steps]]
        chains = [chain for chain in found if chain is not None]
        return (
            self.of_chains(chains, span_means(statistics.tokens.logprob, spans)) if len(chains) == len(found) else None
        )

    def of_chains(self, chains: Sequence[ChainOfEmbedding], logprob: Tensor) -> Tensor:
        """Return the score of each step, at least 0 [S], from its trajectory and its mean log-probability [S]."""
        from selfcal_lightning.confidence.certainty import step_scores

        return step_scores(logprob.new_tensor([chain.coe_c for chain in chains]), logprob, weight=self._weight)


class StepTrajectoryNormalised(StepTrajectory):
    """The metric is CoE-C of the step's mean states, normalised by the step's total movement."""

    name = "step_coe_c_normalised"
    normalize = True


class StepDifference(StepTrajectory):
    """Unnormalised CoE-R of the step's mean states. It may be negative, so it is not combined with a probability."""

    name = "step_coe_r"

    def of_chains(self, chains: Sequence[ChainOfEmbedding], logprob: Tensor) -> Tensor:
        """Return CoE-R of each step [S]."""
        return logprob.new_tensor([chain.coe_r for chain in chains])


class StepDifferenceNormalised(StepDifference):
    """CoE-R of the step's mean states, normalised by the step's total movement."""

    name = "step_coe_r_normalised"
    normalize = True


STEP_TRAJECTORIES: tuple[type[StepTrajectory], ...] = (
    StepTrajectory, StepTrajectoryNormalised, StepDifference, StepDifferenceNormalised,
)  # fmt: skip


class StepSelfEvaluation:
    """P(True) after each step of a response, combined into one number.

    After the last step it is P(True) of the response; before, it asks whether an unfinished response is right,
    which is not the probability of an observable event.
    """

    name: ClassVar[str] = "step_self_evaluation"
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "engine"

    def __init__(
        self, engine: Engine, chat: ChatFormat, *, steps: Steps = "auto", over_steps: Aggregation = "mean"
    ) -> None:
        aggregate((), over_steps)  # which knows the names
        self._engine, self._chat, self._steps, self._over_steps = engine, chat, steps, over_steps

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the score of every sample, [question][sample].

        None stands for a sample without a response or a step, without room for it, or without mass after a step.

        Raises:
            RequestsFailedError: The engine did not answer.
        """
        sequences = [[self._sequences(ids) for ids in entry_ids(entry, self._chat)] for entry in pool]
        distinct = list(dict.fromkeys(one for row in sequences for ones in row for one in ones))
        found = p_true_of(self._engine, distinct, self._chat.query)
        return [[self._score([found[one] for one in ones]) for ones in row] for row in sequences]

    def _sequences(self, ids: ResponseIds | None) -> list[tuple[int, ...]]:
        """Return prompt + response up to each step + query; empty if the longest exceeds the context."""
        if ids is None:
            return []
        ends = step_ends_of(self._chat.decode, ids.response, self._steps)
        ones = [sequence_behind(ids, self._chat.query, end=end) for end in ends]
        return ones if ones and len(ones[-1]) <= self._engine.max_context else []

    def _score(self, values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return aggregate(known, self._over_steps) if len(known) == len(values) else None
