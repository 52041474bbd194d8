"""Responses of any policy as a public reward model reads them in training: its tokens, and the ends of their steps."""

from __future__ import annotations

from dataclasses import dataclass

from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.steps import step_prefixes
from selfcal_lightning.records import Question
from selfcal_lightning.rewards.layouts import RewardEncoder, RewardInput, bare_question, common_start

_OTHER_STEP = "\u241e"  # begins like no step does


@dataclass(frozen=True, slots=True)
class WrittenResponse:
    """A question and a response with K steps.

    Attributes:
        ids: Token ids [T].
        start: How many of them any response to the question begins with.
        positions: Where the scores are read [K], rising, none before ``start``.
        prefixes: The text of the response up to the end of each step, without white space around it [K].
    """

    ids: tuple[int, ...]
    start: int
    positions: tuple[int, ...]
    prefixes: tuple[str, ...]


class RewardWriter:
    def __init__(self, encoder: RewardEncoder, steps: Steps) -> None:
        self._encoder, self._steps = encoder, steps
        self._last: tuple[str, tuple[int, ...]] | None = None

    def write(self, question: Question, text: str) -> WrittenResponse | None:
        """Return a response as the model reads it.

        None where it has no step, or question or response hold the model's separator or a special token.
        """
        steps = step_prefixes(text, self._steps)
        asked = bare_question(question)
        written = self._encoder.encode(asked, [step for step, _ in steps]) if steps else None
        if written is None:
            return None
        begun = common_start([written, RewardInput(self._other(asked), ())])
        start = min(begun, written.positions[0])
        return WrittenResponse(written.ids, start, written.positions, tuple(prefix for _, prefix in steps))

    def _other(self, question: str) -> tuple[int, ...]:
        """Return the ids of another response to a question; the last ones are kept."""
        if self._last is None or self._last[0] != question:
            other = self._encoder.encode(question, [_OTHER_STEP])
            self._last = question, () if other is None else other.ids
        return self._last[1]
