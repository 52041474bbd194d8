"""Saving and restoring the global random states of all processes; a separate stream for dropout.

The project's own draws are keyed (rows by seed and epoch, dropout by seed, epoch, batch and rank, samples by seed,
round and question) and do not need this. It is for user code, such as a callback with noise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's global generators, as tensors and plain values."""
    version, numbers, normal = random.getstate()
    legacy: Any = np.random.get_state()
    name, key, position, has_normal, cached = legacy
    states: dict[str, Any] = {
        "python": [version, list(numbers), normal],
        "numpy": [str(name), torch.from_numpy(key.astype(np.int64)), int(position), int(has_normal), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, normal = states["python"]
    random.setstate((version, tuple(numbers), normal))
    name, key, position, has_normal, cached = states["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), position, has_normal, cached))
    torch.set_rng_state(states["torch"].cpu())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].cpu(), device)


def gather_random_states(device: torch.device) -> list[dict[str, Any]]:
    """Return the states of every process, by rank. A collective: all processes must call it."""
    mine = random_states(device)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [mine]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, mine)
    return states


@contextmanager
def dropout_stream(seed: int, epoch: int, batch_idx: int, rank: int, *, device: torch.device) -> Iterator[None]:
    """Draw dropout from (seed, epoch, batch, rank), so that a resumed run equals an uninterrupted one."""
    key = f"dropout/{seed}/{epoch}/{batch_idx}/{rank}"
    derived = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived)
        yield
