r"""Verbalized confidence: the model is asked in a follow-up turn how sure it is, and answers in text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar

from selfcal_lightning.confidence.estimators.token_ids import ResponseIds, entry_ids
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.replies import ask_for_replies
from selfcal_lightning.functional.base import check_positive
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.records import QuestionSamples, Request, SamplingSettings, sample_seed
from selfcal_lightning.tasks.answers.extraction import final_part

VERBAL_QUERY = (
    "How likely is it that your answer is correct? Reply with one probability between 0.0 (surely wrong) and 1.0 "
    "(surely correct), written as \\boxed{probability}."
)
_LONGEST_BARE = 60
# One level of braces inside is enough for \text{0.9}.
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\quad|[\s~$]")
_PROBABILITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(%?)")
_BARE_REPLY = re.compile(r"(?:(?:my\s+)?(?:confidence|probability)(?:\s+is)?\W*?)?([0-9.]+\s*%?)\.?", re.IGNORECASE)


class Verbalized:
    """The probability of being right that the model states in words, in [0, 1].

    The conversation goes on after the response with a question, put by the model's own chat template with reasoning
    closed; the reply is read by :func:`parse_confidence`. A reply that names no probability gives no confidence: it is
    never replaced by .5.

    Args:
        engine: Who is asked.
        chat: Chat format of its tokenizer; its own query is not used.
        query: The question.
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

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        *,
        query: str = VERBAL_QUERY,
        max_new_tokens: int = 128,
        attempts: int = 1,
    ) -> None:
        check_positive(attempts, "attempts")
        self._engine, self._chat, self._attempts = engine, chat, attempts
        self._max_new_tokens = max_new_tokens
        self._suffix_ids = ChatFormat(chat.tokenizer, query=query).query.suffix_ids

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
        stated: dict[tuple[int, ...], float] = {}
        for attempt in range(self._attempts):
            stated |= self._ask({p: seed for p, seed in waiting.items() if p not in stated}, attempt)
        return [[None if prompt is None else stated.get(prompt) for prompt in row] for row in prompts]

    def _prompt(self, ids: ResponseIds | None) -> tuple[int, ...] | None:
        """Return prompt + response + question, or None without a response or where no full reply has room."""
        if ids is None:
            return None
        prompt = (*ids.prompt, *ids.response, *self._suffix_ids)
        return prompt if len(prompt) + self._max_new_tokens <= self._engine.max_context else None

    def _ask(self, seeds: Mapping[tuple[int, ...], int], attempt: int) -> dict[tuple[int, ...], float]:
        """Return the probabilities stated in reply to those prompts whose reply states one."""
        sampling = SamplingSettings(
            temperature=1.0 if attempt else 0.0, edt_scale=None, max_new_tokens=self._max_new_tokens
        )
        prompts = {f"verbalized/{attempt}/{number}": prompt for number, prompt in enumerate(seeds)}
        requests = [Request(name, prompt, sampling, seeds[prompt] + attempt) for name, prompt in prompts.items()]
        replies = ask_for_replies(self._engine, requests)
        values = {prompts[name]: parse_confidence(reply.text) for name, reply in replies.items()}
        return {prompt: value for prompt, value in values.items() if value is not None}


def parse_confidence(text: str) -> float | None:
    r"""Return the probability that a reply states, in [0, 1], or None.

    The last ``\boxed{}`` counts that holds a number in [0, 1] or a percentage, in ``\text{}`` and with spaces too.
    Without any box, a reply that is nothing but such a number is taken. What stands in an open reasoning block is no
    reply.

    Example:
        >>> parse_confidence(r"About \boxed{85\%}."), parse_confidence(r"\boxed{42} so \boxed{0.7}")
        (0.85, 0.7)
        >>> [parse_confidence(text) for text in (r"\boxed{1.5}", r"<think>\boxed{0.5}", "Confidence: 0.9")]
        [None, None, 0.9]
    """
    reply = final_part(text)
    if reply is None:
        return None
    candidates = _BOXED.findall(reply)
    short = reply.strip()
    if "\\boxed" not in reply and len(short) <= _LONGEST_BARE and (bare := _BARE_REPLY.fullmatch(short)):
        candidates = [bare[1]]
    values = [value for content in candidates if (value := _probability(content)) is not None]
    return values[-1] if values else None


def _probability(content: str) -> float | None:
    plain = _SPACING.sub("", _WRAPPED.sub(r"\1", content)).replace("\\%", "%")
    match = _PROBABILITY.fullmatch(plain)
    if match is None:
        return None
    value = float(match[1]) / (100.0 if match[2] else 1.0)
    return value if value <= 1.0 else None
