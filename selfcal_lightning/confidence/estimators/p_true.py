"""P(True): the model's answer to "is this right?" about a recorded response, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.estimators.token_ids import ResponseIds, entry_ids
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.records import ConfidenceQuery, QuestionSamples, normalised_p_true

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
        found = p_true_of(self._engine, distinct, query, normalised=self._normalised)
        return [[None if sequence is None else found[sequence] for sequence in row] for row in sequences]

    def _sequence(self, ids: ResponseIds | None) -> tuple[int, ...] | None:
        """Return prompt + response + query, or None where there is no response or the engine has no room for it."""
        if ids is None:
            return None
        sequence = sequence_behind(ids, self._chat.query)
        return sequence if len(sequence) <= self._engine.max_context else None


def sequence_behind(ids: ResponseIds, query: ConfidenceQuery, *, end: int | None = None) -> tuple[int, ...]:
    """Return prompt + the first ``end`` tokens of the response (None: all) + query."""
    return (*ids.prompt, *ids.response[:end], *query.suffix_ids)


def p_true_of(
    engine: Engine, sequences: Sequence[tuple[int, ...]], query: ConfidenceQuery, *, normalised: bool = True
) -> dict[tuple[int, ...], float | None]:
    """Return P(True) behind each of different sequences that end with the query.

    None stands for a sequence without mass, and for one that the engine refuses.

    Raises:
        RequestsFailedError: The engine did not answer for another reason.
    """
    wanted = [*query.yes_ids, *query.no_ids]
    masses = engine.next_token_probabilities(list(sequences), wanted) if sequences else []
    found: dict[tuple[int, ...], float | None] = {}
    for sequence, row in zip(sequences, masses, strict=True):
        if row is None:
            found[sequence] = None
            continue
        number = len(query.yes_ids)
        yes, no = sum(row[:number]), sum(row[number:])
        found[sequence] = normalised_p_true(yes, no) if normalised else yes
    return found
