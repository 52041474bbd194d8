"""Saving and restoring the global random states of all processes; a separate stream for dropout.

The project's own draws are keyed (rows by seed and epoch, dropout by seed, epoch, batch and rank, samples by seed,
round and question) and do not need this. It is for user code, such as a callback with noise.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from selfcal_lightning.training.checkpoints import check_training_state
from selfcal_lightning.training.model_parallel import begin_epoch_after_whole_one

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
    """Restore the global generators to ``states``."""
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


def restore_of_rank(states: Sequence[Mapping[str, Any]], rank: int, world_size: int, device: torch.device) -> None:
    """Restore this process's states, unless the number of processes has changed."""
    if len(states) == world_size:
        restore_random_states(states[rank], device)


@contextmanager
def dropout_stream(seed: int, epoch: int, batch_idx: int, rank: int, *, device: torch.device) -> Iterator[None]:
    """Draw dropout from (seed, epoch, batch, rank), so that a resumed run equals an uninterrupted one."""
    key = f"dropout/{seed}/{epoch}/{batch_idx}/{rank}"
    derived = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(derived)
        yield


RANDOM_KEY = "random_states"


class ResumeState:
    """Carries random states through checkpoints and corrects an epoch counter of Lightning."""

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] | None = None

    def save(self, checkpoint: dict[str, Any], trainer: Trainer | None) -> None:
        """Add the random states of all processes. A collective, as writing a checkpoint is."""
        if trainer is None:
            return
        checkpoint[RANDOM_KEY] = gather_random_states(trainer.strategy.root_device)

    def load(self, checkpoint: dict[str, Any], trainer: Trainer | None) -> None:
        """Keep the random states until training starts; refuse to resume from weights alone."""
        if trainer is None or trainer.state.fn != "fit":
            return
        check_training_state(checkpoint)
        self._states = checkpoint.get(RANDOM_KEY)

    def start(self, trainer: Trainer) -> None:
        """Restore the states of the checkpoint. Call it after everything that comes before the first batch."""
        if self._states is not None:
            restore_of_rank(self._states, trainer.global_rank, trainer.world_size, trainer.strategy.root_device)
            self._states = None
        begin_epoch_after_whole_one(trainer)
