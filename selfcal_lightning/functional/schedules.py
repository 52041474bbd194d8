"""Learning-rate schedules as plain functions of the optimiser step."""

from __future__ import annotations

import math


def cosine_with_warmup(step: int, *, total: int, warmup: int) -> float:
    """Return the factor of the learning rate at an optimiser step, in [0, 1].

    Linear from ``1 / (warmup + 1)`` at step 0 to 1 at step ``warmup``, then half a cosine to 0 at ``total``.

    Args:
        step: Optimiser step, from 0.
        total: Optimiser steps of the training; where it is no more than ``warmup``, the factor never reaches 1.
        warmup: Optimiser steps of the warm-up.

    Example:
        >>> [cosine_with_warmup(step, total=4, warmup=0) for step in (0, 2, 4)]
        [1.0, 0.5, 0.0]
        >>> cosine_with_warmup(0, total=4, warmup=1)
        0.5
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min((step - warmup) / max(total - warmup, 1), 1.0)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear_with_warmup(step: int, *, total: int, warmup: int) -> float:
    """Return the factor of the learning rate at an optimiser step, in [0, 1].

    Linear from ``1 / (warmup + 1)`` at step 0 to 1 at step ``warmup``, then linear to 0 at ``total``.

    Args:
        step: Optimiser step, from 0.
        total: Optimiser steps of the training.
        warmup: Optimiser steps of the warm-up.

    Example:
        >>> [linear_with_warmup(step, total=4, warmup=0) for step in (0, 1, 4)]
        [1.0, 0.75, 0.0]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return 1.0 - min((step - warmup) / max(total - warmup, 1), 1.0)
