"""Checks of a server before the first request: its model, its limit, and the features that are needed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.engines.activated_probe import Probe, ProbeAnswers, check_answers
from selfcal_lightning.engines.base import ADAPTER_VARIABLE
from selfcal_lightning.engines.openai.transport import StatusError, Transport
from selfcal_lightning.engines.openai.wire import (
    EDT_ARG,
    EDT_PROCESSOR,
    MAX_SCORED_IDS,
    Flight,
    SampleReader,
    ServerError,
    choose_model,
    edt_probe_body,
    list_models,
    read_probabilities,
    sample_body,
    score_body,
)
from selfcal_lightning.models.chat_format import ChatFormat

TRIES, WAIT_SECONDS, CONNECT_SECONDS = 3, 1.0, 5.0
PORTS = {"http": 80, "https": 443}


def check_reachable(base_url: str) -> None:
    """Raise RunError where no connection to the server can be made, in three attempts a second apart.

    A server that is there and busy, or still loading its model, is left to the engine's own retries.
    """
    address = urlsplit(base_url)
    place = (address.hostname or "", address.port or PORTS.get(address.scheme, 80))
    problem = OSError()
    for attempt in range(TRIES):
        if attempt:
            time.sleep(WAIT_SECONDS)
        try:
            with socket.create_connection(place, timeout=CONNECT_SECONDS):
                return
        except OSError as error:
            problem = error
    raise RunError(
        f"Expected a server at {base_url}, but got no connection: {problem.strerror or problem}. Start it (`vllm serve "
        "MODEL`) and wait until it listens, or give its address by `base_url`."
    ) from problem


Ask = Callable[[tuple[int, ...], bool], Awaitable[list[float]]]  # (prompt, whether by the adapter's name)
WAY_OUT = (
    f"Start vLLM's server with the environment variable {ADAPTER_VARIABLE} naming the adapter's folder, "
    "`--enable-lora --max-loras 2 --lora-modules NAME=FOLDER`, and on a CPU `--enforce-eager`, where this project is "
    "installed too."
)


def base_of(answer: Any, adapter: str) -> str:
    """Return a server's name for the model that an adapter is on."""
    models = list_models(answer)
    parent = models[adapter].get("parent") if adapter in models else None
    if not isinstance(parent, str) or parent not in models:
        raise InputError(
            f"Expected `served_model` to be the server's name for an adapter on one of its models, but got "
            f"{adapter!r}. It has: {', '.join(models)}. {WAY_OUT}"
        )
    return parent


async def try_adapter(ask: Ask, probe: Probe, *, exact: bool) -> list[list[float]]:
    """Hold a server's activated adapter against its base model, and return what it says awake, [contexts][tokens]."""

    async def ask_all(prompts: Sequence[tuple[int, ...]], by_adapter: bool) -> list[list[float]]:
        return await asyncio.gather(*(ask(prompt, by_adapter) for prompt in prompts))

    base = await ask_all(probe.contexts, False)
    awake, base_asked, asleep = await asyncio.gather(
        ask_all(probe.asked, True), ask_all(probe.asked, False), ask_all(probe.contexts, True)
    )
    again = await ask_all(probe.asked, False)
    try:
        check_answers(ProbeAnswers(base, asleep, base_asked, awake, again), exact=exact, engine="the server")
    except ValueError as error:
        raise ValueError(f"{error} {WAY_OUT}") from None
    return awake


_PROBE_TEXT = "Is 17 + 25 = 42?\nYes: a na\u00efve sum. No?"
_KEY_IS_WRONG = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a server."""

    served_model: str
    max_context: int
    version: str | None
    vocabulary: int
    adapter: str | None = None


async def inspect_server(
    transport: Transport,
    *,
    served_model: str | None,
    default_model: str,
    is_activated: bool,
    max_context: int | None,
    chat: ChatFormat,
    vocabulary: int,
    server_edt: bool,
    key_name: str,
    deadline: float,
) -> ServerFacts:
    """Ask a server what it has, and check what can be checked."""
    try:
        answer = await transport.get("models", deadline=deadline)
    except StatusError as error:
        if error.status in _KEY_IS_WRONG:
            raise ServerError(f"{error} Expected the key in the environment variable {key_name}.") from None
        raise ServerError(f"{error} Expected `base_url` to be the address before `/models`, such as .../v1.") from None
    adapter = served_model if is_activated else None
    wanted = served_model if adapter is None else base_of(answer, adapter)
    name, limit = choose_model(answer, wanted=wanted, default=default_model)
    root = transport.base_url.removesuffix("/v1")
    version = (await _offered(transport, f"{root}/version", None, deadline)).get("version")
    await _check_tokenizer(transport, root, name, chat, deadline)
    if server_edt:
        await _check_edt(transport, name, chat, deadline)
    told = version if isinstance(version, str) else None
    return ServerFacts(name, _context(max_context, limit), told, vocabulary, adapter)


def _context(wanted: int | None, limit: int | None) -> int:
    """Return the longest prompt + response + query; vLLM's limit also counts the token that answers the query."""
    if wanted is None and limit is None:
        raise InputError("Expected `max_context` to be given, since the server does not tell its limit, but got None.")
    if wanted is not None and limit is not None and wanted > limit - 1:
        raise InputError(f"Expected `max_context` to be at most {limit - 1} for this server, but got {wanted}.")
    return wanted if wanted is not None else cast(int, limit) - 1


async def _offered(transport: Transport, url: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
    """Return what a server answers at a place that not every server has; nothing where it has no such place."""
    try:
        if body is None:
            answer = await transport.get(url, deadline=deadline)
        else:
            answer = await transport.post(url, body, deadline=deadline)
    except ServerError:  # it may be a page in HTML, too; a server that is out of order shows it at the first request
        return {}
    return answer if isinstance(answer, dict) else {}


async def _check_tokenizer(transport: Transport, root: str, name: str, chat: ChatFormat, deadline: float) -> None:
    """Raise ValueError where the server cuts a text into other tokens: prompts sent as ids would be nonsense to it."""
    body = {"model": name, "prompt": _PROBE_TEXT, "add_special_tokens": False}
    answer = await _offered(transport, f"{root}/tokenize", body, deadline)
    ours = chat.tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    if answer.get("tokens", ours) != ours:
        raise InputError(
            f"Expected `tokenizer` to cut {_PROBE_TEXT!r} as the server's does, but {chat.tokenizer.name_or_path!r} "
            f"gives {ours} and the server's {answer['tokens']}. Name the tokenizer of the model {name!r}."
        )


async def _check_edt(transport: Transport, name: str, chat: ChatFormat, deadline: float) -> None:
    """Raise ValueError where the server takes no notice of EDT: it would draw at temperature 1 without a word."""
    try:
        await transport.post("completions", {"model": name, **edt_probe_body(chat.pad_id)}, deadline=deadline)
    except StatusError as error:
        if error.status == HTTPStatus.BAD_REQUEST and EDT_ARG in str(error):
            return
        raise
    raise InputError(
        "Expected the server to know entropy-based dynamic temperature, since `server_edt` is set, but it does not. "
        f"Start it with `--logits-processors {EDT_PROCESSOR}`, or set `server_edt` to false and `edt_scale` to null."
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
    """Sample a response and return what came in of it."""
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
