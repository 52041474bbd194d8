"""What is sent to an OpenAI-compatible server and read in its answers. Pure; all tokens travel as ids."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.engines.base import COLDEST_TEMPERATURE, EDT_PROCESSOR, edt_parameters, finish_of, stream_seed
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Request, Response, SamplingSettings

EDT_ARG = "edt"
LARGEST_ID = 2**31  # ids are stored in 32 bits
LEAST_LOGPROB = -1e5  # vLLM writes -9999 for a probability of 0
_SLACK = 1e-3  # of rounding
_TOKEN = re.compile(r"token_id:(0|[1-9][0-9]{0,9})")
# What taking apart a value of another form raises.
_NOT_AS_AGREED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
# A server's defaults may come from the model's generation settings (top_k 20, a repetition penalty ...): all are named.
_NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_BY_ID = {"logprobs": 0, "return_tokens_as_token_ids": True}


class TransientError(Exception):
    """An attempt failed in a way that a retry may mend."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServerError(RunError):
    """A request failed for good: refused, given up after retries, out of time, or not answered as agreed."""


def backoff_seconds(attempt: int, *, first: float, longest: float, chance: float) -> float:
    """Return how long to wait after a failed attempt: between half and all of ``min(longest, first * 2^attempt)``."""
    whole = min(longest, first * 2.0 ** min(attempt, 60))
    return whole * (1.0 + chance) / 2.0


def retry_after_seconds(header: str | None, *, now: datetime | None = None) -> float | None:
    """Return the seconds that a Retry-After header asks for, None where it says nothing that can be understood."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            date = parsedate_to_datetime(header)
        except (ValueError, OverflowError):
            return None
        aware = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (aware - (now or datetime.now(UTC))).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None


def check_sampling(sampling: SamplingSettings, *, server_edt: bool) -> None:
    """Raise ValueError where a server would not draw as ``sampling`` says."""
    if edt_parameters(sampling) is not None and not server_edt:
        raise InputError(
            f"Expected `edt_scale` to be None for a server, but got {sampling.edt_scale}. Set `edt_scale` to null, or "
            f"start vLLM's server with `--logits-processors {EDT_PROCESSOR}` and set `server_edt`."
        )
    if 0.0 < sampling.temperature < COLDEST_TEMPERATURE and sampling.edt_scale is None:
        raise InputError(
            f"Expected `temperature` to be 0 or at least {COLDEST_TEMPERATURE} for a server, which raises it to that, "
            f"but got {sampling.temperature}."
        )


def sample_body(request: Request, *, max_tokens: int, stop_token_ids: Sequence[int], interval: int) -> dict[str, Any]:
    sampling, edt = request.sampling, edt_parameters(request.sampling)
    body: dict[str, Any] = {
        "prompt": list(map(int, request.context_ids)),
        "max_tokens": max_tokens,
        "temperature": sampling.temperature if edt is None else 1.0,
        "top_p": sampling.top_p,
        "seed": stream_seed(request) % 2**63,
        "stream": True,
        "stream_interval": interval,
        # They name all end-of-turn ids.
        "stop_token_ids": sorted({*stop_token_ids, *request.step_ids}),
        "ignore_eos": True,
        **_NEUTRAL,
        **_BY_ID,
    }
    return body if edt is None else body | {"vllm_xargs": {EDT_ARG: edt}}


def score_body(prompt: Sequence[int], token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the body that asks for the probabilities of at most 128 ``token_ids`` after ``prompt``."""
    return {
        "prompt": list(map(int, prompt)),
        "max_tokens": 1,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprob_token_ids": list(dict.fromkeys(map(int, token_ids))),
        **_NEUTRAL,
        **_BY_ID,
    }


