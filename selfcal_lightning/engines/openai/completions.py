"""What the engine asks of a server's ``/completions``: to draw a response, and to score tokens after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.engines.openai.facts import ServerFacts
from selfcal_lightning.engines.openai.records import Flight
from selfcal_lightning.engines.openai.transport import Transport
from selfcal_lightning.engines.openai.wire import (
    MAX_SCORED_IDS,
    SampleReader,
    read_probabilities,
    sample_body,
    score_body,
)


async def draw(
    transport: Transport,
    facts: ServerFacts,
    flight: Flight,
    *,
    stops: Sequence[int],
    room: int,
    interval: int,
    deadline: float,
) -> SampleReader:
    """Sample a response and return what came in of it.

    Args:
        transport: The way to the server.
        facts: What the server has.
        flight: The request, which counts its attempts.
        stops: Ids that end a response.
        room: Most tokens of it.
        interval: Tokens in a piece of the stream.
        deadline: When the work must be done, by the clock of the loop.
    """
    body = sample_body(flight.request, max_tokens=room, stop_token_ids=stops, interval=interval)
    return await transport.stream(
        "completions",
        {"model": facts.served_model, **body},
        deadline=deadline,
        read=lambda: flight.begin(stops, max_tokens=room, vocabulary=facts.vocabulary),
    )


async def score(
    transport: Transport, name: str, prompt: Sequence[int], token_ids: Sequence[int], deadline: float
) -> list[float]:
    """Return p(token | prompt) of each token, asked in as many parts as the server takes.

    Args:
        transport: The way to the server.
        name: The server's name for the model.
        prompt: Token ids of the prompt.
        token_ids: The tokens.
        deadline: As in :func:`draw`.
    """
    found: list[float] = []
    for start in range(0, len(token_ids), MAX_SCORED_IDS):
        chunk = token_ids[start : start + MAX_SCORED_IDS]
        body = {"model": name, **score_body(prompt, chunk)}
        found += read_probabilities(await transport.post("completions", body, deadline=deadline), chunk)
    return found
