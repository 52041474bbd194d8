"""The memory that a module's model needs, computed before it is loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from selfcal_lightning.core.plan import Memory
from selfcal_lightning.models.causal_lm import WeightFiles
from selfcal_lightning.models.folders import load_config
from selfcal_lightning.training.settings import AdapterSettings, MemorySettings

MEMORY_FILE = Path("/proc/meminfo")
# Float32 values, gradients and two moments; with 8-bit moments two bytes instead of eight.
BYTES_PER_TRAINED = {"adamw": 16, "paged_adamw": 16, "adamw_8bit": 10, "paged_adamw_8bit": 10}
NF4_BYTES = 0.53  # four bits, and a share of the scales
NOT_QUANTISED = ("embed", "lm_head", "norm")


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
    dtype, lora = adapter.dtype_on(device), adapter.lora
    files = WeightFiles.on_this_disk(adapter.base_model, revision=adapter.revision)
    if files is None:
        return Memory(None, None, available, name, processes=shards)
    each = BYTES_PER_TRAINED[memory.optimizer] if trains else 4
    if lora is None:
        trained = (each - 4) * files.num_weights
    else:
        targets = tuple(f".{name}.weight" for name in lora.target_modules)
        shapes = [files.shape(name) for name in files.names if f".{name}".endswith(targets)]
        numbers = sum(lora.r * sum(shape) for shape in shapes if len(shape) == 2)  # r (in + out) for each layer
        trained = adapters * each * numbers
    kept = activation_bytes(adapter, rows, memory, dtype=dtype) if trains and rows is not None else None
    weights = files.total_bytes if dtype == "auto" else files.bytes_in(getattr(torch, dtype))
    if memory.quantization is not None:
        matrices = (name for name in files.names if len(files.shape(name)) == 2)
        linear = [name for name in matrices if not any(part in name for part in NOT_QUANTISED)]
        counts = [math.prod(files.shape(name)) for name in linear]
        stored = sum(count * files.dtype(name).itemsize for count, name in zip(counts, linear, strict=True))
        weights = files.total_bytes - stored + round(sum(counts) * NF4_BYTES)
    return Memory(weights // shards, trained // shards, available, name, kept, shards)


class RowSizes(NamedTuple):
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
    return next((int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:"), None)
