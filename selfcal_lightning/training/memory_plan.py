"""What a module's model takes, told before it is loaded, and what its libraries would refuse once it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from selfcal_lightning.core.plan import Memory
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.sharded_loading import (
    BYTES_PER_TRAINED,
    adapter_numbers,
    all_numbers,
    files_on_this_disk,
    frozen_bytes,
)
from selfcal_lightning.training.settings import AdapterSettings, MemorySettings

MEMORY_FILE = Path("/proc/meminfo")
KIB = 1024


def name_model(base_model: str, lora: LoraSettings | None, beside: Sequence[str]) -> str:
    """Return what is trained, in a line.

    Example:
        >>> name_model("org/m", LoraSettings(r=4, target_modules=("q_proj",)), ["votes"])
        'org/m, LoRA of rank 4 on q_proj, and votes beside it'
    """
    what = "all weights" if lora is None else f"LoRA of rank {lora.r} on {', '.join(lora.target_modules)}"
    return f"{base_model}, {what}" + (f", and {', '.join(beside)} beside it" if beside else "")


def plan_memory(
    adapter: AdapterSettings, memory: MemorySettings, *, trains: bool, device: torch.device, adapters: int = 1
) -> Memory:
    """Return the bytes that the model and its training take at least, with so many adapters."""
    available, name = available_bytes(device), "CPU" if device.type == "cpu" else "GPU"
    dtype, lora, nf4 = adapter.torch_dtype, adapter.lora, memory.quantization is not None
    files = files_on_this_disk(adapter.base_model, revision=adapter.revision)
    if files is None:
        return Memory(None, None, available, name)
    held: Literal["auto", "float32", "bfloat16"] = dtype
    if dtype == "auto" and (lora is None or device.type == "cpu"):
        held = "float32"
    each = BYTES_PER_TRAINED[memory.optimizer] if trains else 4
    if lora is None:
        return Memory(frozen_bytes(files, dtype=held, nf4=nf4), (each - 4) * all_numbers(files), available, name)
    numbers = adapter_numbers(files, r=lora.r, target_modules=lora.target_modules)
    return Memory(frozen_bytes(files, dtype=held, nf4=nf4), adapters * each * numbers, available, name)


def available_bytes(device: torch.device) -> int | None:
    """Return the bytes that are free on a device now; None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    if not MEMORY_FILE.is_file():
        return None
    lines = (line.split() for line in MEMORY_FILE.read_text().splitlines())
    return next((int(words[1]) * KIB for words in lines if words[0] == "MemAvailable:"), None)
