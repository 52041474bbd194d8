"""Checks of a server before the first request: its model, its limit, and the features that are needed."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.engines.base import ADAPTER_VARIABLE, EDT_PROCESSOR, MAX_SCORED_IDS
from selfcal_lightning.engines.openai.transport import StatusError, Transport
from selfcal_lightning.engines.openai.wire import (
    EDT_ARG,
    ServerError,
    list_models,
    read_probabilities,
    score_body,
)
from selfcal_lightning.models.chat_format import ChatFormat

TRIES, WAIT_SECONDS, CONNECT_SECONDS = 3, 1.0, 5.0
PORTS = {"http": 80, "https": 443}


def check_reachable(base_url: str) -> None:
    """Raise RunError where no connection to the server can be made, in three attempts a second apart."""
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
            f"Expected `served_model` to be a server's name for an adapter on one of its models, but got {adapter!r}. "
            f"It has: {', '.join(models)}. {WAY_OUT}"
        )
    return parent


_PROBE_TEXT = "Is 17 + 25 = 42?\nYes: a na\u00efve sum. No?"
_KEY_IS_WRONG = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    served_model: str
    max_context: int
    version: str | None
    adapter: str | None


async def ask_models(transport: Transport, *, key_name: str, deadline: float) -> Any:
    try:
        return await transport.get("models", deadline=deadline)
    except StatusError as error:
        if error.status in _KEY_IS_WRONG:
            raise ServerError(f"{error} Expected the key in the environment variable {key_name}.") from None
        raise ServerError(f"{error} Expected `base_url` to be the address before `/models`, such as .../v1.") from None


async def check_features(
    transport: Transport, name: str, chat: ChatFormat, *, server_edt: bool, deadline: float
) -> str | None:
    """Return the server's version, after checks of its tokenizer and, where that is needed, its EDT."""
    root = transport.base_url.removesuffix("/v1")
    version = (await _offered(transport, f"{root}/version", None, deadline)).get("version")
    await _check_tokenizer(transport, root, name, chat, deadline)
    if server_edt:
        await _check_edt(transport, name, chat, deadline)
    return version if isinstance(version, str) else None


def context_of(wanted: int | None, limit: int | None) -> int:
    """Return the longest prompt + response + query; vLLM's limit also counts the token that answers the query."""
    if wanted is None and limit is None:
        raise InputError("Expected `max_context` to be given, since the server does not tell its limit.")
    if wanted is not None and limit is not None and wanted > limit - 1:
        raise InputError(f"Expected `max_context` to be at most {limit - 1} for this server, but got {wanted}.")
    return wanted if wanted is not None else cast(int, limit) - 1


async def _offered(transport: Transport, url: str, body: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
    """Return the answer of a place that not every server has; nothing where it has no such place."""
    try:
        asked = transport.get(url, deadline=deadline) if body is None else transport.post(url, body, deadline=deadline)
        answer = await asked
    except ServerError:  # it may be a page in HTML, too; a server that is out of order shows it at the first request
        return {}
    return answer if isinstance(answer, dict) else {}


async def _check_tokenizer(transport: Transport, root: str, name: str, chat: ChatFormat, deadline: float) -> None:
    """Raise InputError where the server cuts a text into other tokens: our prompts would be nonsense to it."""
    body = {"model": name, "prompt": _PROBE_TEXT, "add_special_tokens": False}
    answer = await _offered(transport, f"{root}/tokenize", body, deadline)
    ours = chat.tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    if answer.get("tokens", ours) != ours:
        raise InputError(
            f"Expected `tokenizer` to cut {_PROBE_TEXT!r} as the server's does, but {chat.tokenizer.name_or_path!r} "
            f"gives {ours} and the server's {answer['tokens']}. Name the tokenizer of the model {name!r}."
        )


async def _check_edt(transport: Transport, name: str, chat: ChatFormat, deadline: float) -> None:
    """Refuse a server that ignores EDT and would draw at temperature 1; our logits processor refuses this body."""
    try:
        body = {"model": name, "prompt": [chat.pad_id], "max_tokens": 1, "temperature": 0.5}
        await transport.post("completions", {**body, "vllm_xargs": {EDT_ARG: [0.8, 0.8, 1.0]}}, deadline=deadline)
    except StatusError as error:
        if error.status == HTTPStatus.BAD_REQUEST and EDT_ARG in str(error):
            return
        raise
    raise InputError(
        "Expected the server to know entropy-based dynamic temperature, as `server_edt` says, but it does not. "
        f"Start it with `--logits-processors {EDT_PROCESSOR}`, or set `server_edt` to false and `edt_scale` to null."
    )


async def score(
    transport: Transport, name: str, prompt: Sequence[int], token_ids: Sequence[int], deadline: float
) -> list[float]:
    """Return p(token | prompt) of each token, in as many parts as the server takes."""
    found: list[float] = []
    for start in range(0, len(token_ids), MAX_SCORED_IDS):
        chunk = token_ids[start : start + MAX_SCORED_IDS]
        body = {"model": name, **score_body(prompt, chunk)}
        found += read_probabilities(await transport.post("completions", body, deadline=deadline), chunk)
    return found
