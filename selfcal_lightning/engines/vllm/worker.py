"""The child process of the vLLM engine: runs vLLM's offline engine in-process and speaks over a socket.

Started as ``python -m selfcal_lightning.engines.vllm.worker FD``. The first message holds the settings, and ``ready``
answers it with the engine's limits. Then it takes messages by their ``op``:

- ``sample``: requests with their prompts, each distinct prompt once; answered in ``results``.
- ``score``: prompts, each with at most 128 token ids, with or without the adapter; answered in ``results``. Those of
  one message run together: an adapter on a CPU dislikes small batches.
- ``cancel``: ids to drop; answered by ``cancelled`` with the tokens drawn for those that were begun.
- ``close``: end.

It ends when the socket closes, that is, when its parent ends in any way.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.plugins import load_plugins_of_parent
from selfcal_lightning.engines.activated_probe import ProbeGroups, Table, try_adapter
from selfcal_lightning.engines.base import COLDEST_TEMPERATURE, EDT_PROCESSOR, ends_with_query, finish_of, mass_of
from selfcal_lightning.engines.vllm.plugin import change_adapters
from selfcal_lightning.engines.vllm.process import Channel

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

PROGRESS_SECONDS = 1.0
_QUERY_FIRST, _SAMPLE_NEXT = 0, 1


def sampling_params(spec: dict[str, Any], stop_ids: frozenset[int], *, by_position: bool) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    temperature, edt = spec["temperature"], spec["edt"]
    if 0.0 < temperature < COLDEST_TEMPERATURE and edt is None:
        edt = [temperature, 1.0, 0.0]
    return SamplingParams(
        temperature=temperature if edt is None else 1.0,
        extra_args=None if edt is None else {"edt": edt},
        top_p=spec["top_p"],
        max_tokens=spec["max_tokens"],
        seed=spec["seed" if by_position else "stream_seed"],
        stop_token_ids=sorted(stop_ids.union(spec["step_ids"])),
        ignore_eos=True,  # all end-of-turn ids are named
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def query_params(token_ids: Sequence[int]) -> SamplingParams:
    """Return what reads the probabilities of at most 128 tokens after a prompt."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        logprob_token_ids=list(dict.fromkeys(token_ids)),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probabilities(completion: CompletionOutput, token_ids: Sequence[int]) -> list[float]:
    """Return the probabilities of the tokens from the answer to ``query_params``."""
    (position,) = completion.logprobs
    return [math.exp(position[token].logprob) for token in token_ids]


def _ask(engine: LLMEngine, groups: ProbeGroups, token_ids: Sequence[int], lora: LoRARequest | None) -> list[Table]:
    """Return the probabilities of the tokens after the prompts of each group, with the adapter or without it."""
    found: dict[str, list[float]] = {}
    for group, (prompts, awake) in enumerate(groups):
        for i, prompt in enumerate(prompts):
            engine_input = {"type": "token", "prompt_token_ids": list(prompt)}
            own = lora if awake else None
            engine.add_request(f"t{group}-{i}", engine_input, query_params(token_ids), lora_request=own)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = probabilities(output.outputs[0], token_ids)
    return [[found[f"t{group}-{i}"] for i in range(len(prompts))] for group, (prompts, _) in enumerate(groups)]


@dataclass(slots=True)
class _Sample:
    """What was asked of a sample, and the result of the first of its two passes."""

    spec: dict[str, Any]
    prompt: list[int]
    result: dict[str, Any] | None = None


