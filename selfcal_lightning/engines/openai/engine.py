"""The engine over an OpenAI-compatible server that speaks token ids: vLLM's own, on this machine or another."""

import asyncio
import itertools
import math
import queue
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.engines import base
from selfcal_lightning.engines.activated_probe import ProbeGroups, Table, query_settings, try_adapter
from selfcal_lightning.engines.openai import transport, wire
from selfcal_lightning.models.chat_format import ChatFormat, generation_end_ids, load_tokenizer, vocabulary_size
from selfcal_lightning.models.folders import adapter_identity, read_invocation_ids, resolve_model, weights_sha256
from selfcal_lightning.records import Request, Response

_DEFAULT_BATCH = 64
_TRIES, _WAIT_SECONDS, _CONNECT_SECONDS = 3, 1.0, 5.0
_PORTS = {"http": 80, "https": 443}
_PROBE_TEXT = "Is 17 + 25 = 42?\nYes: a na\u00efve sum. No?"
_KEY_IS_WRONG = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}
_WAY_OUT = (
    f"Start vLLM's server with the environment variable {base.ADAPTER_VARIABLE} naming the adapter's folder, "
    "`--enable-lora --max-loras 2 --lora-modules NAME=FOLDER`, and on a CPU `--enforce-eager`, where this project is "
    "installed too."
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    served_model: str
    max_context: int
    version: str | None
    adapter: str | None


class OpenAIEngine:
    """Samples from a server, many requests at a time, on token ids throughout.

    Prompts and the P(True) query are rendered here and sent as ids to ``/completions``; tokens come back as ids with
    their log-probabilities, and texts are decoded here. That needs what vLLM's server offers beyond OpenAI's
    (``return_tokens_as_token_ids``, ``logprob_token_ids``); another server is refused with what is missing. The server
    must keep vLLM's default ``--logprobs-mode``.

    Responses are streamed, so that the tokens drawn for a cancelled request are known but for those on their way, and
    cancelling frees the server. When a request fails for good (refused, out of retries or time, garbage), ``poll``
    raises a ``RequestsFailedError`` that names it.

    Args:
        model: Folder or hub name of the model that the server runs, or "bundled".
        base_url: Address of the API. Plain http is for this machine only, unless ``allow_http``.
        served_model: The server's name for the model, or for an adapter; None takes ``model`` where the server has it,
            else the only one that it has.
        tokenizer: Folder or hub name of the tokenizer; None is the model's.
        revision: Revision of the model on the hub.
        weights: Folder or hub name of the server's weights on this machine, hashed by ``describe``. None leaves them
            unknown: a server does not tell.
        adapter: Folder of the LoRA adapter that ``served_model`` names; it is only hashed. With an activated one, which
            needs our plugin in the server, the model below it samples and the adapter reads the query. A self-test at
            the start checks both, and compares confidences with those of transformers where ``weights`` are given and
            ``dtype`` is float32.
        dtype: Data type that the server runs in, for ``describe`` only; None or "auto" is unknown.
        max_context: Longest prompt + response + query in tokens; None takes one less than the server's limit, which
            counts one token more.
        chat: The chat format; None reads it from the tokenizer.
        stop_token_ids: Ids that end a response; None takes those of the chat format and the generation settings.
        server_edt: Whether the server was started with ``--logits-processors`` and our class for entropy-based dynamic
            temperature, which is checked at the start. Without it, EDT is refused.
        allow_http: Whether prompts and key may go to another machine unencrypted.
        api_key_env: Environment variable with the key, where the server wants one. It is read at the start and appears
            in no message.
        max_batch: Most requests that the server works on for this engine; None is 64.
        max_retries: Most further attempts at one request, after HTTP 429, 5xx and broken connections only.
        deadline: Longest time for one request in seconds, with its retries and its P(True) query.
        first_wait: Longest wait after the first failed attempt, in seconds; it doubles from one to the next.
        longest_wait: Longest such wait. A Retry-After of the server is waited for, up to the deadline.
        stream_interval: Tokens in a piece of a stream. With more, both sides have less work (the server spends about
            0.1 ms on a piece), and less is known of what cancelled requests cost.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = "http://127.0.0.1:8000/v1",
        served_model: str | None = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        weights: str | None = None,
        adapter: str | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        chat: ChatFormat | None = None,
        stop_token_ids: Sequence[int] | None = None,
        server_edt: bool = False,
        allow_http: bool = False,
        api_key_env: str = "OPENAI_API_KEY",
        max_batch: int | None = None,
        max_retries: int = 8,
        deadline: float = 600.0,
        first_wait: float = 0.5,
        longest_wait: float = 30.0,
        stream_interval: int = 1,
    ) -> None:
        check_installed("aiohttp", extra="openai")
        check_at_least(1, max_batch=max_batch, stream_interval=stream_interval)
        check_at_least(0, max_retries=max_retries)
        check_at_least(0.0, first_wait=first_wait, longest_wait=longest_wait)
        if adapter is not None and served_model is None:
            raise InputError(f"Expected `served_model` to be the server's name for `adapter` {adapter!r}, got None.")
        if not deadline > 0.0:
            raise InputError(f"Expected `deadline` to be above 0 seconds, but got {deadline}.")
        self.model, self.base_url = resolve_model(model), transport.check_base_url(base_url, allow_http=allow_http)
        self._served_model, self._tokenizer = served_model, tokenizer or self.model
        self._identity = {"revision": revision, "weights": weights, "adapter": adapter, "dtype": dtype}
        self._query_ids = None if adapter is None else read_invocation_ids(adapter)
        self._max_context, self._chat = max_context, chat
        self._stop_token_ids = None if stop_token_ids is None else sorted(stop_token_ids)
        self._vocabulary = 0
        self._server_edt, self._api_key_env = server_edt, api_key_env
        self.batch_size = _DEFAULT_BATCH if max_batch is None else max_batch
        self._deadline, self._interval = deadline, stream_interval
        self._retrying = max_retries, first_wait, longest_wait
        self._key: str | None = None
        self._jobs: transport.BackgroundJobs | None = None
        self._client: transport.Transport | None = None
        self._facts: ServerFacts | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._flights: dict[int, wire.Flight] = {}
        self._in_flight = base.InFlight()

    @property
    def max_context(self) -> int:
        self._ensure_started()
        return self._facts.max_context

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self._ensure_started()
        self._in_flight.check_new(requests)
        for request in requests:
            wire.check_sampling(request.sampling, server_edt=self._server_edt)
            base.check_request(
                request, max_context=self.max_context, end_ids=self._stop_token_ids, query_ids=self._query_ids
            )
        flights = {next(self._numbers): wire.Flight(request) for request in requests}
        self._flights |= flights
        self._in_flight.begin({flight.request.id: number for number, flight in flights.items()})
        self._jobs.add([(number, partial(self._answer, flight)) for number, flight in flights.items()])
        return [request.id for request in requests]

    def drawn_so_far(self, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        wanted = set(ids)
        flights = [flight for flight in self._flights.values() if flight.request.id in wanted and flight.reader]
        return {f.request.id: tuple(f.reader.token_ids[: f.reader.num_tokens]) for f in flights}

    def poll(self, patience: float | None = None) -> list[Response]:
        self._ensure_open()
        until = math.inf if patience is None else time.monotonic() + patience
        while self._flights and not self._in_flight.news and (left := until - time.monotonic()) > 0.0:
            with suppress(queue.Empty):
                self._take_in(*self._jobs.take(None if patience is None else left))
        self._work_off()
        return self._in_flight.deliver()

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """See ``Engine``; the counts lack tokens that were still on their way."""
        self._work_off()
        thrown_away, names = self._in_flight.drop(ids)
        flights = {number: self._flights.pop(number) for number in names}
        if flights:
            self._jobs.drop(flights)
        return thrown_away | {f.request.id: f.reader.num_tokens for f in flights.values() if f.reader is not None}

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        future = self.begin_probabilities(prompts, token_ids, with_adapter=with_adapter)
        try:
            return future.result()
        finally:
            future.cancel()  # where the wait was interrupted

    def begin_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> Future[list[list[float] | None]]:
        """Ask for ``next_token_probabilities`` without waiting; cancelling the result frees the server."""
        self._ensure_started()
        if not with_adapter and self._identity["adapter"] is not None and self._query_ids is None:
            raise InputError("Expected `with_adapter`, since the server has no name for the model without its adapter.")
        base.check_prompts(prompts, self.max_context)
        jobs, wanted = self._jobs, tuple(token_ids)

        async def score_one(prompt: tuple[int, ...]) -> list[float] | base.Failure:
            try:
                return await self._probabilities(prompt, wanted, self._time_limit(), with_adapter=with_adapter)
            except wire.ServerError as error:
                return self._failure(error)

        async def score_all() -> list[list[float] | None]:
            answers = await jobs.run_first([partial(score_one, tuple(prompt)) for prompt in prompts])
            return base.read_scores([[answer] for answer in answers])

        return jobs.start(score_all())

    def describe(self) -> dict[str, Any]:
        self._ensure_started()
        known = self._identity
        weights, adapter, dtype = known["weights"], known["adapter"], known["dtype"]
        return {
            "engine": "openai",
            "engine_version": self._facts.version,
            "server": self.base_url,
            "served_model": self._facts.served_model,
            "dtype": None if dtype == "auto" else dtype,
            "model": self.model,
            "revision": known["revision"],
            "weights_sha256": None if weights is None else weights_sha256(weights, revision=known["revision"]),
            **adapter_identity(adapter),
        }

    def close(self) -> None:
        self._closed = True
        self._flights, self._in_flight = {}, base.InFlight()
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            jobs.close(last=self._client.close)

    def _ensure_open(self) -> None:
        if self._closed:
            raise RunError("Expected the engine to be open, but it was closed.")

    def _ensure_started(self) -> None:
        """Start the thread and ask the server what it has; after a failure the next call tries again."""
        self._ensure_open()
        if self._jobs is not None:
            return
        revision = self._identity["revision"] if self._tokenizer == self.model else None
        self._chat = self._chat or ChatFormat(load_tokenizer(self._tokenizer, revision=revision))
        if self._stop_token_ids is None:
            ends = self._chat.end_of_turn_ids | generation_end_ids(self._tokenizer, revision=revision)
            self._stop_token_ids = sorted(ends)
        self._vocabulary = max(len(self._chat.tokenizer), vocabulary_size(self._tokenizer, revision=revision))
        self._key = transport.read_key(self._api_key_env)
        client = transport.Transport(self.base_url, self._key, self.batch_size + 1, *self._retrying)
        jobs = transport.BackgroundJobs(limit=self.batch_size)
        try:
            self._facts = jobs.run(transport.presentably(self._inspect(client), key=self._key))
            if self._query_ids is not None:
                self._try_adapter(jobs, client)
        except BaseException:
            jobs.close(last=client.close)
            raise
        self._jobs, self._client = jobs, client

    async def _inspect(self, client: transport.Transport) -> ServerFacts:
        deadline = self._time_limit()
        try:
            answer = await client.ask("models", deadline=deadline)
        except transport.StatusError as error:
            wanted = "Expected `base_url` to be the address before `/models`, such as .../v1."
            if error.status in _KEY_IS_WRONG:
                wanted = f"Expected the key in the environment variable {self._api_key_env}."
            raise wire.ServerError(f"{error} {wanted}") from None
        adapter = None if self._query_ids is None else self._served_model
        wanted = self._served_model if adapter is None else base_of(answer, adapter)
        name, limit = wire.choose_model(answer, wanted=wanted, default=self.model)
        root = client.base_url.removesuffix("/v1")
        version = (await _offered(client, f"{root}/version", None, deadline)).get("version")
        await _check_tokenizer(client, f"{root}/tokenize", name, self._chat, deadline)
        if self._server_edt:
            await _check_edt(client, name, self._chat, deadline)
        if self._max_context is None and limit is None:
            raise InputError("Expected `max_context` to be given, since the server does not tell its limit.")
        most = self._max_context if limit is None else limit - 1  # vLLM's also counts the token that answers the query
        if self._max_context is not None and self._max_context > most:
            wanted = f"`max_context` to be at most {most} for this server"
            raise InputError(f"Expected {wanted}, but got {self._max_context}.")
        return ServerFacts(name, self._max_context or most, version if isinstance(version, str) else None, adapter)

    def _try_adapter(self, jobs: transport.BackgroundJobs, client: transport.Transport) -> None:
        settings = query_settings(self._chat.query, self._query_ids)
        sizes = {"vocabulary": self._vocabulary, "longest": self._facts.max_context}
        exact, weights = self._identity["dtype"] == "float32", self._identity["weights"]

        async def ask_all(groups: ProbeGroups) -> list[Table]:
            deadline = self._time_limit()
            names = {True: self._facts.adapter, False: self._facts.served_model}
            tables = (
                asyncio.gather(*(score(client, names[awake], ids, settings["token_ids"], deadline) for ids in prompts))
                for prompts, awake in groups
            )
            return await asyncio.gather(*tables)

        def ask(groups: ProbeGroups) -> list[Table]:
            return jobs.run(transport.presentably(ask_all(groups), key=self._key))

        try:
            contexts, awake = try_adapter(ask, settings["query"], **sizes, exact=exact, engine="the server")
        except InputError as error:
            raise InputError(f"{error} {_WAY_OUT}") from None
        if exact and weights is not None:
            from selfcal_lightning.engines.transformers.slots import hold_against_module

            origin = {"model": weights, "revision": self._identity["revision"], "adapter": self._identity["adapter"]}
            hold_against_module(awake, contexts, settings, engine="the server", **origin)

    def _time_limit(self) -> float:
        return asyncio.get_running_loop().time() + self._deadline

    async def _answer(self, flight: wire.Flight) -> Response:
        request, deadline = flight.request, self._time_limit()
        stops, room = self._stop_token_ids, base.response_room(request, self._facts.max_context)
        body = wire.sample_body(request, max_tokens=room, stop_token_ids=stops, interval=self._interval)

        def begin() -> wire.SampleReader:
            sizes = {"max_tokens": room, "vocabulary": self._vocabulary}
            flight.reader = wire.SampleReader(stops, step_ids=request.step_ids, **sizes)
            return flight.reader

        asked = {"model": self._facts.served_model, **body}
        reader = await self._client.stream("completions", asked, deadline=deadline, begin=begin)
        response = reader.response(request.id, self._chat)
        if (query := request.query) is None:
            return response
        ids = (*request.context_ids, *response.token_ids, *query.suffix_ids)
        masses = await self._probabilities(ids, (*query.yes_ids, *query.no_ids), deadline)
        yes, no = masses[: len(query.yes_ids)], masses[len(query.yes_ids) :]
        return replace(response, yes_mass=base.mass_of(yes), no_mass=base.mass_of(no))

    async def _probabilities(
        self, prompt: Sequence[int], token_ids: Sequence[int], deadline: float, *, with_adapter: bool = True
    ) -> list[float]:
        awake = with_adapter and base.ends_with_query(prompt, self._query_ids)
        name = self._facts.adapter if awake else self._facts.served_model
        return await score(self._client, name, prompt, token_ids, deadline)

    def _work_off(self) -> None:
        for outcome in self._jobs.take_ready() if self._jobs is not None else ():
            self._take_in(*outcome)

    def _take_in(self, number: int, result: Any, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, wire.ServerError):
            raise error
        if (flight := self._flights.pop(number, None)) is None:
            return  # it finished while it was being dropped
        if error is None:
            self._in_flight.answer(result)
        else:
            self._in_flight.fail(flight.request.id, self._failure(error))

    def _failure(self, error: wire.ServerError) -> base.Failure:
        reason = transport.presentable(str(error), key=self._key)
        is_own = isinstance(error, transport.StatusError) and error.status in transport.OWN_FAULTS
        return base.Failure(reason, is_refusal=is_own)


def check_reachable(base_url: str) -> None:
    """Raise RunError where no connection to the server can be made, in three attempts a second apart."""
    address = urlsplit(base_url)
    place = (address.hostname or "", address.port or _PORTS.get(address.scheme, 80))
    problem = OSError()
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_WAIT_SECONDS)
        try:
            with socket.create_connection(place, timeout=_CONNECT_SECONDS):
                return
        except OSError as error:
            problem = error
    raise RunError(
        f"Expected a server at {base_url}, but got no connection: {problem.strerror or problem}. Start it (`vllm serve "
        "MODEL`) and wait until it listens, or give its address by `base_url`."
    ) from problem


def base_of(answer: Any, adapter: str) -> str:
    """Return a server's name for the model that an adapter is on."""
    models = wire.list_models(answer)
    parent = models[adapter].get("parent") if adapter in models else None
    if not isinstance(parent, str) or parent not in models:
        raise InputError(
            f"Expected `served_model` to be a server's name for an adapter on one of its models, but got {adapter!r}. "
            f"It has: {', '.join(models)}. {_WAY_OUT}"
        )
    return parent


async def _offered(
    client: transport.Transport, url: str, body: dict[str, Any] | None, deadline: float
) -> dict[str, Any]:
    """Return the answer of a place that not every server has; nothing where it has no such place."""
    try:
        answer = await client.ask(url, body, deadline=deadline)
    except wire.ServerError:  # it may be a page in HTML; a server that is out of order shows it at the first request
        return {}
    return answer if isinstance(answer, dict) else {}


async def _check_tokenizer(client: transport.Transport, url: str, name: str, chat: ChatFormat, deadline: float) -> None:
    """Raise InputError where the server cuts a text into other tokens: our prompts would be nonsense to it."""
    body = {"model": name, "prompt": _PROBE_TEXT, "add_special_tokens": False}
    answer = await _offered(client, url, body, deadline)
    ours = chat.tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    if answer.get("tokens", ours) != ours:
        raise InputError(
            f"Expected `tokenizer` to cut {_PROBE_TEXT!r} as the server's does, but {chat.tokenizer.name_or_path!r} "
            f"gives {ours} and the server's {answer['tokens']}. Name the tokenizer of the model {name!r}."
        )


async def _check_edt(client: transport.Transport, name: str, chat: ChatFormat, deadline: float) -> None:
    """Refuse a server that ignores EDT and would draw at temperature 1; our logits processor refuses this body."""
    try:
        body = {"model": name, "prompt": [chat.pad_id], "max_tokens": 1, "temperature": 0.5}
        await client.ask("completions", {**body, "vllm_xargs": {wire.EDT_ARG: [0.8, 0.8, 1.0]}}, deadline=deadline)
    except transport.StatusError as error:
        if error.status == HTTPStatus.BAD_REQUEST and wire.EDT_ARG in str(error):
            return
        raise
    raise InputError(
        "Expected the server to know entropy-based dynamic temperature, as `server_edt` says, but it does not. "
        f"Start it with `--logits-processors {base.EDT_PROCESSOR}`, or set `server_edt` to false and `edt_scale` to "
        "null."
    )


async def score(
    client: transport.Transport, name: str, prompt: Sequence[int], token_ids: Sequence[int], deadline: float
) -> list[float]:
    """Return p(token | prompt) of each token, in as many parts as the server takes."""
    found: list[float] = []
    for start in range(0, len(token_ids), base.MAX_SCORED_IDS):
        chunk = token_ids[start : start + base.MAX_SCORED_IDS]
        body = {"model": name, **wire.score_body(prompt, chunk)}
        found += wire.read_probabilities(await client.ask("completions", body, deadline=deadline), chunk)
    return found
