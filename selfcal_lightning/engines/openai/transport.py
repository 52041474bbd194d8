"""HTTP to an OpenAI-compatible server: retries, a deadline for each request, streams, and errors that hold no key."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from selfcal_lightning.engines.openai.address import presentable
from selfcal_lightning.engines.openai.retries import (
    ServerError,
    TransientError,
    backoff_seconds,
    is_transient,
    retry_after_seconds,
)
from selfcal_lightning.runtime.imports import require

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_logger = logging.getLogger(__name__)
_LONGEST_BODY = 1 << 26
_LONGEST_REFUSAL = 1 << 16
_CONNECT_SECONDS = 30.0
_END_OF_STREAM = b"[DONE]"


class EventReader(Protocol):
    """What a stream's events are fed to."""

    @property
    def finished(self) -> bool:
        """Whether the last event that matters was there."""
        ...

    def take(self, event: Any) -> None:
        """Take in one event."""
        ...


T = TypeVar("T")
Reader = TypeVar("Reader", bound=EventReader)


@dataclass(slots=True)
class TrafficCounters:
    """What went over the wire: attempts made, and those among them that were repetitions."""

    attempts: int = 0
    retries: int = 0


class StatusError(ServerError):
    """The server refused a request.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


# Of this very request, such as a prompt that is too long; 401, 403 and 404 say that no request would be taken.
_OWN_FAULTS = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}


async def presentably(work: Awaitable[T], *, key: str | None) -> T:
    """Return what ``work`` gives; what the server wrote may stand in its errors, and is told without the key."""
    try:
        return await work
    except (ServerError, ValueError) as error:
        kind = ServerError if isinstance(error, ServerError) else ValueError
        raise kind(presentable(str(error), key=key)) from None


def is_refusal(error: ServerError) -> bool:
    """Return whether a server refused a request for what it asks, so that asking once more is in vain."""
    return isinstance(error, StatusError) and error.status in _OWN_FAULTS


class Transport:
    """Sends requests from within one event loop.

    An attempt is repeated after HTTP 429 or 5xx and after a broken connection (refused, reset, ended in the middle of
    an answer), and after nothing else. It waits as long as Retry-After says, else with exponential backoff and jitter.
    Redirects are not followed, since they would carry the key to another place, and the environment's proxies are not
    used.

    Args:
        base_url: Address without a trailing slash.
        key: Sent as a bearer token; None sends none.
        max_connections: Most connections at a time.
        max_retries: Most further attempts at one request.
        first_wait: Wait after the first failed attempt at most, in seconds.
        longest_wait: Longest wait by backoff, in seconds. Retry-After may ask for more, up to the deadline.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key: str | None,
        max_connections: int,
        max_retries: int,
        first_wait: float,
        longest_wait: float,
    ) -> None:
        self.base_url, self._key = base_url, key
        self._max_connections, self._max_retries = max_connections, max_retries
        self._first_wait, self._longest_wait = first_wait, longest_wait
        self._http = require("aiohttp", extra="openai")
        self._session: ClientSession | None = None
        self.counters = TrafficCounters()

    async def get(self, path: str, *, deadline: float) -> Any:
        """Return the JSON that the server has at ``path``.

        Args:
            path: Below the base URL, or a whole URL.
            deadline: Time of the loop's clock at which to give up.

        Raises:
            ServerError: The request failed for good.
        """
        return await self._with_retries(lambda: self._json("GET", path, None), deadline)

    async def post(self, path: str, body: dict[str, Any], *, deadline: float) -> Any:
        """Return the server's JSON answer to ``body``; arguments and errors as in ``get``."""
        return await self._with_retries(lambda: self._json("POST", path, body), deadline)

    async def stream(self, path: str, body: dict[str, Any], *, deadline: float, read: Callable[[], Reader]) -> Reader:
        """Feed the events of a stream to a reader made by ``read``, a new one for every attempt, and return it."""

        async def attempt() -> Reader:
            reader = read()
            async with self._answer("POST", path, body) as answer:
                async for event in self._events(answer):
                    reader.take(event)
            if not reader.finished:
                raise TransientError("the stream ended before the response did")
            return reader

        return await self._with_retries(attempt, deadline)

    async def close(self) -> None:
        """Close all connections. Closing twice is allowed."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]], deadline: float) -> T:
        clock, trouble, number = asyncio.get_running_loop().time, "it did not answer", 0
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    self.counters.attempts += 1
                    number += 1
                    try:
                        return await self._translated(attempt)
                    except TransientError as error:
                        trouble, wait = str(error), self._wait(error, number)
                    if number > self._max_retries:
                        raise self._failure(f"{trouble} ({number} attempts)")
                    if clock() + wait >= deadline:
                        raise self._failure(f"{trouble} (attempt {number}; no time left to wait {wait:.3g} s more)")
                    self._tell(trouble, wait)
                    await asyncio.sleep(wait)
        except TimeoutError:
            raise self._failure(f"the time was up in attempt {number}: {trouble}") from None

    def _tell(self, trouble: str, wait: float) -> None:
        self.counters.retries += 1
        told = str(self.counters.retries).rstrip("0") == "1"  # the 1st, 10th, 100th ...: a busy server has thousands
        _logger.log(
            logging.WARNING if told else logging.DEBUG,
            "The server at %s: %s; repetition %d in %.3g s.",
            self.base_url, trouble, self.counters.retries, wait,
        )  # fmt: skip

    def _wait(self, error: TransientError, number: int) -> float:
        chance = random.random()
        if error.retry_after is not None:  # a little more, so that those who were told the same do not come together
            return error.retry_after + chance * self._first_wait
        return backoff_seconds(number - 1, first=self._first_wait, longest=self._longest_wait, chance=chance)

    def _failure(self, reason: str) -> ServerError:
        return ServerError(f"The server at {self.base_url} failed: {reason}")

    async def _translated(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run one attempt with the library's errors put into ours; theirs may hold headers, so they are not chained."""
        try:
            return await attempt()
        except (self._http.ClientSSLError, self._http.ClientResponseError) as error:  # no further attempt mends these
            raise self._failure(self._named(error)) from None
        except (self._http.ClientError, ConnectionError) as error:
            raise TransientError(self._named(error)) from None

    def _named(self, error: Exception) -> str:
        return presentable(f"{type(error).__name__}: {error}", key=self._key)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        async with self._answer(method, path, body) as answer:
            return self._parsed(b"".join([piece async for piece in _pieces(answer)]))

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> AsyncIterator[ClientResponse]:
        """Send a request and give the answer, whose status is 200."""
        if self._session is None:
            self._session = self._http.ClientSession(
                connector=self._http.TCPConnector(limit=self._max_connections),
                timeout=self._http.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                cookie_jar=self._http.DummyCookieJar(),
                headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
            )
        url = path if "://" in path else f"{self.base_url}/{path}"
        async with self._session.request(method, url, json=body, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                text = (await answer.content.read(_LONGEST_REFUSAL)).decode(errors="replace")
                self._refuse(answer.status, text, answer.headers.get("Retry-After"))
            yield answer

    async def _events(self, answer: ClientResponse) -> AsyncIterator[Any]:
        """Yield the events of a stream; a server that does not stream has its whole answer taken for one event."""
        if answer.content_type != "text/event-stream":
            yield self._parsed(b"".join([piece async for piece in _pieces(answer)]))
            return
        rest = b""
        async for piece in _pieces(answer):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != _END_OF_STREAM:
                    yield self._parsed(data)

    def _parsed(self, text: bytes) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            shown = presentable(text.decode(errors="replace"), key=self._key)
            raise ServerError(f"Expected the server to answer in JSON, but got {shown!r}.") from None
        if isinstance(value, dict) and "error" in value:  # in a stream the status was sent before the fault was known
            error = value["error"]
            code = error.get("code") if isinstance(error, dict) else None
            if type(code) is not int:  # without a status it says nothing about this request
                shown = presentable(_message(text.decode(errors="replace")), key=self._key)
                raise ServerError(f"The server at {self.base_url} failed in the middle of an answer: {shown}")
            self._refuse(code, text.decode(errors="replace"), None)
        return value

    def _refuse(self, status: int, text: str, retry_after: str | None) -> NoReturn:
        message = f"HTTP {status}: {presentable(_message(text), key=self._key)}"
        if is_transient(status):
            raise TransientError(message, retry_after=retry_after_seconds(retry_after))
        raise StatusError(f"The server at {self.base_url} refused: {message}", status=status)


async def _pieces(answer: ClientResponse) -> AsyncIterator[bytes]:
    size = 0
    async for piece in answer.content.iter_any():
        size += len(piece)
        if size > _LONGEST_BODY:
            raise ServerError(f"Expected the server to send at most {_LONGEST_BODY} bytes in one answer, but got more.")
        yield piece


def _message(text: str) -> str:
    """Return the message in the body of a refusal, or the whole body where it is of no known form."""
    try:
        found = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return text
    return found if isinstance(found, str) else text
