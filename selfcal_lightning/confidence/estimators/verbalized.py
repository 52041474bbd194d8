r"""Verbalized confidence: the model is asked in a follow-up turn how sure it is, and answers in text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from selfcal_lightning.confidence.estimators.token_ids import ResponseIds, entry_ids
from selfcal_lightning.confidence.estimators.verbal_scales import (
    NUMBERS,
    PERCENTAGES,
    TEN_WORDS,
    VERBAL_QUERY,
    VerbalScale,
    parse_confidence,
)
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.replies import ask_for_replies
from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.records import QuestionSamples, Request, SamplingSettings, sample_seed

__all__ = [
    "VERBAL_QUERY", "Verbalized", "VerbalizedPercent", "VerbalizedWords", "ask_for_confidences", "parse_confidence",
]  # fmt: skip

Prompt = tuple[int, ...]


class Verbalized:
    """The probability of being right that the model states in words, in [0, 1].

    The conversation goes on after the response with a question, put by the model's own chat template with reasoning
    closed; the reply is read on the scale of the class. A reply that names no probability gives no confidence: it is
    never replaced by .5.

    Args:
        engine: Who is asked.
        chat: Chat format of its tokenizer; its own query is not used.
        query: The question; None is that of the scale.
        max_new_tokens: Longest reply.
        attempts: How often to ask; the first reply is greedy, later ones are drawn at temperature 1.

    Raises:
        ValueError: If ``attempts`` is not positive.

    Reference:
        Tian et al., Just Ask for Calibration, arXiv 2305.14975.
    """

    name: ClassVar[str] = "verbalized"
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "engine"
    scale: ClassVar[VerbalScale] = NUMBERS

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        *,
        query: str | None = None,
        max_new_tokens: int = 128,
        attempts: int = 1,
    ) -> None:
        check_positive(attempts, "attempts")
        self._engine, self._chat, self._attempts = engine, chat, attempts
        self._max_new_tokens = max_new_tokens
        self._suffix_ids = ChatFormat(chat.tokenizer, query=query or self.scale.after).query.suffix_ids

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the stated probability of every sample, [question][sample].

        None stands for a reply that states none, and for a sample that the engine refuses.

        Raises:
            RequestsFailedError: The engine did not answer for another reason.
        """
        prompts = [[self._prompt(ids) for ids in entry_ids(entry, self._chat)] for entry in pool]
        # Equal responses are asked about once; a draw's seed is that of the first of them.
        waiting: dict[tuple[int, ...], int] = {}
        for entry, row in zip(pool, prompts, strict=True):
            for sample, prompt in zip(entry.samples, row, strict=True):
                if prompt is not None:
                    waiting.setdefault(prompt, sample_seed(0, sample.round, sample.question_id, sample.index))
        stated = ask_for_confidences(
            self._engine, waiting, parse=self.scale.parse, attempts=self._attempts, max_new_tokens=self._max_new_tokens
        )
        return [[None if prompt is None else stated.get(prompt) for prompt in row] for row in prompts]

    def _prompt(self, ids: ResponseIds | None) -> tuple[int, ...] | None:
        """Return prompt + response + question, or None without a response or where no full reply has room."""
        if ids is None:
            return None
        prompt = (*ids.prompt, *ids.response, *self._suffix_ids)
        return prompt if len(prompt) + self._max_new_tokens <= self._engine.max_context else None


class VerbalizedWords(Verbalized):
    """The same on a scale of ten words, from "almost no chance" to "almost certain", each the middle of its tenth."""

    name: ClassVar[str] = "verbalized_words"
    scale: ClassVar[VerbalScale] = TEN_WORDS


class VerbalizedPercent(Verbalized):
    """The same in percent."""

    name: ClassVar[str] = "verbalized_percent"
    scale: ClassVar[VerbalScale] = PERCENTAGES


def ask_for_confidences(
    engine: Engine,
    prompts: Mapping[Prompt, int],
    *,
    parse: Callable[[str], float | None],
    attempts: int = 1,
    max_new_tokens: int = 128,
) -> dict[Prompt, float]:
    """Return the probabilities stated in reply to prompts, of those whose reply states one.

    Args:
        engine: Who is asked.
        prompts: Token ids that end with the question, and the seed of the draws for each.
        parse: Returns the probability that a reply states, or None.
        attempts: How often to ask; the first reply is greedy, later ones are drawn at temperature 1.
        max_new_tokens: Longest reply.

    Raises:
        RequestsFailedError: The engine did not answer, for another reason than that it refuses a prompt by itself.
    """
    stated: dict[Prompt, float] = {}
    for attempt in range(attempts):
        sampling = SamplingSettings(temperature=1.0 if attempt else 0.0, edt_scale=None, max_new_tokens=max_new_tokens)
        names = {f"verbalized/{attempt}/{at}": one for at, one in enumerate(p for p in prompts if p not in stated)}
        requests = [Request(name, prompt, sampling, prompts[prompt] + attempt) for name, prompt in names.items()]
        if not requests:
            break
        for name, reply in ask_for_replies(engine, requests).items():
            if (value := parse(reply.text)) is not None:
                stated[names[name]] = value
    return stated