class Worker:
    """One vLLM engine and the requests on their way through it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._stop_ids = frozenset(settings["stop_token_ids"])
        activated = settings["activated"]
        self._query_ids: list[int] | None = None if activated is None else activated["query"]
        self._engine, self.limits = _build_engine(settings)
        self._by_position = bool(self._engine.vllm_config.use_v2_model_runner)
        self._samples: dict[int, _Sample] = {}
        self._scores: dict[int, list[int]] = {}
        self._lora: LoRARequest | None = None
        if settings["adapter"] is not None:
            from vllm.lora.request import LoRARequest

            self._lora = LoRARequest("adapter", 1, settings["adapter"])
            self._engine.add_lora(self._lora)
        if activated is not None:
            contexts, awake = try_adapter(
                lambda groups: _ask(self._engine, groups, activated["token_ids"], self._lora), activated["query"],
                vocabulary=self.limits["vocabulary"], longest=self.limits["max_context"],
                exact=self.limits["dtype"] == "float32", engine="vLLM",
            )  # fmt: skip
            self._engine.reset_prefix_cache()
            self.limits["probe"] = {"contexts": contexts, "awake": awake}
        self._finished: dict[str, list[dict[str, Any]]] = {"samples": [], "scores": [], "failed": []}
        self.counters = Counter[str]()

    @property
    def busy(self) -> bool:
        return self._engine.has_unfinished_requests()

    def add_samples(self, prompts: list[list[int]], specs: list[dict[str, Any]]) -> None:
        """Queue samples; ``spec["prompt"]`` is an index into ``prompts``."""
        for spec in specs:
            prompt = prompts[spec["prompt"]]
            self._samples[spec["id"]] = _Sample(spec, prompt)
            params = sampling_params(spec, self._stop_ids, by_position=self._by_position)
            self._add(f"s{spec['id']}", prompt, params, None if self._query_ids else self._lora)

    def add_scores(self, specs: list[dict[str, Any]]) -> None:
        for spec in specs:
            self._scores[spec["id"]] = spec["token_ids"]
            sleeps = self._query_ids is not None and not ends_with_query(spec["prompt"], self._query_ids)
            lora = self._lora if spec["with_adapter"] and not sleeps else None
            params = query_params(spec["token_ids"])
            self._add(f"p{spec['id']}", spec["prompt"], params, lora)

    def cancel(self, ids: list[int]) -> list[tuple[int, int]]:
        """Drop requests, whichever pass they are in; return (id, tokens drawn) of the samples that were begun."""
        drawn = [(i, self._tokens_drawn(i)) for i in ids if i in self._samples]
        known = [i for i in ids if self._samples.pop(i, None) or self._scores.pop(i, None)]
        self._engine.abort_request([f"{stage}{i}" for i in known for stage in "sqp"])
        return [(i, count) for i, count in drawn if count is not None]

    def _tokens_drawn(self, number: int) -> int | None:
        """Return how long the response to a sample is so far; None where it has no token yet: it was not begun."""
        if (result := self._samples[number].result) is not None:
            return len(result["token_ids"])
        outputs = self._engine.output_processor
        states = [outputs.request_states[key] for key in outputs.external_req_ids.get(f"s{number}", ())]
        return sum(state.detokenizer.num_output_tokens() for state in states) or None

    def step(self) -> None:
        """Run one step of the engine and take in what finished; what was cancelled in the same step is left out."""
        outputs = self._engine.step()
        self.counters["steps"] += 1
        for output in outputs:
            stage, number = output.request_id[0], int(output.request_id[1:])
            if not output.finished:
                continue
            if stage == "s" and number in self._samples:
                self._on_sampled(number, output)
            elif stage == "q" and number in self._samples:
                self._on_queried(number, output)
            elif stage == "p" and number in self._scores:
                self._count("score", output)
                values = probabilities(output.outputs[0], self._scores.pop(number))
                self._finished["scores"].append({"id": number, "probabilities": values})

    def take_results(self, *, even_if_empty: bool = False) -> dict[str, Any] | None:
        """Return the message with what finished, and what vLLM refused, since the last call; None where nothing did."""
        if not any(self._finished.values()) and not even_if_empty:
            return None
        finished, self._finished = self._finished, {"samples": [], "scores": [], "failed": []}
        return {"event": "results", **finished, "counters": self.counters.copy()}

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, key: str, prompt: list[int], params: SamplingParams, lora: LoRARequest | None) -> None:
        """Queue a request; its key names its stage (sample, query or prompt to score) and its number."""
        engine_input = {"type": "token", "prompt_token_ids": prompt}
        priority = _SAMPLE_NEXT if key.startswith("s") else _QUERY_FIRST
        try:
            self._engine.add_request(key, engine_input, params, lora_request=lora, priority=priority)
        except ValueError as error:  # vLLM judges the request itself; a fault of the engine is not a ValueError
            number = int(key[1:])
            self._samples.pop(number, None)
            self._scores.pop(number, None)
            self._finished["failed"].append({"id": number, "error": str(error)})

    def _count(self, kind: str, output: RequestOutput) -> None:
        self.counters[f"{kind}_tokens"] += len(output.prompt_token_ids)
        self.counters[f"{kind}_cached_tokens"] += output.num_cached_tokens or 0

    def _on_sampled(self, number: int, output: RequestOutput) -> None:
        sample, completion = self._samples[number], output.outputs[0]
        token_ids = list(completion.token_ids)
        flat = completion.logprobs
        logprobs = [flat.logprobs[start] for start in flat.start_indices]
        stopped = bool(token_ids) and token_ids[-1] in self._stop_ids
        if stopped:
            token_ids.pop()
            logprobs.pop()
        self._count("prompt", output)
        spec, query = sample.spec, sample.spec["query"]
        finish = finish_of(token_ids, ended=stopped, step_ids=spec["step_ids"], limit=spec["max_tokens"])
        logprob = math.fsum(logprobs)
        sample.result = {"id": number, "token_ids": token_ids, "finish": finish, "logprob": logprob}
        if query is None:
            self._finished["samples"].append(sample.result)
            del self._samples[number]
            return
        ids = [*sample.prompt, *token_ids, *query["suffix"]]
        params = query_params([*query["yes"], *query["no"]])
        self._add(f"q{number}", ids, params, self._lora)

    def _on_queried(self, number: int, output: RequestOutput) -> None:
        sample = self._samples.pop(number)
        query = sample.spec["query"]
        self._count("query", output)
        yes, no = (mass_of(probabilities(output.outputs[0], query[name])) for name in ("yes", "no"))
        self._finished["samples"].append({**cast(dict[str, Any], sample.result), "yes": yes, "no": no})


def _build_engine(settings: dict[str, Any]) -> tuple[LLMEngine, dict[str, Any]]:
    """Start vLLM and return it with the limits that the parent has to know."""
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": settings["model"],
        "dtype": settings["dtype"] or ("float32" if on_cpu else "auto"),
        "tensor_parallel_size": settings["tensor_parallel_size"],
        "max_num_seqs": settings["max_batch"],
        "enforce_eager": on_cpu if settings["enforce_eager"] is None else settings["enforce_eager"],
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "logprobs_mode": "raw_logprobs",
        "logits_processors": [EDT_PROCESSOR],
        "disable_log_stats": True,
    }
    if settings["lora_rank"] is not None:
        # On a CPU some layers take "no adapter" for the last slot: one more stays empty.
        arguments |= {"enable_lora": True, "max_loras": 1 + on_cpu, "max_lora_rank": settings["lora_rank"]}
        change_adapters([settings["adapter"]] if settings["activated"] is not None else [])
    longest, most = EngineArgs(**arguments).create_model_config().max_model_len, settings["max_context"]
    if most is not None and most > longest:
        raise InputError(f"Expected `max_context` to be at most the model's {longest}, but got {most}.")
    limit = longest if most is None else min(most + 1, longest)
    arguments["max_model_len"] = -1 if most is None else limit  # -1 is what fits the cache
    if on_cpu:
        # A seeded request in a partial prefill kills the engine on CPU, so prompts are never split; blocks of 128,
        # the default there, would leave short prompts without a single shared block.
        arguments |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(limit, 4096),
            "block_size": 32,
            "kv_cache_memory_bytes": settings["kv_cache_memory_bytes"] or 1 << 30,
        }
    else:
        given = ("kv_cache_memory_bytes", "gpu_memory_utilization")
        arguments |= {name: settings[name] for name in given if settings[name] is not None}
    extra = dict(settings["engine_args"])
    arguments["logits_processors"] += extra.pop("logits_processors", [])
    if {**arguments, **extra}["dtype"] not in ("float32", "float"):
        # P(True) is read from two logits: in half precision those of 16 to 32 have steps of 1/8.
        extra["hf_overrides"] = {"head_dtype": "float32"} | extra.get("hf_overrides", {})
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments | extra), usage_context=UsageContext.LLM_CLASS)
    model = engine.model_config
    return engine, {
        "max_context": model.max_model_len - 1,  # vLLM counts the token that it samples, the query does not
        "model_limit": limit,
        "vocabulary": model.get_vocab_size(),
        "version": vllm.__version__,
        "max_batch": engine.vllm_config.scheduler_config.max_num_seqs,
        "dtype": str(model.dtype).removeprefix("torch."),
        "head_dtype": None if model.head_dtype == model.dtype else str(model.head_dtype).removeprefix("torch."),
    }


def _read_inbox(channel: Channel, inbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Move messages from the socket to ``inbox``; when the parent is gone, take the whole process group along."""
    while True:
        try:
            for message in channel.receive():
                inbox.put(message)
        except EOFError:
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(1)


