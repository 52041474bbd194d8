"""How much of a GPU an engine may take while a trainer lives on it."""

from __future__ import annotations

import math

from selfcal_lightning.errors import InputError

FREE_SHARE = 0.95  # the rest is for what the driver and the engine's process need outside their own accounts
LEAST_CACHE_SHARE = 0.02
MOST = 0.9


def memory_share(free: int, total: int, *, weights: int, limit: float | None = None) -> float:
    """Return the share of a GPU's memory for an engine beside the trainer, rounded down to hundredths.

    ``min(limit or 0.9, 0.95 * free / total)``.

    Args:
        free: Bytes that are free now that the trainer's cache is emptied.
        total: Bytes of the GPU.
        weights: Bytes of the model that the engine will load.
        limit: The user's ``gpu_memory_utilization``, the most that may be taken; None is 0.9.

    Raises:
        ValueError: The share does not hold the weights and a cache of 2 % of the GPU.

    Example:
        >>> memory_share(60 << 30, 80 << 30, weights=16 << 30)
        0.71
        >>> memory_share(60 << 30, 80 << 30, weights=16 << 30, limit=0.5)
        0.5
    """
    share = math.floor(100 * min(MOST if limit is None else limit, FREE_SHARE * free / total)) / 100
    least = weights / total + LEAST_CACHE_SHARE
    if share < least:
        gib = 2.0**30
        raise InputError(
            f"Expected `gpu_memory_utilization` times {total / gib:.1f} GiB to hold the engine's weights "
            f"({weights / gib:.1f} GiB) and a cache beside the trainer, that is at least {least:.2f}, but got "
            f"{share:.2f}: {free / gib:.1f} GiB are free and `gpu_memory_utilization` is {limit}. Raise it if it is "
            "the bound; else lower the trainer's memory (batch size, gradient checkpointing), or set "
            "`engine: transformers`, which samples with the trainer's own weights."
        )
    return share
