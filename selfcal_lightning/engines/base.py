"""The contract of an engine: who produces text and probabilities."""

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, cast

from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.records import Finish, Request, Response, SamplingSettings

SHOWN_FAILURES = 3
MAX_FAILURES = 64  # as many as a server has at once: all of them failed
# What vLLM takes, in a child process or behind a server.
EDT_PROCESSOR = "selfcal_lightning.engines.vllm.dynamic_temperature:DynamicTemperature"
MAX_SCORED_IDS = 128
COLDEST_TEMPERATURE = 0.01  # vLLM raises what is below to this without a word; EDT with a scale of 1 has no such floor
# Folders of the activated adapters that vLLM should know, separated as in PATH; read by our plugin for vLLM.
ADAPTER_VARIABLE = "SELFCAL_ACTIVATED_ADAPTER"
Probabilities = list[list[float] | None]  # of each prompt; None where the engine refuses it


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered."""

    reason: str
    is_refusal: bool = False


class RequestsFailedError(RunError):
    """Some requests were not answered; all others continue."""

    def __init__(self, failures: Mapping[str, Failure]) -> None:
        self.failures = dict(failures)
        shown = [f"request {name!r}: {failure.reason}" for name, failure in self.failures.items()][:SHOWN_FAILURES]
        more = [f"and {len(self.failures) - len(shown)} more"] if len(self.failures) > len(shown) else []
        super().__init__(f"{len(self.failures)} request(s) failed; the others continue. " + "\n".join([*shown, *more]))


class EngineStoppedError(RunError):
    """The engine cannot continue; what it delivered before is valid."""


class FailuresInARow:
    """Counts consecutive failed requests, and stops the work when there are too many.

    Refused requests count once for each question: one prompt may be refused for all of its samples.
    """

    def __init__(self, limit: int, *, way_out: str) -> None:
        check_at_least(1, max_failures=limit)
        self._limit, self._way_out = limit, way_out
        self._failed: set[tuple[str, bool]] = set()

    def clear(self) -> None:
        self._failed.clear()

    def add(self, name: str, question_id: str, failure: Failure) -> None:
        self._failed.add((question_id, True) if failure.is_refusal else (name, False))
        if len(self._failed) >= self._limit:
            found = f"{len(self._failed)} requests in a row failed (`max_failures`). {self._way_out}"
            raise EngineStoppedError(f"Expected the engine to answer, but {found} The last one: {failure.reason}")


class Engine(Protocol):
    """Samples responses and reads next-token probabilities, on token ids throughout.

    A request is one sample. ``submit`` returns at once, ``poll`` does the work and returns what has finished, in any
    order, and ``cancel`` drops what is no longer wanted. Requests with equal prompts share one encoding.
    """

    @property
    def max_context(self) -> int:
        """Longest prompt + response + query, in tokens."""

    @property
    def batch_size(self) -> int:
        """Requests that it works on at a time; with fewer in flight it is partly idle."""

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Queue ``requests`` and return their ids. Raises ValueError where prompt + response + query cannot fit."""

    def poll(self, patience: float | None = None) -> list[Response]:
        """Work for a while and return the responses that finished; empty only when nothing is in flight.

        Args:
            patience: Longest wait in seconds, after which the list may be empty.

        Raises:
            RequestsFailedError: Requests were not answered; they are no longer in flight, all others continue.
            EngineStoppedError: The engine cannot continue.
        """

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """Drop requests and return the discarded response tokens, by id.

        Left out are requests that were never begun, and ids that are unknown or delivered. A request that was begun is
        there, with 0 where no token was drawn yet; so is one that finished and was not yet delivered. A dropped request
        never comes back.
        """

    def drawn_so_far(self, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the response tokens of requests that are being drawn, where the engine sees them."""

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        """Return p(token | prompt) from the full softmax, ``[len(prompts)][len(token_ids)]``.

        None stands for a prompt that the engine refuses, such as one that crashes it. An activated adapter reads the
        query that a prompt ends with, and no other token. Samples in flight may continue meanwhile.

        Args:
            prompts: Token ids.
            token_ids: Whose probabilities are wanted.
            with_adapter: False asks the base model without its adapter.

        Raises:
            ValueError: A prompt does not fit, or the engine cannot put its adapter aside.
            RequestsFailedError: Prompts could not be scored for another reason.
        """

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model: engine, model, revision, dtype, weights hash, adapter hash.

        ``quantization`` says how weights are quantised as they are read. ``head_dtype`` names the dtype of the output
        layer that P(True) is read from, where it is not the model's. ``activated_adapter_sha256`` names an adapter that
        reads the confidence query alone: texts and their log-probabilities are the base model's.
        """

    def close(self) -> None:
        """Release memory and processes. Closing twice is allowed."""


def generate(engine: Engine, requests: Sequence[Request]) -> list[Response]:
    """Run ``requests`` to the end and return their responses in the order of the requests.

    Raises:
        RequestsFailedError: Requests were not answered; raised after all others were.
    """
    outcomes: dict[str, Response | Failure] = {}
    for news in _outcomes(engine, requests):
        outcomes |= news
    if failures := {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}:
        raise RequestsFailedError(failures)
    return [cast(Response, outcomes[request.id]) for request in requests]


def ask_for_replies(engine: Engine, requests: Sequence[Request]) -> dict[str, Response]:
    """Run ``requests`` to the end and return the replies by request id, without those of requests that are refused."""
    replies: dict[str, Response] = {}
    for news in _outcomes(engine, requests):
        failures = {name: outcome for name, outcome in news.items() if isinstance(outcome, Failure)}
        if not all(failure.is_refusal for failure in failures.values()):
            raise RequestsFailedError(failures)
        replies |= {name: outcome for name, outcome in news.items() if isinstance(outcome, Response)}
    return replies


def _outcomes(engine: Engine, requests: Sequence[Request]) -> Iterator[Mapping[str, Response | Failure]]:
    """Yield what comes in, by request id, until nothing is missing; a caller that stops cancels the others."""
    pending = set(engine.submit(requests))
    try:
        while pending:
            news: Mapping[str, Response | Failure]
            try:
                news = {response.request_id: response for response in engine.poll()}
            except RequestsFailedError as error:
                news = error.failures
            if not news:
                raise RunError(f"Expected the engine to continue, but got nothing with {len(pending)} in flight.")
            pending.difference_update(news)
            yield news
    finally:
        engine.cancel(pending)


def begin_probabilities(
    engine: Engine, prompts: Sequence[Sequence[int]], token_ids: Sequence[int]
) -> Future[Probabilities]:
    """Ask for next-token probabilities; a server's answer comes later, that of other engines is there at once."""
    if (begin := getattr(engine, "begin_probabilities", None)) is not None:
        return cast(Future[Probabilities], begin(prompts, token_ids))
    future: Future[Probabilities] = Future()
    future.set_result(engine.next_token_probabilities(prompts, token_ids))
    return future


class InFlight:
    """Requests in another process or on a server: samples by id and by the engine's number for them, scores by number.

    Outcomes are delivered in the order in which they came in, so that a caller sees failures in a row.
    """

    def __init__(self) -> None:
        self._number_of: dict[str, int] = {}
        self.news: list[Response | tuple[str, Failure]] = []
        self.scores: dict[int, list[float] | Failure | None] = {}  # by number; None is awaited

    def check_new(self, requests: Sequence[Request]) -> None:
        taken = set(self._number_of)
        for request in requests:
            if request.id in taken:
                raise InputError(f"Expected request ids to be unique in flight, but got {request.id!r} twice.")
            taken.add(request.id)

    def begin(self, numbers: Mapping[str, int]) -> None:
        self._number_of |= numbers

    def answer(self, response: Response) -> None:
        del self._number_of[response.request_id]
        self.news.append(response)

    def fail(self, name: str, failure: Failure) -> None:
        del self._number_of[name]
        self.news.append((name, failure))

    def deliver(self) -> list[Response]:
        """Return the responses that came in first, or raise the failures that did."""
        first = list(next((group for _, group in groupby(self.news, key=type)), ()))
        del self.news[: len(first)]
        if failures := dict(one for one in first if isinstance(one, tuple)):
            raise RequestsFailedError(failures)
        return cast(list[Response], first)

    def drop(self, ids: Iterable[str]) -> tuple[dict[str, int], dict[int, str]]:
        """Forget requests; return the tokens of undelivered responses by id, and the names of the others by number."""
        dropped = set(ids)
        responses = (news for news in self.news if isinstance(news, Response))
        thrown_away = {one.request_id: len(one.token_ids) for one in responses if one.request_id in dropped}
        self.news = [n for n in self.news if (n.request_id if isinstance(n, Response) else n[0]) not in dropped]
        return thrown_away, {self._number_of.pop(name): name for name in dropped & self._number_of.keys()}


def read_scores(answers: Sequence[Sequence[list[float] | Failure | None]]) -> list[list[float] | None]:
    """Return the probabilities of each prompt from its parts; None where it was refused."""
    failures = [next((part for part in parts if isinstance(part, Failure)), None) for parts in answers]
    lost = {i: failure for i, failure in enumerate(failures) if failure is not None and not failure.is_refusal}
    if lost:
        raise RequestsFailedError({f"prompt {i} of next_token_probabilities": why for i, why in lost.items()})
    return [
        [value for part in parts for value in cast(list[float], part)] if failure is None else None
        for parts, failure in zip(answers, failures, strict=True)
    ]


def check_request(
    request: Request, *, max_context: int, end_ids: Collection[int], query_ids: Sequence[int] | None
) -> None:
    if query_ids is not None and request.query is not None:
        check_query(request.query.suffix_ids, query_ids)
    prefix, most = request.prefix_ids, request.sampling.max_new_tokens
    if len(prefix) >= most:
        wanted = f"`prefix_ids` of request {request.id!r} to leave room in `max_new_tokens`, {most}"
        raise InputError(f"Expected {wanted}, which counts them too, but got {len(prefix)}. Raise `max_new_tokens`.")
    if ends := set(prefix) & set(end_ids):
        wanted = f"`prefix_ids` of request {request.id!r} to be tokens inside of a response"
        raise InputError(f"Expected {wanted}, but got {min(ends)}, which ends one.")
    response_room(request, max_context)


def response_room(request: Request, max_context: int) -> int:
    """Return how many tokens may be drawn, so that prompt + response + query fit; a prefix is part of the response."""
    suffix = 0 if request.query is None else len(request.query.suffix_ids)
    longest = max_context - suffix - 1
    if not 1 <= len(request.prompt_ids) <= longest:
        found = f"{len(request.prompt_ids)}: a context of {max_context} also holds {suffix} of the query and a response"
        raise InputError(f"Expected request {request.id!r} to have a prompt of 1 to {longest} tokens, but got {found}.")
    room = min(request.sampling.max_new_tokens, longest + 1 - len(request.prompt_ids)) - len(request.prefix_ids)
    if room < 1:
        wanted = f"`prefix_ids` of request {request.id!r} to leave room for a token"
        found = f"{len(request.prefix_ids)} after a prompt of {len(request.prompt_ids)} in a context of {max_context}"
        raise InputError(f"Expected {wanted}, but got {found}, which also holds {suffix} of the query.")
    return room


def check_prompts(prompts: Sequence[Sequence[int]], max_context: int) -> None:
    for prompt in prompts:
        if not 1 <= len(prompt) <= max_context:
            raise InputError(f"Expected prompts of 1 to {max_context} tokens, but got {len(prompt)}.")


def stream_seed(request: Request) -> int:
    """Return the seed of a stream of random numbers that begins with the first token drawn.

    It depends on the length of the prefix. With the seed of the request itself a continuation would draw with the
    numbers that its own first tokens were drawn with.

    Example:
        >>> from selfcal_lightning.records import SamplingSettings
        >>> plain = Request("r", (1,), SamplingSettings(), seed=7)
        >>> longer = Request("r", (1,), SamplingSettings(), seed=7, prefix_ids=(5, 6))
        >>> stream_seed(plain), stream_seed(longer) != 7
        (7, True)
    """
    if not request.prefix_ids:
        return request.seed
    key = f"continuation/{request.seed}/{len(request.prefix_ids)}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 2


def edt_parameters(sampling: SamplingSettings) -> list[float] | None:
    """Return [base, scale, theta] where a response is drawn at a dynamic temperature, None at a fixed one."""
    if sampling.edt_scale is None or sampling.temperature == 0.0:
        return None
    return [sampling.temperature, sampling.edt_scale, sampling.edt_theta]


def mass_of(probabilities: Iterable[float]) -> float:
    """Return the sum of probabilities of one distribution, which rounding may bring above 1."""
    return min(math.fsum(probabilities), 1.0)


def finish_of(token_ids: Sequence[int], *, ended: bool, step_ids: Collection[int], limit: int) -> Finish:
    """Return how a response ended. At the limit nothing can follow, so that a step that ends there is cut by it.

    Example:
        >>> finish_of([5, 19], ended=False, step_ids=(19,), limit=9)
        'step'
        >>> finish_of([5, 19], ended=False, step_ids=(19,), limit=2)
        'length'
    """
    if ended:
        return "stop"
    return "step" if token_ids and token_ids[-1] in step_ids and len(token_ids) < limit else "length"


def check_query(given: Sequence[int], query_ids: Sequence[int]) -> None:
    """Raise InputError unless ``given`` is the query that the adapter was trained on, both in token ids."""
    if tuple(given) != tuple(query_ids):
        wanted = f"the confidence query that the activated adapter was trained on, {list(query_ids)} in token ids"
        way_out = "Set `query` to the text in the adapter's manifest, and `model` to its base model."
        raise InputError(f"Expected {wanted}, but got {list(given)}. {way_out}")


def ends_with_query(prompt: Sequence[int], query_ids: Sequence[int] | None) -> bool:
    """Return whether ``prompt`` ends with the query, so that an activated adapter reads its end.

    Example:
        >>> ends_with_query((5, 6, 7), (6, 7)), ends_with_query((6, 7), (6, 7)), ends_with_query((5, 6, 7), None)
        (True, False, False)
    """
    if query_ids is None or len(prompt) <= len(query_ids):
        return False
    return tuple(prompt[-len(query_ids) :]) == tuple(query_ids)
