"""Record types shared by all packages. Frozen dataclasses, free of torch."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal, Self

from selfcal_lightning.core.errors import InputError, check_at_least


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights a response came from.

    Attributes:
        model: Folder or hub name; "imported" for responses made elsewhere.
        revision: Revision on the hub.
        weights_sha256: Hash of the weight files. If known it decides, so that a model may move to another folder.
        adapter_sha256: Hash of the LoRA adapter.
        activated_adapter_sha256: Hash of an adapter that is active only on the confidence query's tokens: it changes
            confidences, but neither texts nor their log-probabilities.
        quantization: How the weights were quantised on loading, such as "nf4".
        head_dtype: Dtype of the output layer when computing P(True), if it differs from the model's.
        further: Other distinguishing facts, as plain JSON types.
    """

    model: str | None
    revision: str | None = None
    weights_sha256: str | None = None
    adapter_sha256: str | None = None
    activated_adapter_sha256: str | None = None
    quantization: str | None = None
    head_dtype: str | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the identity that :meth:`as_json` gave; unknown fields become ``further``."""
        known = {name: content.get(name) for name in _names(cls)}
        return cls(**known, further={name: value for name, value in content.items() if name not in known})

    def as_json(self) -> dict[str, Any]:
        """Return the identity as plain JSON types; optional fields that are None are left out."""
        optional = ("activated_adapter_sha256", "quantization", "head_dtype")
        known = {name: getattr(self, name) for name in _names(type(self))}
        kept = {name: value for name, value in known.items() if value is not None or name not in optional}
        return {**kept, **self.further}


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """How questions and the confidence query were rendered for the model; None where unknown.

    Attributes:
        query: Text of the confidence query.
        suffix_ids: Token ids that follow a response to ask it.
        yes_ids: Token ids that count as Yes.
        no_ids: Token ids that count as No.
        template_sha256: Hash of the chat template.
        further: Other distinguishing facts, such as the source of imported responses.
    """

    query: str | None = None
    suffix_ids: tuple[int, ...] | None = None
    yes_ids: tuple[int, ...] | None = None
    no_ids: tuple[int, ...] | None = None
    template_sha256: str | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the identity that :meth:`as_json` or ``ChatFormat.describe`` gave."""
        known: dict[str, Any] = {name: content.get(name) for name in _names(cls)}
        ids = {name: tuple(known[name]) for name in ("suffix_ids", "yes_ids", "no_ids") if known[name] is not None}
        further = {name: value for name, value in content.items() if name not in known}
        return cls(**{**known, **ids, "further": further})

    def as_json(self) -> dict[str, Any]:
        """Return the known fields as plain JSON types."""
        known = {name: getattr(self, name) for name in _names(type(self))}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
        return {**{name: value for name, value in plain.items() if value is not None}, **self.further}

    @property
    def query_tokens(self) -> int:
        """Tokens that the confidence query adds to a response; 0 where unknown."""
        return len(self.suffix_ids or ())


def _names(identity: type[ModelIdentity] | type[PromptIdentity]) -> list[str]:
    return [each.name for each in fields(identity) if each.name != "further"]


