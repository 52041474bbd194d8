"""The engines that ``SSCGeneration`` starts: over the base model before training, and beside the trainer later."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.memory import memory_share
from selfcal_lightning.engines.opening import open_engine, serve_model
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.fingerprints import weights_bytes, weights_sha256
from selfcal_lightning.model_files.locations import resolve_model
from selfcal_lightning.models.weight_files import WeightFiles
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.training.trained_modules import RoundModule

MEMORY = "gpu_memory_utilization"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process of the Trainer runs.

    Attributes:
        device: Its device.
        local_rank: Its number on this machine.
        processes: Processes on this machine.
    """

    device: torch.device
    local_rank: int = 0
    processes: int = 1


def start_engine(options: EngineOptions, model: str, chat: ChatFormat, *, place: Place) -> Engine:
    """Start an engine of its own where a process of the Trainer runs.

    Args:
        options: Which engine, and how.
        model: Folder or hub name of the model, or "bundled".
        chat: Renders prompts and the confidence query.
        place: Where to.

    Raises:
        ValueError: There are fewer GPUs than the engines of this machine's processes take.
    """
    return open_engine(_bound(options, place), model, chat=chat)


def start_round_engine(
    options: EngineOptions, module: RoundModule, chat: ChatFormat, *, adapter: str, place: Place
) -> Engine:
    """Start the engine of a later round, beside the trainer on the same device.

    The transformers engine runs the trainer's own model, unless it is asked for another dtype; then it loads the base
    model once more. vLLM runs in a new process, so that nothing of an earlier adapter is left in its cache.

    Args:
        options: Which engine, and how.
        module: The module, its model holding the adapter of the round.
        chat: Renders prompts and the confidence query.
        adapter: Folder of that adapter.
        place: Where the process runs.

    Raises:
        ValueError: vLLM would not have enough of the GPU's memory.
    """
    gc.collect()
    if place.device.type == "cuda":
        torch.cuda.empty_cache()
    model = resolve_model(module.base_model)
    own_dtype = str(module.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    if options.name == "transformers" and options.dtype in ("auto", own_dtype):
        return serve_model(
            options,
            module.model,
            chat=chat,
            source=model,
            adapter_sha256=weights_sha256(adapter),
            quantization=module.quantization,
        )
    options = replace(options, adapter=adapter)
    if options.name == "vllm" and place.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(place.device)
        weights = engine_weights_bytes(model, revision=options.revision, dtype=options.dtype) // options.num_gpus
        share = memory_share(free, total, weights=weights, limit=options.engine_args.get(MEMORY))
        options = replace(options, engine_args={**options.engine_args, MEMORY: share})
    return start_engine(options, model, chat, place=place)


def _bound(options: EngineOptions, place: Place) -> EngineOptions:
    """Return the options of an engine that runs where the process does."""
    if options.name == "transformers":
        return replace(options, engine_args={"device": str(place.device), **options.engine_args})
    if place.device.type != "cuda":
        return options
    return replace(options, engine_args={"devices": _gpus(options.num_gpus, place), **options.engine_args})


def _gpus(count: int, place: Place) -> list[int]:
    """Return the GPUs of one process's engine: its own, or ``count`` that no other process's engine takes."""
    if count == 1:
        return [place.device.index]
    there = torch.cuda.device_count()
    if place.processes * count > there:
        raise InputError(
            f"Expected {place.processes} engine(s) of `tensor_parallel_size` {count} to find "
            f"{place.processes * count} GPUs, but got {there}. Start fewer processes (`trainer.devices`), or lower "
            "`tensor_parallel_size`."
        )
    return list(range(place.local_rank * count, (place.local_rank + 1) * count))


def engine_weights_bytes(model: str, *, revision: str | None, dtype: str) -> int:
    """Return the bytes that a model's weights take in vLLM on a GPU.

    Args:
        model: Folder or hub name of the model.
        revision: Revision on the hub.
        dtype: What they are asked for in; "auto" is the stored dtype, and 16 bits for weights stored in 32.
    """
    try:
        files = WeightFiles.of_model(model, revision=revision)
    except ValueError:  # files of other names, or something that the engine's own start will name
        return weights_bytes(model, revision=revision)
    if dtype != "auto":
        return files.bytes_in(getattr(torch, dtype))
    return files.bytes_in(torch.bfloat16) if files.first_float_dtype() == torch.float32 else files.total_bytes