def _write_outbox(channel: Channel, outbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Move messages from ``outbox`` to the socket, so that a parent who is busy elsewhere never stops the engine."""
    while True:
        try:
            channel.send(outbox.get())
        except OSError:
            return  # the reader sees the same end and acts on it


def _serve(worker: Worker, inbox: queue.SimpleQueue[dict[str, Any]], outbox: queue.SimpleQueue[dict[str, Any]]) -> None:
    last_report = time.monotonic()
    while True:
        while not inbox.empty() or not worker.busy:
            message = inbox.get()
            match message["op"]:
                case "sample":
                    worker.add_samples(message["prompts"], message["requests"])
                case "score":
                    worker.add_scores(message["requests"])
                case "cancel":
                    drawn = worker.cancel(message["ids"])
                    outbox.put({"event": "cancelled", "call": message["call"], "drawn": drawn})
                case "close":
                    return
            if refused := worker.take_results():
                outbox.put(refused)
        worker.step()
        if results := worker.take_results(even_if_empty=time.monotonic() - last_report > PROGRESS_SECONDS):
            last_report = time.monotonic()
            outbox.put(results)


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    outbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_inbox, args=(channel, inbox), daemon=True).start()
    settings = inbox.get()
    try:
        load_plugins_of_parent()
        worker = Worker(settings)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        is_final = isinstance(error, ValueError | ImportError)
        channel.send({"event": "error", "message": f"{type(error).__name__}: {error}", "is_final": is_final})
        raise
    threading.Thread(target=_write_outbox, args=(channel, outbox), daemon=True).start()
    outbox.put({"event": "ready", **worker.limits})
    _serve(worker, inbox, outbox)
    worker.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
