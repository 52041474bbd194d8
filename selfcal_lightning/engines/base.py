"""The contract of an engine: who produces text and probabilities."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.records import Finish, Request, Response

SHOWN_FAILURES = 3
MAX_FAILURES = 64  # as many as a server has at once: all of them failed


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
        super().__init__(f"{len(self.failures)} request(s) failed; the others go on. " + "\n".join([*shown, *more]))


class EngineStoppedError(RunError):
    """The engine cannot continue; what it delivered before is valid."""


class FailuresInARow:
    """Counts consecutive failed requests, and stops the work when there are too many.

    Requests that the engine refuses count once for each question: one prompt may be refused for all of its samples.

    Example:
        >>> row = FailuresInARow(2, way_out="Start again.")
        >>> row.add("q/0", "q", Failure("busy"))
        >>> row.clear()
        >>> row.add("q/1", "q", Failure("busy"))
        >>> row.add("q/2", "q", Failure("busy"))
        Traceback (most recent call last):
        selfcal_lightning.engines.base.EngineStoppedError: Expected the engine to answer, but 2 requests in a ...
    """

    def __init__(self, limit: int, *, way_out: str) -> None:
        if limit < 1:
            raise InputError(f"Expected `max_failures` to be at least 1, but got {limit}.")
        self._limit, self._way_out = limit, way_out
        self._failed: set[tuple[str, bool]] = set()

    def clear(self) -> None:
        """Reset the count: a request was answered."""
        self._failed.clear()

    def add(self, name: str, question_id: str, failure: Failure) -> None:
        """Count a failure."""
        self._failed.add((question_id, True) if failure.is_refusal else (name, False))
        if len(self._failed) >= self._limit:
            raise EngineStoppedError(
                f"Expected the engine to answer, but {len(self._failed)} requests in a row failed (`max_failures`). "
                f"{self._way_out} The last one: {failure.reason}"
            )


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
            RequestsFailedError: Requests were not answered; they are in flight no more, all others go on.
            EngineStoppedError: The engine cannot go on.
        """

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """Drop requests and return the discarded response tokens, by id.

        A request that was queued but not begun cost nothing and is left out, as are ids that are unknown or were
        delivered. One that was begun is there, with 0 where no token was drawn yet; so is one that had finished and
        was not yet delivered. A dropped request never comes back.
        """

    def drawn_so_far(self, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return the response tokens of requests that are being drawn, where the engine sees them."""

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        """Return p(token | prompt) from the full softmax, ``[len(prompts)][len(token_ids)]``.

        None stands for a prompt that the engine refuses, such as one that crashes it.

        Args:
            prompts: Token ids.
            token_ids: Whose probabilities are wanted.
            with_adapter: Whether the adapter that the engine serves takes part; False asks the base model below it.

        Raises:
            ValueError: A prompt does not fit, or the engine cannot put its adapter aside.
            RequestsFailedError: Prompts could not be scored for another reason.
        """

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model: engine, model, revision, dtype, weights hash, adapter hash.

        Where the weights are quantised as they are read, ``quantization`` says how. Where P(True) is read from an
        output layer in another dtype than the model's, ``head_dtype`` names it. ``activated_adapter_sha256`` names an
        adapter that reads the confidence query alone: texts and their log-probabilities are the base model's.
        """

    def close(self) -> None:
        """Release memory and processes. Closing twice is allowed."""


def generate(
    engine: Engine, requests: Sequence[Request], *, on_finished: Callable[[Response], None] | None = None
) -> list[Response]:
    """Run ``requests`` to the end and return their responses in the order of the requests.

    Args:
        engine: The engine to run on.
        requests: What to sample; ids must be unique.
        on_finished: Called with each response as it arrives, for progress.

    Raises:
        RequestsFailedError: Requests were not answered, when all others were.
    """
    finished: dict[str, Response] = {}
    failures: dict[str, Failure] = {}
    pending = set(engine.submit(requests))
    if len(pending) != len(requests):
        raise InputError(f"Expected request ids to be unique, but got {len(requests) - len(pending)} repeated.")
    while pending:
        try:
            responses = engine.poll()
        except RequestsFailedError as error:
            failures |= error.failures
            pending -= error.failures.keys()
            continue
        for response in responses:
            pending.discard(response.request_id)
            finished[response.request_id] = response
            if on_finished is not None:
                on_finished(response)
    if failures:
        raise RequestsFailedError(failures)
    return [finished[request.id] for request in requests]


def check_prefix(request: Request, end_ids: Collection[int]) -> None:
    """Raise InputError where nothing can follow the prefix of a request."""
    prefix, most = request.prefix_ids, request.sampling.max_new_tokens
    if len(prefix) >= most:
        raise InputError(
            f"Expected `prefix_ids` of request {request.id!r} to leave room in `max_new_tokens`, {most}, which counts "
            f"them too, but got {len(prefix)}. Raise `max_new_tokens`, or take that response as it is."
        )
    ends = set(prefix) & set(end_ids)
    if ends:
        raise InputError(
            f"Expected `prefix_ids` of request {request.id!r} to be tokens inside of a response, but got {min(ends)}, "
            "which ends one. Leave it out, or take that response as it is."
        )


def stream_seed(request: Request) -> int:
    """Return the seed of a stream of random numbers that begins with the first token drawn.

    It depends on how many tokens stand already. With the seed of the request itself a continuation would draw with the
    numbers that its own first tokens were drawn with.

    Example:
        >>> from selfcal_lightning.records import SamplingSettings
        >>> plain = Request("r", (1,), SamplingSettings(), seed=7)
        >>> stream_seed(plain)
        7
        >>> longer = Request("r", (1,), SamplingSettings(), seed=7, prefix_ids=(5, 6))
        >>> stream_seed(longer) != 7
        True
    """
    if not request.prefix_ids:
        return request.seed
    key = f"continuation/{request.seed}/{len(request.prefix_ids)}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") >> 2


