"""What a server is asked before the first request: its model, its limit, and whether it does what is counted on."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from selfcal_lightning.engines.openai.adapter import base_of
from selfcal_lightning.engines.openai.retries import ServerError
from selfcal_lightning.engines.openai.transport import StatusError, Transport
from selfcal_lightning.engines.openai.wire import EDT_ARG, EDT_PROCESSOR, choose_model, edt_probe_body
from selfcal_lightning.errors import InputError
from selfcal_lightning.prompts.chat_format import ChatFormat

_PROBE_TEXT = "Is 17 + 25 = 42?\nYes: a na\u00efve sum. No?"
_KEY_IS_WRONG = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a server.

    Attributes:
        served_model: Its name for the model.
        max_context: Longest prompt + response + query, in tokens.
        version: Version of vLLM; None where it does not tell.
        vocabulary: Number of token ids that it may send.
        adapter: Its name for the activated adapter on that model; None without one.
    """

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
    """Ask a server what it has, and check what can be checked.

    Args:
        transport: The way to it.
        served_model: The name that the user gave, or None.
        default_model: The name to take where the server has it and none was given.
        is_activated: Whether the name that was given is an activated adapter's, whose base model samples.
        max_context: The limit that the user gave, or None.
        chat: The chat format that prompts are rendered with.
        vocabulary: Number of the model's token ids.
        server_edt: Whether it should have our logits processor.
        key_name: Environment variable of the key, for the message when it is refused.
        deadline: Time of the loop's clock at which to give up.

    Raises:
        ServerError: The server cannot be used.
        ValueError: A setting does not fit it.
    """
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
    return wanted if wanted is not None else limit - 1


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
