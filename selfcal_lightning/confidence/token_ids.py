"""The text of each token of a response, and the tokens of each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.steps import Span, ends_of, spans_of, token_spans
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.models.chat_format import Decode, token_pieces
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.models.chat_format import ChatFormat


@dataclass(frozen=True, slots=True)
class ResponseIds:
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    encoded: bool


def entry_ids(entry: QuestionSamples, chat: ChatFormat) -> list[ResponseIds | None]:
    """Return the token ids of a question's samples; None for failed requests."""
    prompt = cache(lambda: chat.prompt_ids(entry.question.messages))
    found: list[ResponseIds | None] = []
    for sample in entry.samples:
        if is_failed(sample):
            found.append(None)
        elif sample.token_ids is None or chat.decode(sample.token_ids) != sample.text:
            found.append(ResponseIds(prompt(), chat.response_ids(sample.text), encoded=True))
        elif entry.prompt_ids is None:
            found.append(ResponseIds(prompt(), sample.token_ids, encoded=True))
        else:
            found.append(ResponseIds(entry.prompt_ids, sample.token_ids, encoded=False))
    return found


def steps_of(decode: Decode, ids: Sequence[int], steps: Steps) -> list[Span]:
    """Return the tokens of each step of a response, without headings; empty without text."""
    pieces = token_pieces(decode, ids)
    return token_spans(pieces, spans_of("".join(pieces), steps))


def step_ends_of(decode: Decode, ids: Sequence[int], steps: Steps) -> list[int]:
    """Return the number of tokens up to the end of each step, ascending; the last covers the whole response."""
    ends = ends_of(token_pieces(decode, ids), steps)
    return [*ends[:-1], len(ids)] if ends else []
