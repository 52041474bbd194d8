"""Verbalised confidence: the scales on which a model states its confidence, and how replies are parsed."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from selfcal_lightning.confidence.base import ResponseIds, entry_ids
from selfcal_lightning.data.tasks.extraction import final_part
from selfcal_lightning.engines.base import Engine, ask_for_replies
from selfcal_lightning.metrics.arrays import check_positive
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import QuestionSamples, Request, SamplingSettings, sample_seed

VERBAL_QUERY = (
    "How likely is it that your answer is correct? Reply with one probability between 0.0 (surely wrong) and 1.0 "
    "(surely correct), written as \\boxed{probability}."
)
# Ten equal intervals from 0 to 1.
WORDS = (
    "almost no chance", "highly unlikely", "chances are slight", "unlikely", "less than even", "better than even",
    "likely", "very good chance", "highly likely", "almost certain",
)  # fmt: skip
_LONGEST_BARE = 60
# One level of braces inside is enough for \text{0.9}.
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_WRAPPED = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|\\quad|[\s~$]")
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(%?)")
_BARE_REPLY = re.compile(
    r"(?:(?:my\s+)?(?:confidence|probability)(?:\s+is)?\W*?)?((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%?)\.?", re.IGNORECASE
)
_BARE_WORDS = re.compile(r"(?:(?:my\s+)?(?:confidence|probability)(?:\s+is)?\W*)?([a-z ]+?)\W*", re.IGNORECASE)


Parse = Callable[[str], float | None]


@dataclass(frozen=True)
class VerbalScale:
    """A question to the model and a parser for its reply."""

    after: str
    parse: Parse

    @property
    def before(self) -> str:
        """The same question before there is an answer."""
        asked = self.after.replace("your answer is correct", "your answer to it would be correct")
        return f"Do not answer the question yet. {asked}"


def parse_confidence(text: str) -> float | None:
    """Parse the probability stated in a reply, in [0, 1], or None."""
    return _last(text, _BARE_REPLY, _probability)


def parse_percentage(text: str) -> float | None:
    """Parse the percentage stated in a reply, as a probability in [0, 1], or None.

    A bare number is a percentage, unless it is a fraction such as 0.85, which can only be a probability.
    """
    return _last(text, _BARE_REPLY, partial(_probability, in_percent=True))


def parse_words(text: str) -> float | None:
    """Return the midpoint of the interval named by one of ``WORDS``, or a stated probability; None for neither."""
    found = _last(text, _BARE_WORDS, _word)
    return found if found is not None else parse_confidence(text)


NUMBERS = VerbalScale(VERBAL_QUERY, parse_confidence)
PERCENTAGES = VerbalScale(
    "How likely is it that your answer is correct? Reply with one percentage from 0 to 100, written as "
    "\\boxed{percentage\\%}.",
    parse_percentage,
)
_TEN = "; ".join(f"{word} ({place / 10:.1f} to {(place + 1) / 10:.1f})" for place, word in enumerate(WORDS))
TEN_WORDS = VerbalScale(
    f"How likely is it that your answer is correct? Choose one of these: {_TEN}. Reply with it, written as "
    "\\boxed{choice}.",
    parse_words,
)


def _last(text: str, bare: re.Pattern[str], read: Parse) -> float | None:
    """Return the value in the last parsable box; without boxes, the value if the reply is nothing else."""
    reply = final_part(text)
    if reply is None:
        return None
    contents = _BOXED.findall(reply)
    short = reply.strip()
    if "\\boxed" not in reply and len(short) <= _LONGEST_BARE and (match := bare.fullmatch(short)):
        contents = [match[1]]
    values = [value for content in contents if (value := read(content)) is not None]
    return values[-1] if values else None


def _probability(content: str, *, in_percent: bool = False) -> float | None:
    match = _NUMBER.fullmatch(_SPACING.sub("", _WRAPPED.sub(r"\1", content)).replace("\\%", "%"))
    if match is None:
        return None
    value, is_percentage = float(match[1]), bool(match[2])
    if in_percent and not ("." in match[1] and value <= 1.0):
        is_percentage = True
    value = value / 100.0 if is_percentage else value
    return value if value <= 1.0 else None


def _word(content: str) -> float | None:
    plain = " ".join(_WRAPPED.sub(r"\1", content).lower().strip(" .!'\"*").split())
    return (WORDS.index(plain) + 0.5) / len(WORDS) if plain in WORDS else None


Prompt = tuple[int, ...]


class Verbalized:
    """The probability of being right that the model states in words, in [0, 1] (Tian et al., arXiv 2305.14975).

    A further turn, rendered by the model's chat template with reasoning closed, asks for it after the response. A reply
    without a probability gives no confidence; it is never replaced by .5.

    Args:
        chat: Chat format of the engine's tokenizer; its own query is not used.
        query: The question; None uses the scale's own.
        max_new_tokens: Maximum length of a reply in tokens.
        attempts: How often to ask; the first reply is greedy, later ones are drawn at temperature 1.
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
        self._engine, self._chat, self._attempts, self._max_new_tokens = engine, chat, attempts, max_new_tokens
        asking = ChatFormat(chat.tokenizer, query=query or self.scale.after, prompt=chat.prompt)
        self._suffix_ids = asking.query.suffix_ids

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the stated probability of every sample; None without one, or for a sample that the engine refuses."""
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
        """Return prompt + response + question, or None without a response or without room for a full reply."""
        if ids is None:
            return None
        prompt = (*ids.prompt, *ids.response, *self._suffix_ids)
        return prompt if len(prompt) + self._max_new_tokens <= self._engine.max_context else None


class VerbalizedWords(Verbalized):
    """:class:`Verbalized` on a scale of ten phrases from "almost no chance" to "almost certain", .05 to .95."""

    name: ClassVar[str] = "verbalized_words"
    scale: ClassVar[VerbalScale] = TEN_WORDS


class VerbalizedPercent(Verbalized):
    """:class:`Verbalized` in percent."""

    name: ClassVar[str] = "verbalized_percent"
    scale: ClassVar[VerbalScale] = PERCENTAGES


def ask_for_confidences(
    engine: Engine, prompts: Mapping[Prompt, int], *, parse: Parse, attempts: int = 1, max_new_tokens: int = 128
) -> dict[Prompt, float]:
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
