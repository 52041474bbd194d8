"""The token ids that are scored: a prompt and a response to it, from the store or encoded anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.tasks.judging import is_failed

if TYPE_CHECKING:
    from selfcal_lightning.prompts.chat_format import ChatFormat


@dataclass(frozen=True, slots=True)
class ResponseIds:
    """A prompt and a response in tokens.

    Attributes:
        prompt: Ids of the rendered prompt.
        response: Ids of the response without end-of-turn.
        encoded: Whether one of them was encoded from text, since its ids were unknown or are another tokenizer's.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    encoded: bool


def entry_ids(entry: QuestionSamples, chat: ChatFormat) -> list[ResponseIds | None]:
    """Return the ids of all samples of a question; None where a sample is no response (its request had failed).

    Recorded ids are used as they are, so that what is scored is what was sampled. Responses made elsewhere are encoded
    as a response's content, and their prompts by the chat template. So is a response whose recorded ids do not decode
    to its text: they belong to another tokenizer.
    """
    rendered: list[tuple[int, ...]] = []

    def prompt() -> tuple[int, ...]:
        if not rendered:
            rendered.append(chat.prompt_ids(entry.question.messages))
        return rendered[0]

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
