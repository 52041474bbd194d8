"""The vLLM engine: a child process of our own that runs vLLM, spoken to on token ids. Imports no vLLM itself."""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.engines import base
from selfcal_lightning.engines.activated_probe import query_settings
from selfcal_lightning.engines.vllm import process, records
from selfcal_lightning.engines.vllm.process import WorkerProcess, is_cpu_build
from selfcal_lightning.engines.vllm.records import Flight, FlightBook
from selfcal_lightning.models import folders
from selfcal_lightning.models.chat_format import ChatFormat, generation_end_ids, load_tokenizer
from selfcal_lightning.records import Request, Response

_logger = logging.getLogger(__name__)
_START_BYTES_A_SECOND = 1e8


class VLLMEngine:
    """Samples with vLLM in a child process: fast, and its crashes, memory and side effects stay out of the caller's.

    N samples of a prompt and their P(True) queries share their prefix through the prefix cache, on token ids
    throughout. The process starts with the first request, after the files of a hub model were downloaded here; a first
    start that fails is tried once more, unless vLLM refuses the settings. When the process dies, or is silent for too
    long, it is restarted and gets the unfinished requests again, whose seeds make the same texts. Requests that were in
    flight at a crash then run in ever smaller groups until the one that kills the engine is alone. After
    ``max_attempts`` crashes it is quarantined: ``poll`` raises a ``RequestsFailedError`` that names it, and all others
    continue.

    Args:
        model: Folder or hub name of the model, or "bundled".
        revision: Its revision on the hub.
        adapter: Folder of a LoRA adapter to sample with. With an activated one the engine samples with the base model
            alone, and reads the confidence query with the adapter over the same cache. A self-test at the start checks
            both, and in float32 compares the confidences with those of transformers, which loads the model once more.
        dtype: As in vLLM; None or "auto" is float32 on CPU and what vLLM takes for the model on GPU. The output layer
            computes P(True) in float32 also in half precision.
        max_context: Longest prompt + response + query in tokens; None is the model's own limit, or, with a warning,
            the longest that the cache holds. vLLM counts one token more, so at the model's limit one is lost.
        chat: The model's chat format; None reads it from the model's tokenizer.
        stop_token_ids: Ids that end a response; None takes those of the chat format and the generation settings.
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
        start_timeout: Longest start in seconds; None is 15 minutes and a second for every 100 MB of weights.
        stall_timeout: Longest silence in seconds, with work in flight, before the process is taken for dead.
        log_path: File for the child's output; None makes a temporary one, kept only after a crash.
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
        check_installed("vllm", extra="vllm")
        check_at_least(1, max_batch=max_batch, max_attempts=max_attempts)
        check_at_least(0, max_restarts=max_restarts)
        self.model, self.revision = folders.resolve_model(model), revision
        self.adapter = None if adapter is None else folders.local_adapter(adapter)
        self._query_ids = None if self.adapter is None else folders.read_invocation_ids(self.adapter)
        self._settings: dict[str, Any] = {
            "dtype": None if dtype == "auto" else dtype,
            "max_context": max_context,
            "max_batch": max_batch,
            "stop_token_ids": None if stop_token_ids is None else sorted(stop_token_ids),
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "engine_args": dict(engine_args or {}),
        }
        self._devices, self._num_threads = devices, num_threads
        self._max_restarts, self._max_attempts = max_restarts, max_attempts
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
        self._in_flight = base.InFlight()
        # Crashes, and the prompts that were quarantined, since a request was last finished.
        self._crashes, self._quarantined = 0, set[tuple[int, ...]]()
        self._totals, self._child = Counter[str](), Counter[str]()  # the child counts from its own start

    @property
    def max_context(self) -> int:
        self._ensure_started()
        return self._limits["max_context"]

    @property
    def batch_size(self) -> int:
        self._ensure_started()
        return self._limits["max_batch"]

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self._ensure_started()
        self._in_flight.check_new(requests)
        for request in requests:
            self._check_ids(f"the prompt of request {request.id!r}", request.context_ids)
            ends = self._settings["stop_token_ids"]
            base.check_request(request, max_context=self.max_context, end_ids=ends, query_ids=self._query_ids)
        numbers = self._book.add(
            Flight(request.id, tuple(map(int, request.context_ids)), request) for request in requests
        )
        self._in_flight.begin(dict(zip((request.id for request in requests), numbers, strict=True)))
        self._feed()
        return [request.id for request in requests]

    def drawn_so_far(self, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return nothing: the child reports a response when it has finished."""
        return {}

    def poll(self, patience: float | None = None) -> list[Response]:
        """Wait for responses; raises EngineCrashedError after more than ``max_restarts`` failures in a row."""
        until = math.inf if patience is None else time.monotonic() + patience
        while len(self._book) and not self._in_flight.news and (left := until - time.monotonic()) > 0.0:
            self._work(left)
        return self._in_flight.deliver()

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """See ``Engine``; it waits for the child's answer, one step at most, so cancel many at once.

        What a child drew that is lost before it answers is unknown and left out.
        """
        thrown_away, names = self._in_flight.drop(ids)
        self._totals["cancelled"] += len(names)
        running = [number for number in names if self._book.drop(number)]
        drawn = self._drop_in_child(running) if running else {}
        self._feed()
        return thrown_away | {names[number]: count for number, count in drawn.items()}

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        """See ``Engine``; None stands for a prompt that crashes the engine, or that vLLM refuses."""
        self._ensure_started()
        base.check_prompts(prompts, self.max_context)
        for what, ids in (("`token_ids`", token_ids), *((f"prompt {i}", prompt) for i, prompt in enumerate(prompts))):
            self._check_ids(what, ids)
        wanted = tuple(map(int, token_ids))
        chunks = [wanted[start : start + base.MAX_SCORED_IDS] for start in range(0, len(wanted), base.MAX_SCORED_IDS)]
        numbers = self._book.add(
            (
                Flight(f"prompt {i} of next_token_probabilities", tuple(map(int, prompt)), None, chunk, with_adapter)
                for i, prompt in enumerate(prompts)
                for chunk in chunks
            ),
            first=True,
        )
        self._in_flight.scores |= dict.fromkeys(numbers)
        try:
            while any(self._in_flight.scores[number] is None for number in numbers):
                self._work()
        finally:
            answers = iter([self._in_flight.scores.pop(number) for number in numbers])
            for number in numbers:
                self._book.drop(number)
        return base.read_scores([list(islice(answers, len(chunks))) for _ in prompts])

    def describe(self) -> dict[str, Any]:
        self._ensure_started()
        return {
            "engine": "vllm",
            "engine_version": self._limits["version"],
            "dtype": self._limits["dtype"],
            "head_dtype": self._limits["head_dtype"],
            "model": self.model,
            "revision": self.revision,
            "weights_sha256": folders.weights_sha256(self.model, revision=self.revision),
            **folders.adapter_identity(self.adapter),
        }

    def close(self) -> None:
        self._closed = True
        child, self._process = self._process, None
        if child is not None and self._owner == os.getpid():  # a forked copy must not end its parent's engine
            child.close()

    def statistics(self) -> Counter[str]:
        """Return what was counted so far, restarts included: starts, crashes, steps, query_cached_tokens, ..."""
        return self._totals + self._child

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        vocabulary = self._limits["vocabulary"]
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocabulary:
            raise InputError(f"Expected {what} to hold ids of 0 to {vocabulary - 1}, but got {min(ids)} to {max(ids)}.")

    def _ensure_started(self) -> None:
        if self._closed:
            raise RunError("Expected the engine to be open, but it was closed.")
        while self._process is None:
            self._start()

    def _start(self) -> None:
        folders.check_model_folder(self.model)
        if self._chat is None:
            self._chat = ChatFormat(load_tokenizer(self.model, revision=self.revision))
        if self._settings["stop_token_ids"] is None:
            ends = self._chat.end_of_turn_ids | generation_end_ids(self.model, revision=self.revision)
            self._settings["stop_token_ids"] = sorted(ends)
        query = None if self._query_ids is None else query_settings(self._chat.query, self._query_ids)
        # A hub model is downloaded before the clock of the start begins; the child gets a folder and never asks a hub.
        folder = folders.model_folder(self.model, revision=self.revision)
        told: dict[str, Any] = {"model": str(folder), "adapter": self.adapter, "activated": query}
        told["lora_rank"] = None if self.adapter is None else records.lora_rank(self.adapter)
        timeout = self._start_timeout
        if timeout is None:
            size = folders.weights_bytes(self.model, revision=self.revision)
            timeout = process.START_SECONDS + size / _START_BYTES_A_SECOND
        environment = process.worker_environment(
            os.environ,
            on_cpu=is_cpu_build(),
            devices=self._devices,
            num_threads=self._num_threads,
            activated_adapter=None if query is None else self.adapter,
        )
        self._owner = os.getpid()
        self._totals, self._child = self._totals + self._child, Counter()
        self._totals["starts"] += 1
        self._process = WorkerProcess(environment, send_timeout=self._stall_timeout, log_path=self._log_path)
        is_first = not self._limits
        try:
            self._limits = self._process.start({**self._settings, **told}, timeout=timeout)
        except (EOFError, OSError) as error:
            in_vain = isinstance(error, process.StartRefusedError) or self._crashes > 0
            self._on_crash(f"it did not start: {error}", fatal=in_vain and not self._limits)
            return
        except BaseException:  # such as Ctrl-C in a start of minutes: the next call starts anew
            self._drop_process()
            raise
        if self._settings["max_context"] is None and self._limits["max_context"] < self._limits["model_limit"] - 1:
            _logger.warning("`max_context` is %d, what the cache holds: %s", self._limits["max_context"], self._limits)
        self._settings["max_context"] = self._limits["max_context"]  # the same after a restart
        if is_first and query is not None and self._limits["dtype"] == "float32":
            self._check_against_module(query)

    def _check_against_module(self, activated: dict[str, Any]) -> None:
        from selfcal_lightning.engines.transformers.slots import hold_against_module

        told = self._limits["probe"]
        origin: dict[str, Any] = {"model": self.model, "revision": self.revision, "adapter": self.adapter}
        try:
            hold_against_module(told["awake"], told["contexts"], activated, engine="vLLM", **origin)
        except ValueError:
            self.close()
            raise
        except BaseException:  # it was not checked to the end
            self._drop_process()
            self._limits = {}
            raise

    def _drop_process(self) -> None:
        child, self._process = self._process, None
        if child is not None:
            child.kill()

    def _work(self, patience: float = math.inf) -> None:
        self._ensure_started()
        self._feed()
        if self._process is not None:
            self._listen(patience)
            self._feed()

    def _listen(self, patience: float = math.inf) -> None:
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
        child, self._drawn = self._process, {}
        if child is None:
            return {}
        self._cancel_calls += 1
        self._send({"op": "cancel", "ids": numbers, "call": self._cancel_calls})
        while self._process is child and self._cancel_answers < self._cancel_calls:
            self._listen()
        return {number: self._drawn[number] for number in numbers if number in self._drawn}

    def _feed(self) -> None:
        """Give the child what it may have now: enough that it never runs dry between two polls."""
        if self._process is None or not (group := self._book.take(2 * self._limits["max_batch"])):
            return
        most = self._limits["max_context"]
        messages = list(records.wire_messages(group, lambda request: base.response_room(request, most)))
        for message in messages:  # a crash on the way puts the whole group back
            self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is None:
            return
        try:
            self._process.channel.send(message)
        except OSError as error:
            self._on_crash(f"it takes no messages: {error}")

    def _take_results(self, message: dict[str, Any]) -> None:
        self._child = Counter(message["counters"])
        for sample in message["samples"]:
            if flight := self._finish(sample["id"]):
                token_ids = tuple(sample["token_ids"])
                text = cast(ChatFormat, self._chat).decode(token_ids)
                finish, logprob, yes, no = (sample.get(name) for name in ("finish", "logprob", "yes", "no"))
                self._in_flight.answer(Response(flight.name, text, token_ids, finish, logprob, yes, no))
            else:  # it finished while the message that cancels it was on its way
                self._drawn[sample["id"]] = len(sample["token_ids"])
        for score in message["scores"]:
            if self._finish(score["id"]):
                self._in_flight.scores[score["id"]] = score["probabilities"]
        for failed in message["failed"]:
            if flight := self._finish(failed["id"]):
                self._refuse(failed["id"], flight, failed["error"])

    def _finish(self, number: int) -> Flight | None:
        flight = self._book.finish(number)
        if flight is not None:
            self._crashes = 0
            self._quarantined.clear()
        return flight

    def _refuse(self, number: int, flight: Flight, reason: str) -> None:
        failure = base.Failure(reason, is_refusal=True)
        if flight.request is None:
            self._in_flight.scores[number] = failure
        else:
            self._in_flight.fail(flight.name, failure)

    def _on_crash(self, reason: str, *, fatal: bool = False) -> None:
        """Queue the child's work again, unless it failed too often; the next piece of work starts another."""
        child, self._process = self._process, None
        report = cast(WorkerProcess, child).bury()
        self._totals["crashes"] += 1
        self._crashes += 1
        for number, flight in self._book.crash(max_attempts=self._max_attempts):
            self._crashes = 0
            self._quarantined.add(flight.prompt)
            self._totals["quarantined"] += 1
            why = f"quarantined after it was in flight at {flight.crashes} crashes, alone at the last. {report}"
            self._refuse(number, flight, why)
        blamed = len(self._quarantined)
        if fatal or max(self._crashes, blamed) > self._max_restarts:
            self._closed = True
            told = f"failed {self._crashes} time(s) in a row"
            if blamed > self._max_restarts:
                told = f"crashed over {blamed} different prompts in a row"
            last = f"the last time because {reason}. {process.way_out(report)}{report}"
            raise records.EngineCrashedError(f"The vLLM engine of {self.model!r} {told}, {last}")
        _logger.warning("The vLLM process was lost (%s) and is restarted. %s", reason, report)
