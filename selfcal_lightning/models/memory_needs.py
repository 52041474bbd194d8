"""What a model takes in memory, told from the headers of its files: no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from selfcal_lightning.errors import UserError
from selfcal_lightning.model_files.locations import INDEX, WHOLE, model_folder
from selfcal_lightning.models.weight_files import WeightFiles

# Float32 values, gradients and two moments; with 8-bit moments two bytes instead of eight.
BYTES_PER_TRAINED = {"adamw": 16, "paged_adamw": 16, "adamw_8bit": 10, "paged_adamw_8bit": 10}
NF4_BYTES = 0.53  # four bits, and a share of the scales
NOT_QUANTISED = ("embed", "lm_head", "norm")


def files_on_this_disk(model: str, *, revision: str | None = None) -> WeightFiles | None:
    """Return the headers of a model that lies here, in a folder or in the hub's cache; None where it does not."""
    try:
        folder = model_folder(model, revision=revision, download=False)
        return WeightFiles.of_model(str(folder)) if any((folder / n).is_file() for n in (WHOLE, INDEX)) else None
    except (OSError, UserError):
        return None


def frozen_bytes(files: WeightFiles, *, dtype: Literal["auto", "float32", "bfloat16"], nf4: bool) -> int:
    """Return the bytes of the base weights in memory.

    Args:
        files: The stored weights.
        dtype: What they are held in; "auto" is as they are stored.
        nf4: Whether linear layers are held in four bits.
    """
    held = files.total_bytes if dtype == "auto" else files.bytes_in(getattr(torch, dtype))
    if not nf4:
        return held
    linear = sum(_numel(files, name) * files.dtype(name).itemsize for name in files.names if _is_linear(files, name))
    numbers = sum(_numel(files, name) for name in files.names if _is_linear(files, name))
    return files.total_bytes - linear + round(numbers * NF4_BYTES)


def adapter_numbers(files: WeightFiles, *, r: int, target_modules: Sequence[str]) -> int:
    """Return how many numbers a LoRA adapter of rank ``r`` trains: r (in + out) for each layer that it is put on."""
    targets = tuple(f".{name}.weight" for name in target_modules)
    shapes = [files.shape(name) for name in files.names if f".{name}".endswith(targets)]
    return sum(r * sum(shape) for shape in shapes if len(shape) == 2)


def all_numbers(files: WeightFiles) -> int:
    """Return how many numbers the model has."""
    return sum(_numel(files, name) for name in files.names)


def _is_linear(files: WeightFiles, name: str) -> bool:
    return len(files.shape(name)) == 2 and not any(part in name for part in NOT_QUANTISED)


def _numel(files: WeightFiles, name: str) -> int:
    return int(torch.Size(files.shape(name)).numel())
