"""P(True): the model's answer to "is this right?" about a recorded response, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.estimators.token_ids import ResponseIds, entry_ids
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.records import QuestionSamples, normalised_p_true

if TYPE_CHECKING:
    from selfcal_lightning.prompts.chat_format import ChatFormat


class PTrue:
    """P(Yes) / (P(Yes) + P(No)) after the confidence query, in [0, 1]; the definition that generation uses.

    The sequence is prompt + response without end-of-turn + ``chat.query.suffix_ids``; the masses are sums of the full
    softmax over the exact token ids of the query. So the model that sampled a store gives again what the store holds,
    and another model gives its own view of the same responses.

    Args:
        engine: Who is asked.
        chat: Chat format of its tokenizer, with the query.
        normalised: False gives P(Yes) itself, the raw value of the paper.
    """

    name: ClassVar[str] = P_TRUE
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "engine"

    def __init__(self, engine: Engine, chat: ChatFormat, *, normalised: bool = True) -> None:
        self._engine, self._chat, self._normalised = engine, chat, normalised

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return P(True) of every sample, [question][sample].

        None stands for a sample without a response, room for it, or mass, and for one that the engine refuses.

        Raises:
            RequestsFailedError: The engine did not answer for another reason.
        """
        query = self._chat.query
        sequences = [[self._sequence(ids) for ids in entry_ids(entry, self._chat)] for entry in pool]
        distinct = list(dict.fromkeys(sequence for row in sequences for sequence in row if sequence is not None))
        masses = self._engine.next_token_probabilities(distinct, [*query.yes_ids, *query.no_ids]) if distinct else []
        found = dict(zip(distinct, map(self._read, masses), strict=True))
        return [[None if sequence is None else found[sequence] for sequence in row] for row in sequences]

    def _sequence(self, ids: ResponseIds | None) -> tuple[int, ...] | None:
        """Return prompt + response + query, or None where there is no response or the engine has no room for it."""
        if ids is None:
            return None
        sequence = (*ids.prompt, *ids.response, *self._chat.query.suffix_ids)
        return sequence if len(sequence) <= self._engine.max_context else None

    def _read(self, masses: Sequence[float] | None) -> float | None:
        if masses is None:
            return None
        number = len(self._chat.query.yes_ids)
        yes, no = sum(masses[:number]), sum(masses[number:])
        return normalised_p_true(yes, no) if self._normalised else yes
