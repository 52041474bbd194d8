"""The interface of estimators, how a confidence is read from a sample, and the tokens of a response."""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import QuestionSamples, Sample

P_TRUE = "p_true"
LOGPROB = "sequence_logprob"
MEAN_LOGPROB = "mean_logprob"
RESPONSE_PROBE = "response_probe"
# Names that rows of the store carry as columns of their own: nothing has to be run for them.
STORED = (P_TRUE, LOGPROB, MEAN_LOGPROB)
# Of an answer of a server, by what it comes from: counted votes have another scale than other confidences.
STATED, VOTE_SHARE = "stated", "vote_share"


class MissingConfidenceError(InputError):
    """A required confidence is missing."""


@dataclass(frozen=True)
class RewardSupport:
    """What estimators with ``reads = "rewards"`` need of the room above, which registers it."""

    check: Callable[[RewardSettings, Sequence[str]], None]  # refuses a model that the named estimators cannot read
    identity: Callable[[RewardSettings], dict[str, Any]]  # all that a model's scores depend on, as JSON types
    open: Callable[[RewardSettings, str], Any]  # loads the model, in a dtype


class Estimator(Protocol):
    """Assigns a number to each response to a question; higher is better.

    Attributes:
        name: Key of the confidence on a sample.
        is_probability: Whether it is a probability in [0, 1], so that ECE is defined.
        needs_pool: Whether it reads the other responses to the question, which a live run does not have yet.
    """

    name: str
    is_probability: bool
    needs_pool: bool

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None where there is none."""


class SampleScorer(Protocol):
    """Derives a further confidence of a sample from existing ones, live or recorded: a scaler or a fusion."""

    @property
    def name(self) -> str: ...  # key under which the confidence is added
    @property
    def requires(self) -> tuple[str, ...]: ...  # names of the confidences it reads
    @property
    def needs_pool(self) -> bool: ...  # whether one of those depends on the other responses to the question

    def score_sample(self, sample: Sample) -> float | None:
        """Return the confidence of one sample, or None if an input is missing."""


def confidence_of(sample: Sample, name: str) -> float | None:
    """Return the confidence ``name`` of a sample, or None where it has none."""
    stored: float | None = None
    if name == P_TRUE:
        stored = sample.p_true
    elif name == LOGPROB:
        stored = sample.logprob
    elif name == MEAN_LOGPROB and sample.logprob is not None and sample.drawn_tokens:
        stored = sample.logprob / sample.drawn_tokens
    value = sample.confidences.get(name) if stored is None else stored
    return None if value is None or math.isnan(value) else value


def lacks(entry: QuestionSamples, name: str) -> bool:
    """Return whether a question has readable answers, none of them with the confidence ``name``.

    Single responses without it count as unreadable; a whole question without it means that the estimator was not run.
    """
    readable = [sample for sample in entry.samples if sample.answer is not None]
    return bool(readable) and all(confidence_of(sample, name) is None for sample in readable)


def check_confidence(pool: Iterable[QuestionSamples], name: str) -> None:
    for entry in pool:
        if lacks(entry, name):
            raise MissingConfidenceError(
                f"Expected responses to {entry.question.id!r} to have the confidence {name!r}, but got none. "
                f"{how_to_get(name)}"
            )


def how_to_get(name: str) -> str:
    if name in (STATED, VOTE_SHARE):
        return f"Labels of a server have it: {VOTE_SHARE} of counted votes, {STATED} of other answers."
    score = f"un `selfcal score --estimator {name}` on the store"
    if name in STORED:
        return f"Sample with `selfcal generate`, which keeps it, or r{score}."
    return f"R{score}, or give the file of the fitted {name!r}."


def add_scores(sample: Sample, scorers: Sequence[SampleScorer]) -> Sample:
    for scorer in scorers:
        value = scorer.score_sample(sample)
        if value is not None:
            sample = replace(sample, confidences={**sample.confidences, scorer.name: value})
    return sample


def scored_pool(pool: Iterable[QuestionSamples], scorers: Sequence[SampleScorer]) -> tuple[QuestionSamples, ...]:
    """Return a pool whose samples have the confidences of ``scorers``, each of which may read those before it."""
    return tuple(replace(one, samples=tuple(add_scores(sample, scorers) for sample in one.samples)) for one in pool)


def split_hash(question_ids: Iterable[str]) -> str:
    """Return a sha256 that identifies a set of questions, independent of their order."""
    return hashlib.sha256("\n".join(sorted(set(question_ids))).encode()).hexdigest()


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
