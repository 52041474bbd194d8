"""Short replies of an engine, asked for together: those that it refuses by themselves are left out."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.engines.base import Engine, RequestsFailedError
from selfcal_lightning.errors import RunError
from selfcal_lightning.records import Request, Response


def ask_for_replies(engine: Engine, requests: Sequence[Request]) -> dict[str, Response]:
    """Run ``requests`` to the end and return the replies by the request's id.

    One that the engine refuses by itself, such as a prompt that crashes it, has no reply.

    Raises:
        RequestsFailedError: A request failed for another reason; it is asked again another time, instead of taking
            silence for an answer.
        RunError: The engine returned nothing with requests in flight.
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
