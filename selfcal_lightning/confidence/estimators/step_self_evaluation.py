"""Step-wise self-evaluation: the confidence query put after each step of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.estimators.p_true import p_true_of, sequence_behind
from selfcal_lightning.confidence.estimators.token_ids import ResponseIds, entry_ids
from selfcal_lightning.confidence.estimators.token_pieces import step_ends_of
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.functional.steps import Aggregation, aggregate
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.settings import Steps

if TYPE_CHECKING:
    from selfcal_lightning.prompts.chat_format import ChatFormat


class StepSelfEvaluation:
    """P(True) after each step of a response, in one number; that after the last step is P(True) of the response.

    It asks of an unfinished response whether it is right, which is no probability of anything that can be observed.

    Args:
        engine: Who is asked; engines that share prefixes read a response once for all its steps.
        chat: Chat format of its tokenizer, with the query.
        steps: Where steps end; "auto" takes the coarsest rule that finds some.
        over_steps: How the values of the steps become one.

    Raises:
        ValueError: If ``over_steps`` is unknown.
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
        """Return prompt + the response up to each step + query; none where the longest has no room."""
        if ids is None:
            return []
        ends = step_ends_of(self._chat.decode, ids.response, self._steps)
        ones = [sequence_behind(ids, self._chat.query, end=end) for end in ends]
        return ones if ones and len(ones[-1]) <= self._engine.max_context else []

    def _score(self, values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return aggregate(known, self._over_steps) if len(known) == len(values) else None
