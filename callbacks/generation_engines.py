"""The engines that ``SSCGeneration`` starts: over the base model before training, and beside the trainer later."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.fingerprints import weights_bytes, weights_sha256
from selfcal_lightning.locations import resolve_model
from selfcal_lightning.models.weight_files import WeightFiles
from selfcal_lightning.modules.self_calibration import SelfCalibrationModule
from selfcal_lightning.pipelines.engine_memory import memory_share
from selfcal_lightning.prompts import ChatFormat


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Arguments of ``SSCGeneration`` that concern the engine; see there."""

    engine: str
    dtype: str
    max_batch: int | None
    gpu_memory_utilization: float | None


def start_engine(
    settings: EngineSettings,
    model: str,
    chat: ChatFormat,
    *,
    revision: str | None,
    device: torch.device,
    adapter: str | None = None,
) -> Engine:
    """Start an engine of its own on ``device``.

    Args:
        settings: Which engine, and how large.
        model: Folder or hub name of the model, "bundled" already resolved.
        chat: Renders prompts and the confidence query.
        revision: Revision on the hub.
        device: Where to.
        adapter: Folder of a LoRA adapter.
    """
    common: dict[str, Any] = {"revision": revision, "adapter": adapter, "chat": chat}
    if settings.engine == "vllm":
        from selfcal_lightning.engines.vllm import VLLMEngine

        if settings.max_batch is not None:
            common["max_num_seqs"] = settings.max_batch
        return VLLMEngine(
            model,
            dtype=None if settings.dtype == "auto" else settings.dtype,
            devices=[device.index] if device.type == "cuda" else None,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            **common,
        )
    from selfcal_lightning.engines.transformers import TransformersEngine

    if settings.max_batch is not None:
        common["max_batch"] = settings.max_batch
    return TransformersEngine(model, dtype=settings.dtype, device=str(device), **common)


def start_round_engine(
    settings: EngineSettings, module: SelfCalibrationModule, chat: ChatFormat, *, adapter: str, device: torch.device
) -> Engine:
    """Start the engine of a later round, beside the trainer on the same device.

    The transformers engine runs the trainer's own model, unless it is asked for another dtype; then it loads the base
    model once more. vLLM runs in a new process, so that nothing of an earlier adapter is left in its cache.

    Args:
        settings: Which engine, and how large.
        module: The module, its model holding the adapter of the round.
        chat: Renders prompts and the confidence query.
        adapter: Folder of that adapter.
        device: Where to.

    Raises:
        ValueError: vLLM would not have enough of the GPU's memory.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = resolve_model(module.base_model)
    own_dtype = str(module.model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    if settings.engine == "transformers" and settings.dtype in ("auto", own_dtype):
        from selfcal_lightning.engines.transformers import TransformersEngine

        size = {} if settings.max_batch is None else {"max_batch": settings.max_batch}
        return TransformersEngine.from_model(
            module.model,
            chat,
            source=model,
            revision=module.revision,
            adapter_sha256=weights_sha256(adapter),
            quantization=module.quantization,
            **size,
        )
    if settings.engine == "vllm" and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        weights = engine_weights_bytes(model, revision=module.revision, dtype=settings.dtype)
        share = memory_share(free, total, weights=weights, limit=settings.gpu_memory_utilization)
        settings = EngineSettings(settings.engine, settings.dtype, settings.max_batch, share)
    return start_engine(settings, model, chat, revision=module.revision, device=device, adapter=adapter)


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
