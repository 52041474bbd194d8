"""The contract of an engine: who produces text and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.records import Request, Response

SHOWN_FAILURES = 3
MAX_FAILURES = 64  # as many as a server has at once: all of them failed


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was not answered.

    Attributes:
        reason: What went wrong.
        is_refusal: Whether the engine refuses this very request, such as a prompt that crashes it, so that asking once
            more is in vain. Otherwise it may be answered another time: the server was out of order, say.
    """

    reason: str
    is_refusal: bool = False


class RequestsFailedError(RunError):
    """Some requests were not answered; all others go on.

    Attributes:
        failures: Why, by request id.
    """

    def __init__(self, failures: Mapping[str, Failure]) -> None:
        self.failures = dict(failures)
        shown = [f"request {name!r}: {failure.reason}" for name, failure in self.failures.items()][:SHOWN_FAILURES]
        more = [f"and {len(self.failures) - len(shown)} more"] if len(self.failures) > len(shown) else []
        super().__init__(f"{len(self.failures)} request(s) failed; the others go on. " + "\n".join([*shown, *more]))


class EngineStoppedError(RunError):
    """The engine cannot go on, or it would be in vain; what it delivered before is good."""


class FailuresInARow:
    """Counts requests that were not answered since the last answer, and stops the work when they are too many.

    Requests that the engine refuses count once for each question: one prompt may be refused for all of its samples.

    Args:
        limit: How many are too many.
        way_out: What the user is told to do then.

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
        """Begin anew: a request was answered."""
        self._failed.clear()

    def add(self, name: str, question_id: str, failure: Failure) -> None:
        """Count a failure.

        Args:
            name: The request.
            question_id: Its question.
            failure: Why it was not answered.

        Raises:
            EngineStoppedError: It is one too many.
        """
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
        ...

    @property
    def batch_size(self) -> int:
        """Requests that it works on at a time; with fewer in flight, a part of it stands idle."""
        ...

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Queue ``requests`` and return their ids. Raises ValueError where prompt + response + query cannot fit."""
        ...

    def poll(self) -> list[Response]:
        """Work for a while and return the responses that finished; empty only when nothing is in flight.

        Raises:
            RequestsFailedError: Requests were not answered; they are in flight no more, all others go on.
            EngineStoppedError: The engine cannot go on.
        """
        ...

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """Drop requests and return what was thrown away: the response tokens drawn so far, by id.

        A request that was queued but not begun cost nothing and is left out, as are ids that are unknown or were
        delivered. One that was begun is there, with 0 where no token was drawn yet; so is one that had finished and
        was not yet delivered. A dropped request never comes back.
        """
        ...

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        """Return p(token | prompt) from the full softmax, [len(prompts)][len(token_ids)].

        None stands for a prompt that the engine refuses by itself, such as one that crashes it.

        Args:
            prompts: Token ids.
            token_ids: Whose probabilities are wanted.
            with_adapter: Whether the adapter that the engine serves takes part; False asks the base model below it.

        Raises:
            ValueError: A prompt does not fit, or the engine cannot put its adapter aside.
            RequestsFailedError: Prompts could not be scored for another reason.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model: engine, model, revision, dtype, weights hash, adapter hash.

        Where the weights are quantised as they are read, ``quantization`` says how. Where P(True) is read from an
        output layer in another dtype than the model's, ``head_dtype`` names it. ``activated_adapter_sha256`` names an
        adapter that reads the confidence query alone: texts and their log-probabilities are the base model's.
        """
        ...

    def close(self) -> None:
        """Give back memory and processes. Closing twice is allowed."""
        ...


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
