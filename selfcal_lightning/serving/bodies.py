"""What clients send: bodies of the OpenAI protocol with one object ``selfcal`` inside, checked where they come in."""

import json
import logging
import string
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.engines.base import RequestsFailedError
from selfcal_lightning.inference.chat_source import MOST_STOPS, written_call
from selfcal_lightning.records import Message

# They change nothing in what is answered, or say what is so anyway.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "verbosity", "modalities",
}  # fmt: skip
# Values at which a setting that we lack changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "response_format": ({"type": "text"},), "echo": (False,), "best_of": (1,),
}  # fmt: skip
# Of a message that a client repeats from an answer; models do not read it again.
UNREAD = {"refusal", "annotations", "reasoning", "reasoning_content", "provider_specific_fields"}
# How the model is told to reply, and with what; `criteria` of each type in words.
TYPES: dict[str, tuple[str, Sequence[str], str]] = {
    "noul": ("Answer with yes or no only.", ("yes", "no"), "to be null or to describe `true` and `false`"),
    "choice": (
        "Answer with the letter of one option only.",
        string.ascii_uppercase,
        "to map 1 to 26 names of options to a description or null",
    ),
    "score": ("Answer with the number of one level only.", string.digits, "to be a list of 2 to 10 levels"),
}
Choices = list[tuple[str, str, Any]]  # the label that the model replies with, the name, and the description
MOST_SEED = 2**62
GONE = 499  # for the log and the metrics: nobody reads it
_LOG = logging.getLogger(__name__)
Body = TypeVar("Body", bound=BaseModel)


class Refused(Exception):  # noqa: N818 - it is the client's, and becomes a status
    """A request that is answered with an error of the OpenAI protocol."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refusal_of(error: Exception) -> Refused:
    """Return what a client is told; what nobody expects is a fault of ours, which is this request's alone."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, InputError):
        return Refused(400, str(error))
    if isinstance(error, RequestsFailedError):
        return Refused(502, "The engine cannot read this.")
    if isinstance(error, ClientDisconnect):
        return Refused(GONE, "The client has gone.")
    _LOG.error("A request failed.", exc_info=error)
    return Refused(500, "The server failed; its log says why.")


