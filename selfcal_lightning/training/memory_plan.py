"""The memory that a module's model needs, computed before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from selfcal_lightning.core.plan import Memory
from selfcal_lightning.models import sharded_loading
from selfcal_lightning.models.folders import load_config
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.settings import AdapterSettings, MemorySettings

MEMORY_FILE = Path("/proc/meminfo")
KIB = 1024


def name_model(base_model: str, lora: LoraSettings | None, auxiliary: Sequence[str]) -> str:
    what = "all weights" if lora is None else f"LoRA of rank {lora.r} on {', '.join(lora.target_modules)}"
    return f"{base_model}, {what}" + (f", with auxiliary {', '.join(auxiliary)}" if auxiliary else "")


def plan_memory(
    adapter: AdapterSettings,
    memory: MemorySettings,
    *,
    trains: bool,
    device: torch.device,
    adapters: int = 1,
    shards: int = 1,
    rows: RowSizes | None = None,
) -> Memory:
    """Return the least memory that the model and its training take in each of ``shards`` FSDP2 processes."""
    available, name = available_bytes(device), "CPU" if device.type == "cpu" else "GPU"
    dtype, lora, nf4 = adapter.dtype_on(device), adapter.lora, memory.quantization is not None
    files = sharded_loading.files_on_this_disk(adapter.base_model, revision=adapter.revision)
    if files is None:
        return Memory(None, None, available, name, processes=shards)
    each = sharded_loading.BYTES_PER_TRAINED[memory.optimizer] if trains else 4
    if lora is None:
        trained = (each - 4) * sharded_loading.all_numbers(files)
    else:
        numbers = sharded_loading.adapter_numbers(files, r=lora.r, target_modules=lora.target_modules)
        trained = adapters * each * numbers
    kept = activation_bytes(adapter, rows, memory, dtype=dtype) if trains and rows is not None else None
    weights = sharded_loading.frozen_bytes(files, dtype=dtype, nf4=nf4)
    return Memory(weights // shards, trained // shards, available, name, kept, shards)


@dataclass(frozen=True)
class RowSizes:
    """Tokens of a micro-batch: ``read`` in all, of which ``trained`` have the adapter on."""

    read: int
    trained: int


def activation_bytes(adapter: AdapterSettings, rows: RowSizes, memory: MemorySettings, *, dtype: str) -> int | None:
    """Return the bytes kept for the backward pass; None for unusual configurations.

    For a token that the adapter acts on, a layer keeps about 8 numbers of the hidden size and 4 of the intermediate
    size (5.8 MB a token of an 8B model in bfloat16, counted with a fake process group); with recomputation, only its
    input. Other tokens cost keys and values.
    """
    config: Any = load_config(adapter.base_model, revision=adapter.revision).get_text_config()
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    sizes = [getattr(config, name, None) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    layers, hidden, intermediate, heads = cast(list[int], sizes)
    whole = 8 * hidden + 4 * intermediate
    groups = getattr(config, "num_key_value_heads", None) or heads
    keys = 2 * groups * (getattr(config, "head_dim", None) or hidden // heads)
    each_token = layers * hidden + whole if memory.gradient_checkpointing else layers * whole
    width = 4 if dtype == "float32" else 2
    return width * (rows.trained * each_token + (rows.read - rows.trained) * layers * keys)


def available_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    if not MEMORY_FILE.is_file():
        return None
    lines = (line.split() for line in MEMORY_FILE.read_text().splitlines())
    return next((int(words[1]) * KIB for words in lines if words[0] == "MemAvailable:"), None)
