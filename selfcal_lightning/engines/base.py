"""The contract of an engine: who produces text and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from selfcal_lightning.errors import RunError
from selfcal_lightning.records import Request, Response


class RequestsFailedError(RunError):
    """Some requests cannot be answered; all others were, and the engine goes on.

    Attributes:
        reasons: What went wrong, by request id.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        self.reasons = dict(reasons)
        lines = [f"request {name!r}: {reason}" for name, reason in self.reasons.items()]
        super().__init__(f"{len(lines)} request(s) failed; the others were answered. " + "\n".join(lines))


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
            RequestsFailedError: Where requests could not be answered; they are in flight no more, all others go on.
        """
        ...

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """Drop requests and return what was thrown away: the response tokens drawn so far, by id.

        A request that was queued but not begun cost nothing and is left out, as are ids that are unknown or were
        delivered. One that was begun is there, with 0 where no token was drawn yet; so is one that had finished and
        was not yet delivered. A dropped request never comes back.
        """
        ...

    def next_token_probabilities(self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int]) -> list[list[float]]:
        """Return p(token | prompt) from the full softmax, [len(prompts)][len(token_ids)]."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model: engine, model, revision, dtype, weights hash, adapter hash.

        Where the weights are quantised as they are read, ``quantization`` says how.
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
    """
    finished: dict[str, Response] = {}
    pending = set(engine.submit(requests))
    if len(pending) != len(requests):
        raise ValueError(f"Expected request ids to be unique, but got {len(requests) - len(pending)} repeated.")
    while pending:
        for response in engine.poll():
            pending.discard(response.request_id)
            finished[response.request_id] = response
            if on_finished is not None:
                on_finished(response)
    return [finished[request.id] for request in requests]