Threshold = Annotated[float, Field(ge=0.0, le=1.0)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Options(BaseModel, extra="forbid"):
    """The object ``selfcal`` of a request. None is the server's own setting, which is also the most there is."""

    strategy: str | None = None
    max_samples: Annotated[int, Field(ge=1)] | None = None
    max_tokens_in_all: Annotated[int, Field(ge=1)] | None = None
    threshold: Threshold | None = None
    max_error_rate: Threshold | None = None
    deadline_s: Annotated[float, Field(gt=0.0)] | None = None
    on_low: Literal["answer", "abstain"] = "answer"
    return_: Literal["answer", "all"] = Field("answer", alias="return")
    task: str | None = None
    seed: Annotated[int, Field(ge=0, lt=MOST_SEED)] | None = None


class StreamOptions(BaseModel, extra="forbid"):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Part(BaseModel, extra="allow"):
    type: str
    text: str | None = None


class Turn(BaseModel, extra="allow"):
    """A message; ``content`` is text, or a list of parts that are text."""

    role: Annotated[Role, AfterValidator(lambda role: "system" if role == "developer" else role)]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        whole = self.content or ""
        return whole if isinstance(whole, str) else "".join(part.text or "" for part in whole)

    def as_turn(self) -> dict[str, Any]:
        """Return the message as any server of the protocol takes it; ``as_message`` has checked it."""
        further = {"tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": self.text} | {name: value for name, value in further.items() if value}

    def as_message(self) -> Message:
        """Return the message as chat templates take it; calls of tools are written as models write them."""
        parts = self.content if isinstance(self.content, list) else []
        if other := [part.type for part in parts if part.text is None]:
            raise Refused(400, f"Expected `content` to hold text only, but got {other[0]!r}.", param="messages")
        for name, value in [pair for one in (self, *parts) for pair in (one.model_extra or {}).items()]:
            if value and name not in {*UNREAD, "name", "cache_control"}:
                raise Refused(400, f"This server does not know `{name}` in a message. Leave it out.", param="messages")
        try:
            calls = "".join(map(written_call, self.tool_calls or ()))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise Refused(400, f"Expected `tool_calls` to hold functions with arguments in JSON: {error}.") from error
        return Message(self.role, self.text + calls if self.text else calls.removeprefix("\n"))


class ChatBody(BaseModel, extra="allow"):
    """The body of ``/v1/chat/completions``; a strategy and a threshold in the model's name become options."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1)]
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    selfcal: Options = Field(default_factory=lambda: Options.model_validate({}))

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ()))

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse what would change the answer and cannot be done."""
        for name, value in (self.model_extra or {}).items():
            if name not in HARMLESS and value is not None and value not in NEUTRAL.get(name, ()):
                can = f" other than {NEUTRAL[name][0]!r}" if name in NEUTRAL else ""
                raise Refused(400, f"This server does not know `{name}`{can}. Leave it out.", param=name)
        if (found := len(self.stops)) > MOST_STOPS:
            raise Refused(400, f"Expected at most {MOST_STOPS} texts in `stop`, but got {found}.", param="stop")
        _, strategy, threshold = split_name(self.model)
        self.selfcal.strategy = self.selfcal.strategy or strategy
        self.selfcal.threshold = threshold if self.selfcal.threshold is None else self.selfcal.threshold
        return self


class ConfidenceBody(BaseModel, extra="forbid"):
    """The body of ``/v1/confidence``: a chat, and a response to it that somebody else wrote."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    response: str
    task: str | None = None


class FeedbackBody(BaseModel, extra="forbid"):
    request_id: str
    correct: bool


class DecisionQuestion(BaseModel, extra="forbid"):
    type: Literal["noul", "choice", "score"]
    instructions: Any = ""
    criteria: Any = None

    def options(self, name: str) -> Choices:
        """Return the options, or raise Refused where the ``criteria`` of this question are not what its type takes."""
        _, labels, wanted = TYPES[self.type]
        given, found = self.criteria, list[tuple[str, Any]]()
        if self.type == "noul" and (given is None or (isinstance(given, dict) and given.keys() <= {"true", "false"})):
            found = [("yes", (given or {}).get("true")), ("no", (given or {}).get("false"))]
        elif self.type == "choice" and isinstance(given, dict):
            found = [(str(option), text) for option, text in given.items()]
        elif self.type == "score" and isinstance(given, list) and len(given) > 1:
            found = [(str(level), None) for level in given]
        if not 1 <= len(found) <= len(labels):
            raise Refused(400, f"Expected `criteria` {wanted}.", param=f"questions.{name}.criteria")
        return [(label, *option) for label, option in zip(labels, found, strict=False)]

    def answer(self, options: Choices, stated: Sequence[float]) -> dict[str, Any]:
        """Return the answer, with the chance that the surest option is right, by the confidence in each option."""
        total = sum(stated)
        shares = [value / total if total > 0.0 else 1.0 / len(stated) for value in stated]
        top = max(range(len(stated)), key=stated.__getitem__)
        found: dict[str, Any] = {"type": self.type, "confidence": stated[top]}
        if self.type == "score":
            found["score"] = sum(level * share for level, share in enumerate(shares))
            found["legend"] = {label: name for label, name, _ in options}
        else:
            found[self.type] = shares[0] if self.type == "noul" else options[top][1]
        names = [label if self.type == "score" else name for label, name, _ in options]
        return found | {"probabilities": dict(zip(names, shares, strict=True))}


class DecisionBody(BaseModel, extra="forbid"):
    """The body of ``/v1/systemone``, in the fields of vLLM's structured decisions."""

    model: str | None = None
    state: Any
    questions: Annotated[dict[str, DecisionQuestion], Field(min_length=1, max_length=64)]
    instructions: str | None = None
    request_id: str | None = None

    def text_of(self, question: DecisionQuestion, options: Choices) -> str:
        state = self.state if isinstance(self.state, str) else json.dumps(self.state, ensure_ascii=False)
        asked = f"Question: {question.instructions}" if question.instructions else None
        lines = [self.instructions, f"{state}\n", asked]
        for label, name, description in options:
            parts = (name if question.type != "noul" else None, description)
            shown = " - ".join(str(part) for part in parts if part not in (None, ""))
            lines.append(f"{label}: {shown}".removesuffix(": "))
        return "\n".join(line for line in [*lines, TYPES[question.type][0]] if line)


def read_body(kind: type[Body], content: bytes | Mapping[str, Any]) -> Body:
    """Return a body, or raise Refused with the key that is wrong."""
    try:
        return kind.model_validate_json(content) if isinstance(content, bytes) else kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place, near = ".".join(map(str, first["loc"])), ""
        if first["type"] == "extra_forbidden":
            names = [f.alias or n for n, f in (Options if place.startswith("selfcal.") else kind).model_fields.items()]
            near = did_you_mean(str(first["loc"][-1]), names)
        message = f"{place}: {first['msg']}.{near}" if place else f"The body is not as expected: {first['msg']}."
        raise Refused(400, message, param=place or None) from None


def split_name(name: str) -> tuple[str, str | None, float | None]:
    """Return model, strategy and threshold of a model's name, for clients that cannot send the object ``selfcal``."""
    model, _, rest = name.partition("@")
    strategy, _, threshold = rest.partition(":")
    with suppress(ValueError):
        if not threshold or 0.0 <= float(threshold) <= 1.0:
            return model, strategy or None, float(threshold) if threshold else None
    raise Refused(400, f"Expected the threshold in `model` to lie in [0, 1], but got {threshold!r}.", param="model")