Finish = Literal["stop", "length", "step"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# Stands for the model of responses that were made elsewhere.
IMPORTED = "imported"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat: ``role`` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question for the model.

    Attributes:
        id: Unique within a run; samples, splits and seeds are keyed by it.
        task: Name of the task that reads and verifies the answers.
        messages: The chat up to and including the user's turn.
        reference: The gold answer in the task's canonical form.
        text: The bare question, for display and export.
    """

    id: str
    task: str
    messages: tuple[Message, ...]
    reference: str | None = None
    text: str = ""


def is_one_question(texts: Sequence[str], references: Sequence[str | None]) -> bool:
    """Whether two questions of one id are one: files number theirs alike, so that an id alone says little."""
    return texts[0] == texts[1] or (references[0] is not None and references[0] == references[1])


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn.

    Attributes:
        temperature: Sampling temperature, or the base T0 of entropy-based dynamic temperature (EDT). 0 is greedy.
        edt_scale: N0 of EDT, in (0, 1]: lower makes certain tokens colder. Null switches EDT off.
        edt_theta: Exponent theta of EDT, at least 0: 0 ignores the entropy.
        top_p: Draws from the most likely tokens that add up to this probability, in (0, 1]; 1 keeps the whole
            vocabulary.
        max_new_tokens: Maximum length of a response in tokens, including the end-of-turn token.

    EDT: ``T = temperature * edt_scale ** (edt_theta / H)`` with H the entropy in nats (arXiv 2503.00031).
    """

    temperature: float = 0.8
    edt_scale: float | None = 0.8
    edt_theta: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 1024

    def __post_init__(self) -> None:
        for name, fits, wanted in (
            ("temperature", 0.0 <= self.temperature <= 2.0, "to lie in [0, 2]"),
            ("edt_scale", self.edt_scale is None or 0.0 < self.edt_scale <= 1.0, "to be None or to lie in (0, 1]"),
            ("top_p", 0.0 < self.top_p <= 1.0, "to lie in (0, 1]"),
        ):
            if not fits:
                raise InputError(f"Expected `{name}` {wanted}, but got {getattr(self, name)}.")
        check_at_least(0, edt_theta=self.edt_theta)
        check_at_least(1, max_new_tokens=self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class ConfidenceQuery:
    """A follow-up turn whose next-token distribution is read after a response.

    Attributes:
        suffix_ids: Token ids that follow the response (end-of-turn, the query, the opened assistant turn).
        yes_ids: Token ids whose probabilities add up to the Yes mass.
        no_ids: Token ids whose probabilities add up to the No mass.
    """

    suffix_ids: tuple[int, ...]
    yes_ids: tuple[int, ...]
    no_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to an engine for one sample.

    Attributes:
        id: Unique among the requests in flight.
        prompt_ids: Token ids of the rendered prompt. Requests with equal prompts share its encoding.
        seed: Seeds this sample's own random stream, so that the text does not depend on the rest of the batch.
        query: P(True) query to ask after the response.
        prefix_ids: Existing tokens of the response, without end-of-turn, to be continued. They count towards
            ``max_new_tokens``, so that a continuation is cut where a whole response would be.
        step_ids: Tokens that end a step; generation stops after the first one drawn.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings
    seed: int
    query: ConfidenceQuery | None = None
    prefix_ids: tuple[int, ...] = ()
    step_ids: tuple[int, ...] = ()

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Token ids before the first generated one: prompt and prefix."""
        return self.prompt_ids + self.prefix_ids


@dataclass(frozen=True, slots=True)
class Response:
    """An engine's response to a request: the new tokens, without the prefix.

    Attributes:
        text: The decoded tokens, without control tokens.
        token_ids: The tokens drawn, without a trailing end-of-turn token.
        finish: "stop" if the model ended its turn, "length" if the limit cut it, "step" if its last token ended a step.
        logprob: Sum of log p(token) over ``token_ids`` under the untempered model, in nats.
        yes_mass: Probability of a Yes token after the query, from the full softmax; None if not asked.
        no_mass: The same for No.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprob: float
    yes_mass: float | None = None
    no_mass: float | None = None


class Unstated(Enum):
    """Marks a field that a recorded response leaves out, as opposed to None, a stated absence."""

    UNSTATED = "unstated"


UNSTATED = Unstated.UNSTATED


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """A recorded response, made earlier here or elsewhere, with the fields of a ``Sample``.

    An unstated ``answer`` is extracted from the text; an unstated ``correct`` is found by comparing with the reference.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    finish: Finish | None = None
    answer: str | Unstated | None = UNSTATED
    correct: bool | Unstated | None = UNSTATED
    logprob: float | None = None
    yes_mass: float | None = None
    no_mass: float | None = None
    confidences: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int | None = None
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A whole response to a question with its answer and verdict: one row of the store.

    Attributes:
        index: Position among the samples of its question and round, from 0.
        round: Generation round; 0 is the base model.
        text: The response, including a prefix that it continues.
        token_ids: Its token ids without end-of-turn; None for responses made elsewhere.
        finish: "stop", "length", "step", or None if unknown.
        answer: Canonical answer read from the text; None if unreadable.
        correct: Whether the answer is right; None without a reference.
        logprob: Log-probability in nats of the tokens that were drawn.
        yes_mass: Probability mass of Yes after the confidence query.
        no_mass: The same for No.
        confidences: Further confidences by estimator name.
        num_tokens: Length in tokens: the number of token ids if known, else as recorded.
        prefix_tokens: Number of its first tokens that were given as a prefix.
    """

    question_id: str
    index: int
    round: int
    text: str
    token_ids: tuple[int, ...] | None
    finish: Finish | None
    answer: str | None
    correct: bool | None
    logprob: float | None = None
    yes_mass: float | None = None
    no_mass: float | None = None
    confidences: Mapping[str, float] = field(default_factory=dict)
    num_tokens: int | None = None
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.token_ids is not None:
            object.__setattr__(self, "num_tokens", len(self.token_ids))
        if not 0 <= self.prefix_tokens <= (self.num_tokens or 0):
            most = self.num_tokens or 0
            raise InputError(f"Expected `prefix_tokens` to lie in [0, {most}], but got {self.prefix_tokens}.")

    @property
    def drawn_tokens(self) -> int | None:
        """Tokens generated after the prefix; None if the length is unknown."""
        return None if self.num_tokens is None else self.num_tokens - self.prefix_tokens

    @property
    def p_true(self) -> float | None:
        """Normalised P(True) = Yes / (Yes + No), or None if it was not asked or has no mass."""
        return normalised_p_true(self.yes_mass, self.no_mass)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A strategy's answer to a question, and its cost.

    The driver fills in the last three fields.

    Attributes:
        answer: The answer chosen; None if no response could be read.
        confidence: The strategy's own confidence in it; higher is better.
        correct: Whether the answer is right; None without a reference. No answer counts as wrong.
        samples_used: Samples that the strategy has seen.
        stopped_early: Whether its rule stopped it before the budget ran out.
        samples_generated: Samples generated, including cancelled ones.
        tokens_used: Response and confidence-query tokens of the samples used; None if a length is unknown.
        tokens_generated: The same for everything generated, including cancelled work.
    """

    question_id: str
    answer: str | None
    confidence: float | None
    correct: bool | None
    samples_used: int
    stopped_early: bool
    samples_generated: int = 0
    tokens_used: int | None = 0
    tokens_generated: int | None = 0


@dataclass(frozen=True, slots=True)
class QuestionSamples:
    """All samples of one question in one round, by index, with the prompt that they were drawn from."""

    question: Question
    samples: tuple[Sample, ...]
    split: str
    prompt_ids: tuple[int, ...] | None = None

    @property
    def verdicts(self) -> list[bool | None]:
        """Whether each sample is right; one without an answer, such as a failed request, is wrong if any is judged."""
        judged = self.question.reference is not None or any(sample.correct is not None for sample in self.samples)
        return [False if judged and s.correct is None and s.answer is None else s.correct for s in self.samples]


def normalised_p_true(yes_mass: float | None, no_mass: float | None) -> float | None:
    """Return Yes / (Yes + No), or None if a mass is missing or both are zero.

    Example:
        >>> normalised_p_true(0.375, 0.125)
        0.75
        >>> normalised_p_true(0.0, 0.0) is None
        True
    """
    if yes_mass is None or no_mass is None or yes_mass + no_mass <= 0.0:
        return None
    return yes_mass / (yes_mass + no_mass)


def question_hash(question_id: str) -> int:
    """Return a 63-bit hash of a question id, the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(question_id.encode()).digest()[:8], "big") >> 1


def sample_seed(run_seed: int, round_index: int, question_id: str, index: int) -> int:
    """Return the seed of one sample: a hash of (run seed, round, question id), plus the sample's index.

    Example:
        >>> sample_seed(0, 0, "q", 3) - sample_seed(0, 0, "q", 0)
        3
    """
    key = f"{run_seed}/{round_index}/{question_id}".encode()
    return (int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 2) + index


def duplicate_ids(questions: Sequence[Question]) -> list[str]:
    """Return the ids that occur more than once, in the order of their first occurrence."""
    counts = Counter(question.id for question in questions)
    return [name for name, count in counts.items() if count > 1]
