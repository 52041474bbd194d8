"""Activated adapters in vLLM: awake at the query that ends a prompt, asleep before it. Imports vLLM.

vLLM knows adapters that act on every token. In processes that serve an activated adapter, four of its places change:

- reading an adapter's configuration no longer refuses ``alora_invocation_tokens`` for the named folders;
- the hash of a cache block that ends before the query does not name the adapter, so that it is the base model's own
  block and is found in its cache;
- in the model runners V1 and V2, tokens before the query have no adapter.

The prompt alone says where the query is, so nothing has to be sent along with a request.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import vllm
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload import manager as offload_manager
from vllm.v1.worker.gpu.lora_utils import NO_LORA_ID, LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.gpu_input_batch import InputBatch

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import ends_with_query
from selfcal_lightning.models.folders import read_invocation_ids

TRIED_VERSIONS = ("0.32.0",)
NEVER = 2**31  # tokens: an adapter that does not wake
_QUERIES: dict[str, tuple[int, ...]] = {}
_LORA_KEY = "lora"


def wake_at_query(adapter: str) -> None:
    """Let the adapter of a folder act on the query at a prompt's end and what follows, in this process from now on."""
    query_ids = read_invocation_ids(adapter) if Path(adapter).is_dir() else None
    if not query_ids:
        raise InputError(f"Expected the folder of an activated adapter, from `selfcal fit`, but got {adapter!r}.")
    if vllm.__version__.partition("+")[0] not in TRIED_VERSIONS:
        wanted = f"vLLM {' or '.join(TRIED_VERSIONS)}, which activated adapters were tried on"
        way_out = "Install that version, or use `engine: transformers`."
        raise InputError(f"Expected {wanted}, but got {vllm.__version__}. {way_out}")
    _QUERIES[os.path.realpath(adapter)] = query_ids
    _change_vllm()


def wakes_at(lora: LoRARequest | None, prompt: Sequence[int] | None) -> int | None:
    """Return the position of the first token that an adapter acts on; None where it is no activated one."""
    query_ids = None if lora is None else _query_of(lora.lora_path)
    if query_ids is None:
        return None
    return len(prompt) - len(query_ids) if prompt is not None and ends_with_query(prompt, query_ids) else NEVER


def _query_of(path: str) -> tuple[int, ...] | None:
    return _QUERIES.get(path) or _QUERIES.get(os.path.realpath(path))


@functools.cache
def _change_vllm() -> None:
    keys = functools.partial(_block_keys, kv_cache_utils.generate_block_hash_extra_keys)
    for module in (kv_cache_utils, block_pool, offload_manager):
        module.generate_block_hash_extra_keys = keys
    read = PEFTHelper.from_local_dir.__func__

    def read_configuration(kind: type[PEFTHelper], lora_path: str, *args: Any, **settings: Any) -> PEFTHelper:
        helper = read(kind, lora_path, *args, **settings)
        if _query_of(lora_path) is not None:
            helper.alora_invocation_tokens = None
        return helper

    PEFTHelper.from_local_dir = classmethod(read_configuration)
    InputBatch.make_lora_inputs = functools.partialmethod(_lora_inputs_v1, InputBatch.make_lora_inputs)
    LoraState.make_lora_inputs = functools.partialmethod(_lora_inputs_v2, LoraState.make_lora_inputs)
    RunnerV2.add_requests = functools.partialmethod(_add_requests_v2, RunnerV2.add_requests)


def _block_keys(
    generate: Any, request: Request, start: int, end: int, multimodal: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return the keys of a block's hash besides its tokens, without an adapter that sleeps over all of it."""
    keys, multimodal = generate(request, start, end, multimodal)
    wakes = wakes_at(request.lora_request, request.prompt_token_ids)
    if keys and wakes is not None and end <= wakes:
        keys = tuple(key for key in keys if not (isinstance(key, tuple) and key[0] == _LORA_KEY)) or None
    return keys, multimodal


def _awake(adapters: np.ndarray, wakes: np.ndarray, computed: np.ndarray, scheduled: np.ndarray) -> np.ndarray:
    """Return the adapter of every token of a step, [tokens]; ``NO_LORA_ID`` where it sleeps."""
    firsts = scheduled.cumsum() - scheduled
    positions = np.arange(scheduled.sum()) - np.repeat(firsts - computed, scheduled)
    return np.where(positions >= np.repeat(wakes, scheduled), np.repeat(adapters, scheduled), NO_LORA_ID)


def _lora_inputs_v1(
    batch: InputBatch, make: Any, num_scheduled_tokens: np.ndarray, num_sampled_tokens: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
    sampled, tokens, active = make(batch, num_scheduled_tokens, num_sampled_tokens)
    size = batch.num_reqs
    adapters = batch.request_lora_mapping[:size]
    wakes = np.zeros(size, dtype=np.int64)
    for row in adapters.nonzero()[0]:
        lora = batch.lora_id_to_lora_request[int(adapters[row])]
        wakes[row] = wakes_at(lora, batch.token_ids_cpu[row, : batch.num_prompt_tokens[row]]) or 0
    if not wakes.any():
        return sampled, tokens, active
    scheduled = np.asarray(num_scheduled_tokens[:size], dtype=np.int64)
    of_tokens = _awake(adapters, wakes, batch.num_computed_tokens_cpu[:size], scheduled)
    lasts = of_tokens[scheduled.cumsum() - 1]
    return tuple(np.repeat(lasts, num_sampled_tokens).tolist()), tuple(of_tokens.tolist()), active


# Of an adapters' state in model runner V2: the runner's requests, and where the adapter of each wakes.
_REQUESTS_V2: WeakKeyDictionary[LoraState, tuple[RequestState, dict[str, int]]] = WeakKeyDictionary()


def _add_requests_v2(runner: RunnerV2, add: Any, scheduler_output: SchedulerOutput) -> None:
    add(runner, scheduler_output)
    _, wakes = _REQUESTS_V2.get(runner.lora_state, (None, {}))
    for new in scheduler_output.scheduled_new_reqs:
        wakes[new.req_id] = wakes_at(new.lora_request, new.prefill_token_ids[: new.prompt_len]) or 0
    known = {name: place for name, place in wakes.items() if name in runner.lora_state.lora_requests}
    _REQUESTS_V2[runner.lora_state] = runner.req_states, known


def _lora_inputs_v2(
    state: LoraState, make: Any, req_ids: list[str], idx_mapping: np.ndarray, num_scheduled_tokens: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...], set[LoRARequest]]:
    sampled, tokens, active = make(state, req_ids, idx_mapping, num_scheduled_tokens)
    states, known = _REQUESTS_V2.get(state, (None, {}))
    wakes = np.array([known.get(name, 0) for name in req_ids], dtype=np.int64)
    if not wakes.any():
        return sampled, tokens, active
    computed = states.num_computed_tokens_np[idx_mapping]
    scheduled = np.asarray(num_scheduled_tokens, dtype=np.int64)
    of_tokens = _awake(state.lora_ids[idx_mapping], wakes, computed, scheduled)
    return tuple(of_tokens[scheduled.cumsum() - 1].tolist()), tuple(of_tokens.tolist()), active
