"""A server in this process that speaks as vLLM's does, and can be told to fail. No more permissive than the real one.

What it knows of the protocol was read from vLLM 0.32's answers: streamed and whole completions, tokens as ids,
log-probabilities of given ids, our EDT argument, the list of models, the tokenizer, HTTP statuses and error bodies.
Unknown fields, which vLLM ignores, are refused.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from support.openai_models import CannedModel, RealModel
from support.processes import free_port, wait_until
from transformers import PreTrainedTokenizerBase

from selfcal_lightning.engines.base import EDT_PROCESSOR
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import ConfidenceQuery, Message, Request, SamplingSettings

_FIELDS = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos",
    "stream", "stream_interval", "logprobs", "logprob_token_ids", "return_tokens_as_token_ids", "vllm_xargs",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
}  # fmt: skip

Model = CannedModel | RealModel
ADAPTER = "confidence"  # the server's name for an adapter, which is asked and samples nothing


@dataclass
class Exchange:
    """One request that came in, and the answer to it."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    request: web.Request
    answer: web.StreamResponse = field(default_factory=web.StreamResponse)

    def whole(self, status: int, content: bytes, *, kind: str = "application/json", **headers: str) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answer = web.Response(status=status, body=content, content_type=kind, headers=named)

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.whole(status, json.dumps(value).encode(), **headers)

    def error(self, status: int, message: str, **headers: str) -> None:
        self.json({"error": {"message": message, "type": "Error", "param": None, "code": status}}, status, **headers)

    async def event(self, data: Any) -> None:
        """Write one event of a stream."""
        text = data if isinstance(data, str) else json.dumps(data)
        await self.chunk(f"data: {text}\n\n".encode())

    async def chunk(self, content: bytes) -> None:
        if not self.answer.prepared:
            self.answer.content_type = "text/event-stream"
            await self.answer.prepare(self.request)
        await self.answer.write(content)


Fault = Callable[[Exchange], Awaitable[None]]


