"""What clients send: bodies of the OpenAI protocol with one object ``selfcal`` inside, checked where they come in."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from selfcal_lightning.core.errors import InputError, did_you_mean
from selfcal_lightning.engines.base import RequestsFailedError
from selfcal_lightning.inference.chat_source import MOST_STOPS, written_call
from selfcal_lightning.records import Message

# They change nothing in what is answered, or say what is so anyway.
HARMLESS = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
    "reasoning_effort", "verbosity", "modalities",
}  # fmt: skip
# Values at which a setting that we lack changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "response_format": ({"type": "text"},), "echo": (False,), "best_of": (1,),
}  # fmt: skip
# Of a message that a client repeats from an answer; models do not read it again.
UNREAD = {"refusal", "annotations", "reasoning", "reasoning_content", "provider_specific_fields"}
MOST_SEED = 2**62
Body = TypeVar("Body", bound=BaseModel)


class Refused(Exception):  # noqa: N818 - it is the client's, and becomes a status
    """A request that is answered with an error of the OpenAI protocol."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def as_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class Strict(BaseModel, extra="forbid", protected_namespaces=()):
    """An object of whose keys none is dropped in silence."""


Threshold = Annotated[float, Field(ge=0.0, le=1.0)]


class Options(Strict):
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


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Lenient(BaseModel, extra="allow"):
    """An object with keys that clients add, which are looked at later."""


class Part(Lenient):
    type: str
    text: str | None = None


class Turn(Lenient):
    """A message; ``content`` is text, or a list of parts that are text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        whole = self.content or ""
        return whole if isinstance(whole, str) else "".join(part.text or "" for part in whole)

    def as_turn(self) -> dict[str, Any]:
        """Return the message as any server of the protocol takes it; ``as_message`` has checked it."""
        role = "system" if self.role == "developer" else self.role
        further = {"tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": role, "content": self.text} | {name: value for name, value in further.items() if value}

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
        text = self.text + calls if self.text else calls.removeprefix("\n")
        return Message("system" if self.role == "developer" else self.role, text)


class ChatBody(Lenient):
    """The body of ``/v1/chat/completions``."""

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
        found = tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if text)
        if len(found) > MOST_STOPS:
            raise Refused(400, f"Expected at most {MOST_STOPS} texts in `stop`, but got {len(found)}.", param="stop")
        return found

    @property
    def strategy(self) -> str | None:
        """As the object ``selfcal`` asks, or else the model's name."""
        return self.selfcal.strategy or split_name(self.model)[1]

    @property
    def threshold(self) -> float | None:
        return split_name(self.model)[2] if self.selfcal.threshold is None else self.selfcal.threshold


class ConfidenceBody(Strict):
    """The body of ``/v1/confidence``: a chat, and a response to it that somebody else wrote."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    response: str
    task: str | None = None


class FeedbackBody(Strict):
    """The body of ``/v1/feedback``."""

    request_id: str
    correct: bool


def read_body(kind: type[Body], content: bytes | Mapping[str, Any]) -> Body:
    """Return a body, or raise Refused with the key that is wrong."""
    try:
        return kind.model_validate_json(content) if isinstance(content, bytes) else kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        near = ""
        if first["type"] == "extra_forbidden":
            names = [f.alias or n for n, f in (Options if place.startswith("selfcal.") else kind).model_fields.items()]
            near = did_you_mean(str(first["loc"][-1]), names)
        message = f"{place}: {first['msg']}.{near}" if place else f"The body is not as expected: {first['msg']}."
        raise Refused(400, message, param=place or None) from None


def check_extras(body: ChatBody) -> None:
    """Refuse what would change the answer and cannot be done."""
    for name, value in (body.model_extra or {}).items():
        if name in HARMLESS or value is None or (name in NEUTRAL and value in NEUTRAL[name]):
            continue
        can = f" other than {NEUTRAL[name][0]!r}" if name in NEUTRAL else ""
        raise Refused(400, f"This server does not know `{name}`{can}. Leave it out.", param=name)


def split_name(name: str) -> tuple[str, str | None, float | None]:
    """Return model, strategy and threshold of a model's name, for clients that cannot send the object ``selfcal``.

    Example:
        >>> split_name("qwen@adaptive_consistency:0.9"), split_name("qwen")
        (('qwen', 'adaptive_consistency', 0.9), ('qwen', None, None))
    """
    model, _, rest = name.partition("@")
    strategy, _, threshold = rest.partition(":")
    try:
        value = float(threshold) if threshold else None
    except ValueError:
        value = -1.0
    if value is not None and not 0.0 <= value <= 1.0:
        raise Refused(400, f"Expected the threshold in `model` to lie in [0, 1], but got {threshold!r}.", param="model")
    return model, strategy or None, value


def refusal_of(error: Refused | InputError | RequestsFailedError) -> Refused:
    if isinstance(error, Refused):
        return error
    return Refused(400, str(error)) if isinstance(error, InputError) else Refused(502, "The engine cannot read this.")
