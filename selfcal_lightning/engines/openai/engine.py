"""The engine over an OpenAI-compatible server that speaks token ids: vLLM's own, on this machine or another."""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.engines import base
from selfcal_lightning.engines.activated_probe import ProbeGroups, Table, make_probe, query_settings, try_adapter
from selfcal_lightning.engines.openai.server import (
    WAY_OUT,
    ServerFacts,
    ask_models,
    base_of,
    check_features,
    context_of,
    score,
)
from selfcal_lightning.engines.openai.transport import (
    BackgroundJobs,
    Transport,
    check_base_url,
    is_refusal,
    presentable,
    presentably,
    read_key,
)
from selfcal_lightning.engines.openai.wire import Flight, ServerError, check_sampling, choose_model, sample_body
from selfcal_lightning.models.chat_format import ChatFormat, generation_end_ids, load_tokenizer, vocabulary_size
from selfcal_lightning.models.folders import adapter_identity, read_invocation_ids, resolve_model, weights_sha256
from selfcal_lightning.records import Request, Response

_DEFAULT_BATCH = 64


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
        max_batch = _DEFAULT_BATCH if max_batch is None else max_batch
        check_at_least(1, max_batch=max_batch, stream_interval=stream_interval)
        check_at_least(0, max_retries=max_retries)
        check_at_least(0.0, first_wait=first_wait, longest_wait=longest_wait)
        if adapter is not None and served_model is None:
            raise InputError(f"Expected `served_model` to be the server's name for `adapter` {adapter!r}, got None.")
        if not deadline > 0.0:
            raise InputError(f"Expected `deadline` to be above 0 seconds, but got {deadline}.")
        self.model, self.base_url = resolve_model(model), check_base_url(base_url, allow_http=allow_http)
        self._served_model, self._tokenizer = served_model, tokenizer or self.model
        self._identity = {"revision": revision, "weights": weights, "adapter": adapter, "dtype": dtype}
        self._query_ids = None if adapter is None else read_invocation_ids(adapter)
        self._max_context, self._chat = max_context, chat
        self._stop_token_ids = None if stop_token_ids is None else sorted(stop_token_ids)
        self._vocabulary = 0
        self._server_edt, self._api_key_env = server_edt, api_key_env
        self._max_batch, self._deadline, self._interval = max_batch, deadline, stream_interval
        self._retrying = max_retries, first_wait, longest_wait
        self._key: str | None = None
        self._jobs: BackgroundJobs | None = None
        self._transport: Transport | None = None
        self._facts: ServerFacts | None = None
        self._closed = False
        self._numbers = itertools.count()
        self._flights: dict[int, Flight] = {}
        self._in_flight = base.InFlight()

    @property
    def max_context(self) -> int:
        self._ensure_started()
        return self._facts.max_context

    @property
    def batch_size(self) -> int:
        return self._max_batch

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self._ensure_started()
        self._in_flight.check_new(requests)
        for request in requests:
            check_sampling(request.sampling, server_edt=self._server_edt)
            base.check_request(
                request, max_context=self.max_context, end_ids=self._stop_token_ids, query_ids=self._query_ids
            )
        flights = {next(self._numbers): Flight(request) for request in requests}
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
        while self._flights and not self._in_flight.has_news and (left := until - time.monotonic()) > 0.0:
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
        begun = (flight for flight in flights.values() if flight.reader is not None)
        thrown_away |= {flight.request.id: flight.num_tokens for flight in begun}
        return thrown_away

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
        jobs = self._jobs

        async def score_one(prompt: tuple[int, ...]) -> list[float] | base.Failure:
            try:
                return await self._probabilities(prompt, tuple(token_ids), with_adapter=with_adapter)
            except ServerError as error:
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
            jobs.close(last=self._transport.close)

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
        self._key = read_key(self._api_key_env)
        transport = Transport(self.base_url, self._key, self._max_batch + 1, *self._retrying)
        jobs = BackgroundJobs(limit=self._max_batch)
        try:
            self._facts = jobs.run(presentably(self._inspect(transport), key=self._key))
            if self._query_ids is not None:
                self._try_adapter(jobs, transport)
        except BaseException:
            jobs.close(last=transport.close)
            raise
        self._jobs, self._transport = jobs, transport

    async def _inspect(self, transport: Transport) -> ServerFacts:
        deadline = self._time_limit()
        answer = await ask_models(transport, key_name=self._api_key_env, deadline=deadline)
        adapter = None if self._query_ids is None else self._served_model
        wanted = self._served_model if adapter is None else base_of(answer, adapter)
        name, limit = choose_model(answer, wanted=wanted, default=self.model)
        version = await check_features(transport, name, self._chat, server_edt=self._server_edt, deadline=deadline)
        return ServerFacts(name, context_of(self._max_context, limit), version, adapter)

    def _try_adapter(self, jobs: BackgroundJobs, transport: Transport) -> None:
        settings = query_settings(self._chat.query, self._query_ids)
        sizes = {"vocabulary": self._vocabulary, "longest": self._facts.max_context}
        probe = make_probe(settings["query"], settings["token_ids"], **sizes)
        exact, weights = self._identity["dtype"] == "float32", self._identity["weights"]

        async def ask_all(groups: ProbeGroups) -> list[Table]:
            deadline = self._time_limit()
            names = {True: self._facts.adapter, False: self._facts.served_model}
            tables = (
                asyncio.gather(*(score(transport, names[awake], ids, probe.token_ids, deadline) for ids in prompts))
                for prompts, awake in groups
            )
            return await asyncio.gather(*tables)

        def ask(groups: ProbeGroups) -> list[Table]:
            return jobs.run(presentably(ask_all(groups), key=self._key))

        try:
            awake = try_adapter(ask, probe, exact=exact, engine="the server")
        except InputError as error:
            raise InputError(f"{error} {WAY_OUT}") from None
        if exact and weights is not None:
            from selfcal_lightning.engines.transformers.contexts import hold_against_module

            origin = {"model": weights, "revision": self._identity["revision"], "adapter": self._identity["adapter"]}
            hold_against_module(awake, probe.contexts, settings, engine="the server", **origin)

    def _time_limit(self) -> float:
        return asyncio.get_running_loop().time() + self._deadline

    async def _answer(self, flight: Flight) -> Response:
        request, deadline = flight.request, self._time_limit()
        stops, room = self._stop_token_ids, base.response_room(request, self._facts.max_context)
        body = sample_body(request, max_tokens=room, stop_token_ids=stops, interval=self._interval)
        begin = partial(flight.begin, stops, max_tokens=room, vocabulary=self._vocabulary)
        asked = {"model": self._facts.served_model, **body}
        reader = await self._transport.stream("completions", asked, deadline=deadline, begin=begin)
        response = reader.response(request.id, self._chat)
        if (query := request.query) is None:
            return response
        ids = (*request.context_ids, *response.token_ids, *query.suffix_ids)
        masses = await self._probabilities(ids, (*query.yes_ids, *query.no_ids), deadline=deadline)
        yes, no = masses[: len(query.yes_ids)], masses[len(query.yes_ids) :]
        return replace(response, yes_mass=base.mass_of(yes), no_mass=base.mass_of(no))

    async def _probabilities(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        *,
        deadline: float | None = None,
        with_adapter: bool = True,
    ) -> list[float]:
        awake = with_adapter and base.ends_with_query(prompt, self._query_ids)
        name = self._facts.adapter if awake else self._facts.served_model
        return await score(self._transport, name, prompt, token_ids, deadline or self._time_limit())

    def _work_off(self) -> None:
        for outcome in self._jobs.take_ready() if self._jobs is not None else ():
            self._take_in(*outcome)

    def _take_in(self, number: int, result: Any, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, ServerError):
            raise error
        if (flight := self._flights.pop(number, None)) is None:
            return  # it finished while it was being dropped
        if error is None:
            self._in_flight.answer(result)
        else:
            self._in_flight.fail(flight.request.id, self._failure(error))

    def _failure(self, error: ServerError) -> base.Failure:
        return base.Failure(presentable(str(error), key=self._key), is_refusal=is_refusal(error))