class FakeServer:
    """Serves ``model`` on a free port of 127.0.0.1 until ``close``.

    Attributes:
        models: Names of the models that it says it has; it has the first, and the adapter where there is one.
        faults: What to do instead of answering, for the next requests to /v1/completions.
        exchanges: All requests that came in.
        abandoned: How many requests the client gave up while they were worked on.
        busiest: Most completions that were worked on at once.
        base_url: Its address.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_model_len: int | None = 512,
        key: str | None = None,
        knows_edt: bool = True,
        writes_ids: bool = True,
        adapter: Model | None = None,
    ) -> None:
        self._adapter = adapter
        self._model, self._tokenizer, self._max_model_len, self._key = model, tokenizer, max_model_len, key
        self._knows_edt, self._writes_ids = knows_edt, writes_ids
        self.models = ["tiny"] if adapter is None else ["tiny", ADAPTER]
        self.faults: deque[Fault] = deque()
        self.exchanges: list[Exchange] = []
        self.abandoned = self.busy = self.busiest = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._model.close()

    def completions(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.path == "/v1/completions"]

    async def _listen(self) -> web.AppRunner:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request.path, request.headers, json.loads(await request.read() or b"{}"), request)
        self.exchanges.append(exchange)
        try:
            await self._answer(exchange)
        except asyncio.CancelledError:  # the client has closed the connection
            self.abandoned += 1
            raise
        return exchange.answer

    async def _answer(self, exchange: Exchange) -> None:
        if self._key is not None and exchange.headers.get("authorization") != f"Bearer {self._key}":
            exchange.error(401, "Unauthorized")
        elif exchange.path == "/v1/models":
            limit = {} if self._max_model_len is None else {"max_model_len": self._max_model_len}
            cards = [{"id": name, "object": "model", "parent": None, **limit} for name in self.models]
            if self._adapter is not None:
                cards[-1] |= {"max_model_len": None, "parent": "tiny"}
            exchange.json({"object": "list", "data": cards})
        elif exchange.path == "/version":
            exchange.json({"version": "0.fake"})
        elif exchange.path == "/tokenize":
            exchange.json({"tokens": self._tokenizer.encode(exchange.body["prompt"], add_special_tokens=False)})
        elif exchange.path != "/v1/completions":
            exchange.error(404, "Not Found")
        elif self.faults:
            await self.faults.popleft()(exchange)
        elif (refusal := self._refusal(exchange.body)) is not None:
            exchange.error(*refusal)
        else:
            await self._complete(exchange)

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        """Return what vLLM says to a request that it does not take."""
        ids, scored, edt = body.get("prompt"), body.get("logprob_token_ids"), body.get("vllm_xargs", {}).get("edt")
        size, limit = len(self._tokenizer), self._max_model_len or 512
        if body.get("model") not in {self.models[0], ADAPTER if self._adapter is not None else None}:
            return 404, f"The model `{body.get('model')}` does not exist."
        wrong = {
            f"unknown fields {set(body) - _FIELDS}": bool(set(body) - _FIELDS),
            "the prompt must be token ids": not ids or not all(type(i) is int and i >= 0 for i in ids),
            "Token id is out of vocabulary": any(i >= size for i in (*(ids or ()), *(scored or ()))),
            f"maximum context length is {limit}": len(ids or ()) + body.get("max_tokens", 16) > limit,
            "max_tokens must be at least 1": body.get("max_tokens", 16) < 1,
            "temperature must be in [0, 2]": not 0.0 <= body.get("temperature", 1.0) <= 2.0,
            "seed must be an int64": not -(2**63) <= body.get("seed", 0) < 2**63,
            "`logprobs` must be set": scored is not None and body.get("logprobs") is None,
            "length of logprob_token_ids": len(scored or ()) > 128,
            "Expected `temperature` to be 1.0 beside `edt`": (
                self._knows_edt and edt is not None and body.get("temperature") != 1.0
            ),
        }
        return next(((400, message) for message, is_wrong in wrong.items() if is_wrong), None)

    async def _complete(self, exchange: Exchange) -> None:
        body = exchange.body
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        try:
            if "logprob_token_ids" in body:
                await self._complete_score(exchange)
            else:
                await self._complete_sample(exchange)
        finally:
            self.busy -= 1

    async def _complete_score(self, exchange: Exchange) -> None:
        ids = tuple(exchange.body["logprob_token_ids"])
        model = self._adapter if exchange.body["model"] == ADAPTER else self._model
        logprobs = await self._wait(model.score(tuple(exchange.body["prompt"]), ids))
        top = {self._write(token): logprob for token, logprob in zip(ids, logprobs, strict=True)}
        token, logprob = max(top.items(), key=lambda item: item[1])
        found = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [top]}
        exchange.json({"choices": [{"index": 0, "text": "", "logprobs": found, "finish_reason": "length"}]})

    async def _complete_sample(self, exchange: Exchange) -> None:
        body = exchange.body
        assert body["model"] == self.models[0], "nothing is sampled by the adapter's name"
        completion = await self._wait(self._model.sample(body))
        size = len(completion.token_ids) if not body.get("stream") else body.get("stream_interval", 1)
        for start in range(0, len(completion.token_ids), size):
            piece = slice(start, start + size)
            ids, last = completion.token_ids[piece], start + size >= len(completion.token_ids)
            found = None
            if body.get("logprobs") is not None:
                tokens = [self._write(i) for i in ids]
                found = {"tokens": tokens, "token_logprobs": list(completion.logprobs[piece])}
            choice = {"index": 0, "text": "", "logprobs": found, "stop_reason": None}
            choice["finish_reason"] = completion.finish_reason if last else None
            if last and completion.finish_reason == "stop" and completion.token_ids:
                choice["stop_reason"] = completion.token_ids[-1]
            if not body.get("stream"):
                exchange.json({"choices": [choice]})
                return
            await exchange.event({"choices": [choice]})
        await exchange.event("[DONE]")

    async def _wait(self, future: Future[Any]) -> Any:
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            self._model.cancel(future)
            raise

    def _write(self, token: int) -> str:
        return f"token_id:{token}" if self._writes_ids else self._tokenizer.decode([token])


def status(code: int, message: str = "no", **headers: str) -> Fault:
    """Answer with an HTTP status; ``Retry_After="1"`` becomes a header."""

    async def fault(exchange: Exchange) -> None:
        exchange.error(code, message, **headers)

    return fault


def says(content: bytes, *, kind: str = "application/json") -> Fault:
    """Answer with status 200 and this body."""

    async def fault(exchange: Exchange) -> None:
        exchange.whole(200, content, kind=kind)

    return fault


def is_silent(*, after: bytes = b"", hangs_up: bool = False) -> Fault:
    """Never finish the answer; or close the connection in the middle of it, or before it."""

    async def fault(exchange: Exchange) -> None:
        if after:
            await exchange.chunk(after)
        if hangs_up:
            exchange.request.transport.close()
        await asyncio.Event().wait()

    return fault


hangs_up = partial(is_silent, hangs_up=True)


KEY_NAME = "SELFCAL_TEST_KEY"
KEY = "sk-very-secret-0123456789"
PLAIN = SamplingSettings(temperature=0.7, edt_scale=None, max_new_tokens=64)
EVENT = b'data: {"choices":[{"logprobs":{"tokens":["token_id:5","token_id:6"],"token_logprobs":[-1,-2]},' + (
    b'"finish_reason":null}]}\n\n'
)
Connect = Callable[..., OpenAIEngine]


@contextmanager
def connecting(server: FakeServer, model: str, chat: ChatFormat) -> Iterator[Connect]:
    """Make engines over ``server``; they are closed at the end."""
    engines: list[OpenAIEngine] = []

    def make(**options: object) -> OpenAIEngine:
        settings = {
            "base_url": server.base_url, "chat": chat, "api_key_env": KEY_NAME, "first_wait": 0.002,
            "longest_wait": 0.01, "max_retries": 3, "deadline": 20.0,
        }  # fmt: skip
        engines.append(OpenAIEngine(model, **{**settings, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def over_server(base_url: str, model: str, **options: object) -> OpenAIEngine:
    """Return an engine over a server that runs the bundled model in float32."""
    settings = {
        "base_url": base_url, "weights": model, "dtype": "float32", "max_context": 256, "server_edt": True,
        "api_key_env": "SELFCAL_TEST_NO_KEY",
    }  # fmt: skip
    return OpenAIEngine(model, **{**settings, **options})


def canned(chat: ChatFormat) -> CannedModel:
    return CannedModel([*chat.response_ids("The answer is 8."), min(chat.end_of_turn_ids)])


def requests_of(chat: ChatFormat, count: int, query: ConfidenceQuery | None = None) -> list[Request]:
    prompt = chat.prompt_ids([Message("user", "What is 5 + 3?")])
    return [Request(str(j), prompt, PLAIN, seed=j, query=query) for j in range(count)]


CONTEXT = 256
START_SECONDS = 480.0


def small_vllm(model: str, **options: Any) -> VLLMEngine:
    settings = {"max_context": CONTEXT, "kv_cache_memory_bytes": 1 << 28, "max_batch": 128, "start_timeout": 300.0}
    return VLLMEngine(model, **{**settings, **options})


@contextmanager
def vllm_serving(model: str, folder: Path, environment: Mapping[str, str], *words: str) -> Iterator[str]:
    """Serve a model on CPU in float32, under the name "tiny", with our processor for EDT; give the base URL."""
    port, log = free_port(), folder / "log"
    options = {
        "model": model, "served-model-name": "tiny", "host": "127.0.0.1", "port": str(port), "dtype": "float32",
        "kv-cache-memory-bytes": str(1 << 28), "block-size": "32", "max-num-batched-tokens": "4096",
        "logits-processors": EDT_PROCESSOR,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--enforce-eager"]
    command += ["--no-enable-chunked-prefill"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *words], env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5.0):
            return True
        return False

    try:
        wait_until(is_ready, seconds=START_SECONDS)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=120.0)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
