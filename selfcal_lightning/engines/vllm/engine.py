"""The vLLM engine: a child process of our own that runs vLLM, spoken to on token ids. Imports no vLLM itself."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from selfcal_lightning.core.errors import RunError, check_at_least
from selfcal_lightning.core.imports import is_installed, require
from selfcal_lightning.engines.activated_probe import query_settings
from selfcal_lightning.engines.base import Failure, check_prefix, check_query
from selfcal_lightning.engines.in_flight import InFlight, read_scores, response_room
from selfcal_lightning.engines.vllm.flights import (
    CrashesInARow,
    Flight,
    FlightBook,
    check_ids,
    check_scored,
    score_flights,
)
from selfcal_lightning.engines.vllm.process import StartRefusedError, WorkerProcess, make_order, way_out
from selfcal_lightning.engines.vllm.records import (
    EngineCrashedError,
    Tally,
    VLLMStatistics,
    read_response,
    wire_messages,
)
from selfcal_lightning.models.chat_format import ChatFormat, generation_end_ids, load_tokenizer
from selfcal_lightning.models.folders import (
    adapter_identity,
    check_model_folder,
    read_invocation_ids,
    resolve_model,
    weights_sha256,
)
from selfcal_lightning.records import Request, Response

_logger = logging.getLogger(__name__)


class VLLMEngine:
    """Samples with vLLM in a child process: fast, and its crashes, memory and side effects stay out of the caller's.

    N samples of a prompt and their P(True) queries share their prefix through the prefix cache, on token ids
    throughout. The process starts with the first request, after the files of a hub model were downloaded here; a first
    start that fails is tried once more, unless vLLM refuses the settings. When the process dies, or gives no sign of
    life while work is in flight, it is restarted and gets the unfinished requests again, whose seeds make the same
    texts. Requests that were in flight at a crash are then run in ever smaller groups until the one that kills the
    engine is alone; after ``max_attempts`` crashes it is quarantined: ``poll`` raises a ``RequestsFailedError`` that
    names it, and all others go on.

    Args:
        model: Folder or hub name of the model, or "bundled".
        revision: Its revision on the hub.
        adapter: Folder of a LoRA adapter to sample with. With an activated one the engine samples with the base model
            alone, and reads the confidence query with the adapter over the same cache; a self-test at the start holds
            both, and in float32 the confidences against those of transformers, for which the model is loaded once more.
        dtype: As in vLLM; None or "auto" is float32 on CPU and what vLLM takes for the model on GPU. In half precision
            the output layer computes in float32 all the same, for P(True).
        max_context: Longest prompt + response + query in tokens; None is the model's own limit, or, with a warning,
            the longest that the cache holds. vLLM counts one token more, so at the model's limit one is lost.
        chat: The model's chat format; None reads it from the model's tokenizer.
        stop_token_ids: Ids that end a response; None takes the chat format's and those of the generation settings.
        devices: GPUs for this engine, as the caller counts them; None leaves the choice to vLLM.
        tensor_parallel_size: GPUs that share one model.
        gpu_memory_utilization: Share of each GPU's memory for weights and cache; None is vLLM's default.
        kv_cache_memory_bytes: Size of the cache; None is 1 GiB on CPU, on GPU what ``gpu_memory_utilization`` leaves.
            It should hold prompt + response of ``max_batch`` samples, or the P(True) pass finds nothing in it.
        max_batch: Most sequences in one step; None is vLLM's default for the machine, 1,024 on GPUs of 70 GB and more.
        enforce_eager: Whether to run without CUDA graphs; None does on CPU.
        num_threads: OpenMP threads of the child; None is 1 on CPU.
        engine_args: Further arguments of vLLM's ``EngineArgs``, such as ``{"quantization": "fp8"}``. A model whose
            output layer is quantised needs ``{"hf_overrides": {"head_dtype": "model"}}``.
        max_restarts: Most crashes in a row, and most prompts quarantined in a row, without a finished request in
            between: an engine that crashes over whatever it is given is broken.
        max_attempts: Crashes after which a request that is alone in the engine is quarantined.
        start_timeout: Longest start in seconds, when the model's files are there; None is 15 minutes and a second for
            every 100 MB of its weights.
        stall_timeout: Longest silence in seconds, with work in flight, before the process is taken for dead.
        log_path: File for the child's output; None makes a temporary one, kept only after a crash.

    Raises:
        ImportError: When vLLM is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        adapter: str | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        chat: ChatFormat | None = None,
        stop_token_ids: Sequence[int] | None = None,
        devices: Sequence[int] | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_batch: int | None = None,
        enforce_eager: bool | None = None,
        num_threads: int | None = None,
        engine_args: Mapping[str, Any] | None = None,
        max_restarts: int = 5,
        max_attempts: int = 3,
        start_timeout: float | None = None,
        stall_timeout: float = 600.0,
        log_path: str | None = None,
    ) -> None:
        if not is_installed("vllm"):
            require("vllm", extra="vllm")
        check_at_least(1, max_batch=1 if max_batch is None else max_batch, max_attempts=max_attempts)
        check_at_least(0, max_restarts=max_restarts)
        model = resolve_model(model)
        self.model, self.revision, self.adapter = model, revision, adapter
        self._query_ids = None if adapter is None else read_invocation_ids(adapter)
        self._settings: dict[str, Any] = {
            "dtype": None if dtype == "auto" else dtype,
            "max_context": max_context,
            "stop_token_ids": None if stop_token_ids is None else sorted(stop_token_ids),
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "max_batch": max_batch,
            "enforce_eager": enforce_eager,
            "engine_args": dict(engine_args or {}),
        }
        self._devices, self._num_threads = devices, num_threads
        self._max_attempts = max_attempts
        self._start_timeout, self._stall_timeout = start_timeout, stall_timeout
        self._log_path = None if log_path is None else Path(log_path)
        self._chat = chat
        self._process: WorkerProcess | None = None
        self._silence = 0.0
        self._owner = 0
        self._closed = False
        self._limits: dict[str, Any] = {}
        self._cancel_calls = self._cancel_answers = 0
        self._drawn: dict[int, int] = {}
        self._book = FlightBook()
        self._in_flight = InFlight()
        self._crashes = CrashesInARow(most=max_restarts)
        self._tally = Tally()

    @property
    def max_context(self) -> int:
        """Longest prompt + response + query, in tokens."""
        self._ensure_started()
        return self._limits["max_context"]

    @property
    def batch_size(self) -> int:
        """Requests that it works on at a time: the sequences of one step."""
        self._ensure_started()
        return self._limits["max_batch"]

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Queue ``requests`` and return their ids.

        Raises:
            ValueError: When a prompt leaves no room for a response and the query, or an id is already in flight.
        """
        self._ensure_started()
        self._in_flight.check_new(requests)
        vocabulary = self._limits["vocabulary"]
        for request in requests:
            if self._query_ids is not None and request.query is not None:
                check_query(request.query.suffix_ids, self._query_ids)
            check_ids(f"the prompt of request {request.id!r}", request.context_ids, vocabulary=vocabulary)
            check_prefix(request, self._settings["stop_token_ids"])
            self._room(request)
        numbers = self._book.add(
            Flight(request.id, tuple(map(int, request.context_ids)), request) for request in requests
        )
        self._in_flight.begin(dict(zip((request.id for request in requests), numbers, strict=True)))
        self._feed()
        return [request.id for request in requests]

    def drawn_so_far(self, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return nothing: the child tells a response when it has finished."""
        return {}

    def poll(self, patience: float | None = None) -> list[Response]:
        """Wait for responses and return those that finished; empty when nothing is in flight or patience ends.

        Raises:
            RequestsFailedError: Requests were not answered; all others go on.
            EngineCrashedError: The process failed more than ``max_restarts`` times in a row.
        """
        until = math.inf if patience is None else time.monotonic() + patience
        while len(self._book) and not self._in_flight.has_news and (left := until - time.monotonic()) > 0.0:
            self._work(left)
        return self._in_flight.deliver()

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """Drop requests, queued or running, and return the tokens drawn for those that the child had begun, by id.

        Waits for the child's answer, one step at most; cancel many at once. What a child drew that is lost before it
        answers is unknown and left out.
        """
        thrown_away, names = self._in_flight.drop(ids)
        self._tally.add(cancelled=len(names))
        running = [number for number in names if self._book.drop(number)]
        drawn = self._drop_in_child(running) if running else {}
        self._feed()
        return thrown_away | {names[number]: count for number, count in drawn.items()}

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        """Return p(token | prompt) from the full softmax, [len(prompts)][len(token_ids)]; see ``Engine``.

        Samples in flight go on meanwhile; what finishes is kept for ``poll``. None stands for a prompt that crashes
        the engine, or that vLLM refuses. An activated adapter reads the query that a prompt ends with, and no other
        token.

        Raises:
            ValueError: When a prompt is empty or longer than ``max_context``, or an id is not in the vocabulary.
        """
        self._ensure_started()
        check_scored(prompts, token_ids, vocabulary=self._limits["vocabulary"], max_context=self.max_context)
        flights = score_flights(prompts, token_ids, with_adapter=with_adapter)
        numbers = self._book.add(flights, first=True)
        self._in_flight.expect_scores(numbers)
        while self._in_flight.awaits_any(numbers):
            self._work()
        answers = self._in_flight.take_scores(numbers)
        each = len(flights) // max(len(prompts), 1)
        return read_scores([answers[i * each : (i + 1) * each] for i in range(len(prompts))])

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model and what runs it."""
        self._ensure_started()
        return {
            "engine": "vllm",
            "engine_version": self._limits["version"],
            "dtype": self._limits["dtype"],
            "head_dtype": self._limits["head_dtype"],
            "model": self.model,
            "revision": self.revision,
            "weights_sha256": weights_sha256(self.model, revision=self.revision),
            **adapter_identity(self.adapter),
        }

    def close(self) -> None:
        """End the child process, which gives all its memory back. Closing twice is allowed."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():  # a forked copy must not end its parent's engine
            process.close()

    def statistics(self) -> VLLMStatistics:
        """Return what the engine has done so far."""
        return self._tally.read()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return None if self._process is None else self._process.pid

    def _room(self, request: Request) -> int:
        return response_room(request, self._limits["max_context"])

    def _ensure_started(self) -> None:
        if self._closed:
            raise RunError("Expected the engine to be open, but it was closed.")
        while self._process is None:
            self._start()

    def _start(self) -> None:
        check_model_folder(self.model)
        if self._chat is None:
            self._chat = ChatFormat(load_tokenizer(self.model, revision=self.revision))
        if self._settings["stop_token_ids"] is None:
            ends = self._chat.end_of_turn_ids | generation_end_ids(self.model, revision=self.revision)
            self._settings["stop_token_ids"] = sorted(ends)
        query = None if self._query_ids is None else query_settings(self._chat.query, self._query_ids)
        order = make_order(
            self._settings, model=self.model, revision=self.revision, adapter=self.adapter, activated=query,
            devices=self._devices, num_threads=self._num_threads, timeout=self._start_timeout,
        )  # fmt: skip
        self._owner = os.getpid()
        self._tally.add(starts=1)
        self._process = WorkerProcess(order.environment, send_timeout=self._stall_timeout, log_path=self._log_path)
        is_first = not self._limits
        try:
            self._limits = self._process.start(order.settings, timeout=order.timeout)
        except (EOFError, OSError) as error:
            in_vain = isinstance(error, StartRefusedError) or self._crashes.number > 0
            self._on_crash(f"it did not start: {error}", fatal=in_vain and not self._limits)
            return
        if self._settings["max_context"] is None and self._limits["max_context"] < self._limits["model_limit"] - 1:
            _logger.warning("`max_context` is %d, what the cache holds: %s", self._limits["max_context"], self._limits)
        self._settings["max_context"] = self._limits["max_context"]  # the same after a restart
        if is_first and query is not None and self._limits["dtype"] == "float32":
            self._check_against_module(query)

    def _check_against_module(self, activated: dict[str, Any]) -> None:
        """Hold the child's answers to its self-test against those of the training module; end it where they differ."""
        from selfcal_lightning.engines.transformers.contexts import hold_against_module

        told = self._limits["probe"]
        origin: dict[str, Any] = {"model": self.model, "revision": self.revision, "adapter": self.adapter}
        try:
            hold_against_module(told["awake"], told["contexts"], activated, engine="vLLM", **origin)
        except ValueError:
            self.close()
            raise

    def _work(self, patience: float = math.inf) -> None:
        """Feed the child, wait for what it says and take it in."""
        self._ensure_started()
        self._feed()
        if self._process is not None:
            self._listen(patience)
            self._feed()

    def _listen(self, patience: float = math.inf) -> None:
        """Wait for what the child says and take it in."""
        try:
            wait = min(patience, self._stall_timeout - self._silence)
            messages = cast(WorkerProcess, self._process).channel.receive(timeout=wait)
            self._silence = 0.0 if messages else self._silence + wait
            if self._silence >= self._stall_timeout:
                self._silence = 0.0
                raise EOFError(f"it gave no sign of life for {self._stall_timeout:g} seconds")
        except EOFError as error:
            self._on_crash(str(error))
            return
        for message in messages:
            if message["event"] == "cancelled":
                self._cancel_answers = message["call"]
                self._drawn.update(message["drawn"])
            else:
                self._take_results(message)

    def _drop_in_child(self, numbers: Sequence[int]) -> dict[int, int]:
        """Make the child drop flights and return the tokens drawn for those that it had begun, by number."""
        process, self._drawn = self._process, {}
        if process is None:
            return {}
        self._cancel_calls += 1
        self._send({"op": "cancel", "ids": numbers, "call": self._cancel_calls})
        while self._process is process and self._cancel_answers < self._cancel_calls:
            self._listen()
        return {number: self._drawn[number] for number in numbers if number in self._drawn}

    def _feed(self) -> None:
        """Give the child what it may have now: enough that it never runs dry between two polls."""
        if self._process is None or not (group := self._book.take(2 * self._limits["max_batch"])):
            return
        for message in list(wire_messages(group, self._room)):  # a crash on the way puts the whole group back
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None:
            return
        try:
            self._process.channel.send(message)
        except OSError as error:
            self._on_crash(f"it takes no messages: {error}")

    def _take_results(self, message: dict[str, Any]) -> None:
        self._tally.hear(message["counters"])
        for sample in message["samples"]:
            if flight := self._finish(sample["id"]):
                self._in_flight.answer(read_response(flight.name, sample, cast(ChatFormat, self._chat)))
            else:  # it finished while the message that cancels it was on its way
                self._drawn[sample["id"]] = len(sample["token_ids"])
        for score in message["scores"]:
            if self._finish(score["id"]):
                self._in_flight.score(score["id"], score["probabilities"])
        for failed in message["failed"]:
            if flight := self._finish(failed["id"]):
                self._refuse(failed["id"], flight, failed["error"])

    def _finish(self, number: int) -> Flight | None:
        flight = self._book.finish(number)
        if flight is not None:
            self._crashes.forget()
        return flight

    def _refuse(self, number: int, flight: Flight, reason: str) -> None:
        failure = Failure(reason, is_refusal=True)
        if flight.request is None:
            self._in_flight.score(number, failure)
        else:
            self._in_flight.fail(flight.name, failure)

    def _on_crash(self, reason: str, *, fatal: bool = False) -> None:
        """Bury the child, queue its work again and decide whether to go on; the next piece of work starts another."""
        process, self._process = self._process, None
        report = cast(WorkerProcess, process).bury()
        self._tally.add(crashes=1)
        self._crashes.count()
        for number, flight in self._book.crash(max_attempts=self._max_attempts):
            self._crashes.quarantine(flight.prompt)
            self._tally.add(quarantined=1)
            told = f"quarantined after it was in flight at {flight.crashes} crashes, alone at the last. {report}"
            self._refuse(number, flight, told)
        if fatal or self._crashes.are_too_many:
            self._closed = True
            last = f"the last time because {reason}. {way_out(report)}{report}"
            raise EngineCrashedError(f"The vLLM engine of {self.model!r} {self._crashes.told()}, {last}")
        _logger.warning("The vLLM process was lost (%s) and is restarted. %s", reason, report)