class SampleReader:
    """Assembles one response from the events of a stream. Everything that a server sends is checked."""

    def __init__(
        self, stop_token_ids: Sequence[int], *, max_tokens: int, vocabulary: int, step_ids: Sequence[int] = ()
    ) -> None:
        self._step_ids = frozenset(step_ids)
        self._ends, self._max_tokens, self._vocabulary = frozenset(stop_token_ids), max_tokens, vocabulary
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self.reason: str | None = None  # why the server ended the response

    @property
    def num_tokens(self) -> int:
        """Response tokens so far, without one that ends the turn."""
        return len(self.token_ids) - self._has_ended()

    def take(self, event: Any) -> None:
        try:
            choices = event["choices"]
            if choices:  # the last event may hold the usage alone
                self._take_choice(*choices)
        except _NOT_AS_AGREED as error:
            raise _garbage("an event with tokens and their log-probabilities", event, error) from None
        if len(self.token_ids) > self._max_tokens:
            raise ServerError(f"Expected the server to send at most {self._max_tokens} tokens, but got more.")

    def _take_choice(self, choice: Any) -> None:
        piece, reason, stop = choice["logprobs"], choice["finish_reason"], choice.get("stop_reason")
        if self.reason is not None:
            raise ValueError("tokens after the end")
        if not isinstance(reason, str | None):
            raise ValueError(f"{reason!r} is not a reason")
        if type(stop) is int and stop not in self._step_ids:  # a server may end at ids of its own
            self._ends |= {stop}
        tokens = [_token_id(token, self._vocabulary) for token in _listed(piece["tokens"])]
        logprobs = [_logprob(value) for value in _listed(piece["token_logprobs"])]
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(logprobs)} log-probabilities for {len(tokens)} tokens")
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not self._is_over():
                self.token_ids.append(token)
                self._logprobs.append(logprob)
        self.reason = reason

    def response(self, name: str, chat: ChatFormat) -> Response:
        if self.reason not in {"stop", "length"}:
            raise ServerError(f"Expected the server to end a response by `stop` or `length`, but got {self.reason!r}.")
        token_ids = self.token_ids[: self.num_tokens]
        in_step = bool(token_ids) and token_ids[-1] in self._step_ids and not self._has_ended()
        ended = self._has_ended() or (self.reason == "stop" and not in_step)
        finish = finish_of(token_ids, ended=ended, step_ids=self._step_ids, limit=self._max_tokens)
        logprob = math.fsum(self._logprobs[: self.num_tokens])
        return Response(name, chat.decode(token_ids), tuple(token_ids), finish, logprob)

    def _has_ended(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self._ends

    def _is_over(self) -> bool:
        """Return whether further tokens are no part of the response."""
        return bool(self.token_ids) and self.token_ids[-1] in self._ends | self._step_ids


def read_probabilities(answer: Any, token_ids: Sequence[int]) -> list[float]:
    try:
        (choice,) = answer["choices"]
        (position,) = _listed(choice["logprobs"]["top_logprobs"])
        found = {_token_id(token): math.exp(_logprob(value)) for token, value in position.items()}
        if math.fsum(found[token] for token in set(token_ids) & found.keys()) > 1.0 + _SLACK:
            raise ValueError("probabilities that add up to more than 1")
    except _NOT_AS_AGREED as error:
        raise _garbage("log-probabilities of the tokens asked for", answer, error) from None
    if missing := [token for token in token_ids if token not in found]:
        raise ServerError(
            f"Expected log-probabilities of all {len(token_ids)} tokens asked for, but got none for {len(missing)} of "
            f"them, the first {missing[0]}. P(True) needs a server that knows `logprob_token_ids`, such as vLLM's own."
        )
    return [found[token] for token in token_ids]


def choose_model(answer: Any, *, wanted: str | None, default: str) -> tuple[str, int | None]:
    """Return the name of the model to ask for, and the server's limit of a sequence."""
    models = list_models(answer)
    # An adapter's record has no limit of its own, but names its model.
    of_model = {name: models.get(str(item.get("parent")), item) for name, item in models.items()}
    limits = {name: item.get("max_model_len") or of_model[name].get("max_model_len") for name, item in models.items()}
    candidates = [wanted] if wanted is not None else [default, *limits] if len(limits) == 1 else [default]
    for name in candidates:
        if name in limits:
            limit = limits[name]
            return name, limit if type(limit) is int and limit > 1 else None
    raise InputError(
        f"Expected `served_model` to name a model of the server, but got {wanted!r}. It has: {', '.join(limits)}."
    )


def list_models(answer: Any) -> dict[str, Mapping[str, Any]]:
    try:
        models = {str(item["id"]): item for item in _listed(answer["data"])}
        if not all(isinstance(item, dict) for item in models.values()):
            raise TypeError
    except _NOT_AS_AGREED as error:
        raise _garbage("a list of models", answer, error) from None
    return models


def _token_id(token: str, vocabulary: int = LARGEST_ID) -> int:
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(f"the token {token!r} is not written as an id: the server must be vLLM's own")
    if (number := int(match[1])) >= vocabulary:
        raise ValueError(f"the token {number} is none of the vocabulary's {vocabulary}")
    return number


def _logprob(value: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not LEAST_LOGPROB <= value <= _SLACK:  # nan is none either
        raise ValueError(f"{value!r} is not a log-probability")
    return min(float(value), 0.0)


def _listed(value: Any) -> list[Any]:
    """Return ``value`` if it is a list: strings and mappings can be iterated, too."""
    if not isinstance(value, list):
        raise TypeError
    return value


def _garbage(expected: str, got: Any, error: Exception) -> ServerError:
    reason = str(error) if isinstance(error, ValueError) else "something else"
    try:
        shown = repr(got)
    except RecursionError:
        shown = "something nested too deeply to be shown"
    return ServerError(f"Expected the server to send {expected}, but got {reason} in: {shown}")


@dataclass(slots=True)
class Flight:
    """A request on its way, and the part of its response that has come in."""

    request: Request
    reader: SampleReader | None = None
