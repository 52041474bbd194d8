"""Instance-adaptive scaling: how many samples a question needs, given the chance that one of them is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Integers, as_rates, check_positive

# As published: no question is thought easier or harder than this, so that 46,050 samples are the most.
_LEAST_P = 1e-4


def required_samples(p: Array, *, target: float = 0.99, num_paths: int = 1) -> Integers:
    """Compute how many samples it takes until one of them is right with chance ``target``.

    ``N = ceil(log(1 - target) / log(1 - p) / num_paths)``, from ``1 - (1 - p)^N >= target``.

    Args:
        p: Chance that a sample is right [...], taken as at least 1e-4 and at most 1 - 1e-4.
        target: Wanted chance, in (0, 1).
        num_paths: Among how many paths the samples are shared; N is then the number for each.

    Returns:
        Numbers of samples [...], at least 1.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> required_samples([0.9, 0.5, 0.0]).tolist()  # .1^2 = .01; .5^7 < .01 < .5^6
        [2, 7, 46050]

    Reference:
        Park et al., arXiv 2506.09338.
    """
    if not 0.0 < target < 1.0:
        raise InputError(f"Expected `target` to lie in (0, 1), but got {target}.")
    check_positive(num_paths, "num_paths")
    chances = as_rates(p, "p").clip(_LEAST_P, 1.0 - _LEAST_P)
    needed = np.log1p(-target) / np.log1p(-chances) / num_paths
    # A number of samples a billionth above a whole one is that one, so that .9 needs 2 in spite of floats.
    return np.maximum(np.ceil(needed - 1e-9), 1).astype(np.int64)


def paths_to_keep(scores: Sequence[float], *, samples_per_path: int, maximum: int, target: float = 0.99) -> int:
    """Compute how many of the best paths of a beam search are worth going on with (IAS of K).

    The smallest k for which ``k * samples_per_path`` samples are enough for the k-th best path; at most ``maximum`` and
    at most all of them.

    Args:
        scores: Chance of success of each path, in any order; a lower bound where one wants to be careful.
        samples_per_path: Samples that each kept path will get.
        maximum: Most paths to keep.
        target: Wanted chance of a right answer, in (0, 1).

    Returns:
        The number of paths; 0 without paths.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> paths_to_keep([0.9, 0.1, 0.5], samples_per_path=8, maximum=8)  # 8 samples suffice at .9, which needs 2
        1

    Reference:
        Park et al., arXiv 2506.09338.
    """
    check_positive(samples_per_path, "samples_per_path")
    check_positive(maximum, "maximum")
    needed = required_samples(np.sort(as_rates(np.asarray(scores, dtype=np.float64), "scores"))[::-1], target=target)
    for k, samples in enumerate(needed[:maximum].tolist(), start=1):
        if k * samples_per_path >= samples:
            return k
    return min(len(needed), maximum)


def samples_per_path(kept_scores: Sequence[float], *, num_paths: int, maximum: int, target: float = 0.99) -> int:
    """Compute how many samples each kept path of a beam search needs (IAS of M).

    ``min(ceil(N / num_paths), maximum)`` with N what the worst kept path needs, as published.

    Args:
        kept_scores: Chance of success of each kept path, in any order.
        num_paths: Among how many paths the samples are shared. The published code takes the most that may be kept, also
            where fewer are; their number shares them as they are.
        maximum: Most samples of a path.
        target: Wanted chance of a right answer, in (0, 1).

    Returns:
        Samples of each kept path, at least 1; 0 without paths.

    Raises:
        ValueError: If a value is out of its range.

    Example:
        >>> samples_per_path([0.9, 0.5], num_paths=2, maximum=8)  # .5 needs 7, which is 4 for each of 2
        4
    """
    check_positive(maximum, "maximum")
    scores = as_rates(np.asarray(kept_scores, dtype=np.float64), "kept_scores")
    if not scores.size:
        return 0
    wanted = float(required_samples(scores.min(), target=target, num_paths=num_paths))
    return int(min(wanted, float(maximum)))
