"""HTTP to an OpenAI-compatible server: retries, a deadline for each request, streams, and errors without the key."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import queue
import random
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.imports import require
from selfcal_lightning.engines.openai.wire import (
    SampleReader,
    ServerError,
    TransientError,
    backoff_seconds,
    retry_after_seconds,
)

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

_BASE_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?(?:/[\w./~-]*)?")
_HIDDEN = "[key]"
_LONGEST = 800
_logger = logging.getLogger(__name__)
_LONGEST_BODY = 1 << 26
_LONGEST_REFUSAL = 1 << 16
_CONNECT_SECONDS = 30.0
_END_OF_STREAM = b"[DONE]"
# Of this very request, such as a prompt that is too long; 401, 403 and 404 say that no request would be taken.
OWN_FAULTS = {HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY}
T = TypeVar("T")
Job = Callable[[], Coroutine[Any, Any, Any]]
Outcome = tuple[int, Any, BaseException | None]
Key = int | asyncio.Future[Any]  # a job's number, or what waits in the loop for its task to end


def check_base_url(base_url: str, *, allow_http: bool = False) -> str:
    match = _BASE_URL.fullmatch(base_url)
    try:
        _ = urlsplit(base_url).port
    except ValueError:  # it is above 65535, or what stands in brackets is no address
        match = None
    if match is None:  # it may hold a password, so it is not repeated
        raise InputError(
            "Expected `base_url` to be like https://host:port/v1, with a port of at most 65535 and without user name, "
            "password or query. The key goes into the environment variable that `api_key_env` names."
        )
    if match["scheme"] == "http" and not allow_http and not is_loopback(match["host"]):
        raise InputError(
            f"Expected `base_url` to be https:// or this machine, but got {base_url!r}: prompts and key would travel "
            "in the clear. Use https, an ssh tunnel to 127.0.0.1, or set `allow_http`."
        )
    return base_url.rstrip("/")


def read_key(name: str) -> str | None:
    """Return the key in the environment variable ``name``, None where it is unset or empty."""
    key = os.environ.get(name, "").strip()
    if not key.isascii() or not key.isprintable():
        raise InputError(f"Expected the key in ${name} to be printable ASCII, but it is not.")
    return key or None


def presentable(text: str, *, key: str | None) -> str:
    """Return a text of a server or a library as it may be shown: short, printable, and without the key."""
    hidden = text if key is None else text.replace(key, _HIDDEN)  # before it is cut, or half a key would stay
    line = " ".join("".join(c if c.isprintable() else " " for c in hidden).split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " ..."


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False


class BackgroundJobs:
    """Runs numbered jobs in an event loop of its own thread and hands over their results and errors."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[tuple[Key, Job]] = deque()
        self._running: dict[Key, asyncio.Task[Any]] = {}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="selfcal-server", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted; one that is done stays as it is

    async def run_first(self, jobs: Sequence[Job]) -> list[Any]:
        """Return the results of jobs that go before all that wait; for work in the loop."""
        keys = [self._loop.create_future() for _ in jobs]
        self._waiting.extendleft(reversed(list(zip(keys, jobs, strict=True))))
        self._fill()
        try:
            return [task.result() for task in await asyncio.gather(*keys)]
        finally:
            await self._drop(set(keys))

    def add(self, jobs: Sequence[tuple[int, Job]]) -> None:
        self._loop.call_soon_threadsafe(self._queue, list(jobs))

    def take(self, patience: float | None = None) -> Outcome:
        """Wait for a job to finish; raises queue.Empty when ``patience``, in seconds, ends."""
        return self._outcomes.get(timeout=patience)

    def take_ready(self) -> list[Outcome]:
        return [self._outcomes.get() for _ in range(self._outcomes.qsize())]

    def drop(self, numbers: Iterable[int]) -> None:
        """Cancel jobs and wait until they have ended. A job that finishes meanwhile still has an outcome."""
        self.run(self._drop(set(numbers)))

    def close(self, *, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        if not self._thread.is_alive():  # closed, or a forked copy, which has no such thread
            return
        self.run(self._drop(None))
        if last is not None:
            self.run(last())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _queue(self, jobs: list[tuple[int, Job]]) -> None:
        self._waiting.extend(jobs)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._limit:
            key, job = self._waiting.popleft()
            task = self._running[key] = self._loop.create_task(job())
            task.add_done_callback(partial(self._on_done, key))

    def _on_done(self, key: Key, task: asyncio.Task[Any]) -> None:
        del self._running[key]
        if isinstance(key, asyncio.Future):
            if not key.done():
                key.set_result(task)
        elif not task.cancelled():
            error = task.exception()
            self._outcomes.put((key, None if error else task.result(), error))
        self._fill()

    async def _drop(self, keys: set[Key] | None) -> None:
        """Cancel jobs, or all work in the loop."""
        begun = asyncio.all_tasks() - {asyncio.current_task()}
        if keys is not None:
            begun = {task for key, task in self._running.items() if key in keys}
        self._waiting = deque(item for item in self._waiting if keys is not None and item[0] not in keys)
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


class StatusError(ServerError):
    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


async def presentably(work: Awaitable[T], *, key: str | None) -> T:
    """Return the result of ``work``, whose errors may quote the server and are raised without the key."""
    try:
        return await work
    except (ServerError, ValueError) as error:
        kind = ServerError if isinstance(error, ServerError) else ValueError
        raise kind(presentable(str(error), key=key)) from None


@dataclass(eq=False, repr=False)
class Transport:
    """Sends requests from within one event loop."""

    base_url: str
    key: str | None
    max_connections: int
    max_retries: int
    first_wait: float
    longest_wait: float

    def __post_init__(self) -> None:
        self._http = require("aiohttp", extra="openai")
        self._session: ClientSession | None = None
        self._retries = 0

    async def ask(self, path: str, body: dict[str, Any] | None = None, *, deadline: float) -> Any:
        """Return the answer to a POST of ``body``, or to a GET."""

        async def attempt() -> Any:
            async with self._answer(path, body) as answer:
                return await self._whole(answer)

        return await self._with_retries(attempt, deadline)

    async def stream(
        self, path: str, body: dict[str, Any], *, deadline: float, begin: Callable[[], SampleReader]
    ) -> SampleReader:
        """Feed the events of a stream to a reader, which ``begin`` makes for every attempt, and return it."""

        async def attempt() -> SampleReader:
            reader = begin()
            async with self._answer(path, body) as answer:
                async for event in self._events(answer):
                    reader.take(event)
            if reader.reason is None:
                raise TransientError("the stream ended before the response did")
            return reader

        return await self._with_retries(attempt, deadline)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_retries(self, attempt: Callable[[], Awaitable[T]], deadline: float) -> T:
        clock, trouble, number = asyncio.get_running_loop().time, "the answer was not complete", 0
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    number += 1
                    try:
                        return await attempt()
                    except (self._http.ClientSSLError, self._http.ClientResponseError) as error:
                        raise self._failure(self._named(error)) from None  # no further attempt mends these
                    except TransientError as error:
                        trouble, wait = str(error), self._wait(number, error.retry_after)
                    except (self._http.ClientError, ConnectionError) as error:
                        trouble, wait = self._named(error), self._wait(number)
                    if number > self.max_retries:
                        raise self._failure(f"{trouble} ({number} attempts)")
                    if clock() + wait >= deadline:
                        raise self._failure(f"{trouble} (attempt {number}; no time left to wait {wait:.3g} s more)")
                    self._retries += 1
                    # Of the 1st, 10th, 100th ...: a busy server has thousands.
                    level = logging.WARNING if str(self._retries).rstrip("0") == "1" else logging.DEBUG
                    told = self.base_url, trouble, self._retries, wait
                    _logger.log(level, "The server at %s: %s; repetition %d in %.3g s.", *told)
                    await asyncio.sleep(wait)
        except TimeoutError:
            reason = f"the time was up in attempt {number}: {trouble}. Raise `deadline` in `engine_args`"
            raise self._failure(reason) from None

    def _wait(self, number: int, retry_after: float | None = None) -> float:
        chance = random.random()
        if retry_after is not None:  # a little more, so that clients that were told the same do not come together
            return retry_after + chance * self.first_wait
        return backoff_seconds(number - 1, first=self.first_wait, longest=self.longest_wait, chance=chance)

    def _failure(self, reason: str) -> ServerError:
        return ServerError(f"The server at {self.base_url} failed: {reason}")

    def _named(self, error: Exception) -> str:
        """Name an error of aiohttp, which may hold headers and so is not chained."""
        return presentable(f"{type(error).__name__}: {error}", key=self.key)

    @asynccontextmanager
    async def _answer(self, path: str, body: dict[str, Any] | None) -> AsyncIterator[ClientResponse]:
        if self._session is None:
            self._session = self._http.ClientSession(
                connector=self._http.TCPConnector(limit=self.max_connections),
                timeout=self._http.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                cookie_jar=self._http.DummyCookieJar(),
                headers={} if self.key is None else {"Authorization": f"Bearer {self.key}"},
            )
        url = path if "://" in path else f"{self.base_url}/{path}"
        method = "GET" if body is None else "POST"
        async with self._session.request(method, url, json=body, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                text = (await answer.content.read(_LONGEST_REFUSAL)).decode(errors="replace")
                self._refuse(answer.status, text, answer.headers.get("Retry-After"))
            yield answer

    async def _events(self, answer: ClientResponse) -> AsyncIterator[Any]:
        """Yield the events of a stream; an answer that is not streamed counts as one event."""
        if answer.content_type != "text/event-stream":
            yield await self._whole(answer)
            return
        rest = b""
        async for piece in _pieces(answer):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != _END_OF_STREAM:
                    yield self._parsed(data)

    async def _whole(self, answer: ClientResponse) -> Any:
        return self._parsed(b"".join([piece async for piece in _pieces(answer)]))

    def _parsed(self, text: bytes) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            shown = presentable(text.decode(errors="replace"), key=self.key)
            raise ServerError(f"Expected the server to answer in JSON, but got {shown!r}.") from None
        error = value.get("error") if isinstance(value, dict) else None
        if error is not None:  # in a stream the status was sent before the fault was known
            code = error.get("code") if isinstance(error, dict) else None
            if type(code) is not int:  # without a status it says nothing about this request
                shown = presentable(_message(text.decode(errors="replace")), key=self.key)
                raise ServerError(f"The server at {self.base_url} failed in the middle of an answer: {shown}")
            self._refuse(code, text.decode(errors="replace"), None)
        return value

    def _refuse(self, status: int, text: str, retry_after: str | None) -> NoReturn:
        message = f"HTTP {status}: {presentable(_message(text), key=self.key)}"
        if status == HTTPStatus.TOO_MANY_REQUESTS or (500 <= status <= 599 and status != HTTPStatus.NOT_IMPLEMENTED):
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
    try:
        found = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return text
    return found if isinstance(found, str) else text