def finish_of(drawn: int, *, last: int | None, ended: bool, step_ids: Collection[int], limit: int) -> Finish:
    """Return how a response ended. At the limit nothing can follow, so that a step that ends there is cut by it.

    Example:
        >>> finish_of(4, last=19, ended=False, step_ids=(19,), limit=9)
        'step'
        >>> finish_of(9, last=19, ended=False, step_ids=(19,), limit=9)
        'length'
    """
    if ended:
        return "stop"
    return "step" if last in step_ids and drawn < limit else "length"


def ask_for_replies(engine: Engine, requests: Sequence[Request]) -> dict[str, Response]:
    """Run ``requests`` to the end and return the replies by the request's id.

    One that the engine refuses, such as a prompt that crashes it, has no reply.
    """
    pending = set(engine.submit(requests))
    replies: dict[str, Response] = {}
    try:
        while pending:
            try:
                responses = engine.poll()
            except RequestsFailedError as error:
                pending -= error.failures.keys()
                if not all(failure.is_refusal for failure in error.failures.values()):
                    raise
                continue
            if not responses:
                raise RunError(f"Expected the engine to go on, but got nothing with {len(pending)} in flight.")
            replies |= {response.request_id: response for response in responses}
            pending -= replies.keys()
    finally:
        engine.cancel(pending)
    return replies


# Folders of the activated adapters that vLLM should know, divided as in PATH; read by our plugin for vLLM.
ADAPTER_VARIABLE = "SELFCAL_ACTIVATED_ADAPTER"


def check_query(given: Sequence[int], query_ids: Sequence[int]) -> None:
    """Raise ValueError unless ``given`` is the query that the adapter was trained on, both in token ids."""
    if tuple(given) != tuple(query_ids):
        raise InputError(
            f"Expected the confidence query that the activated adapter was trained on, {list(query_ids)} in token ids, "
            f"but got {list(given)}. Set `query` to the text in the adapter's manifest, and `model` to its base model."
        )


def ends_with_query(prompt: Sequence[int], query_ids: Sequence[int] | None) -> bool:
    """Return whether ``prompt`` ends with the query, so that an activated adapter reads its end.

    Example:
        >>> ends_with_query((5, 6, 7), (6, 7)), ends_with_query((6, 7), (6, 7)), ends_with_query((5, 6, 7), None)
        (True, False, False)
    """
    if query_ids is None or len(prompt) <= len(query_ids):
        return False
    return tuple(prompt[-len(query_ids) :]) == tuple(query_ids)
