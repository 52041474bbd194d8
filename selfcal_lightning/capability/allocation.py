"""Allocating samples to questions, so that as many as possible get at least one right sample.

Each sample goes where the chance that it is the *first* right one is largest. These gains fall with every sample of a
question, so the greedy choice is optimal. It assumes a verifier that recognises a right answer, not a majority vote.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Integers, as_counts, as_labels, as_rates, as_scores

# Keeps questions that are thought hopeless or certain apart from those that are full.
_LEAST_P = 1e-6


def greedy_allocation(p: Array, total: int, *, minimum: int = 0, maximum: int) -> Integers:
    """Allocate samples that are right with probability p: the gain of sample k + 1 is ``p (1 - p)^k``."""
    chances = as_rates(p, "p").clip(_LEAST_P, 1.0 - _LEAST_P).tolist()
    return _shared(lambda i, k: chances[i] * (1.0 - chances[i]) ** k, len(chances), total, minimum, maximum)


def beta_allocation(right: Array, wrong: Array, total: int, *, minimum: int = 0, maximum: int) -> Integers:
    """Allocate samples where the probability of each question is known as Beta(a, b).

    The gain of sample k + 1 is ``E theta (1 - theta)^k = B(a + 1, b + k) / B(a, b)``. At first it falls faster than
    ``p (1 - p)^k``, since a failure also shows that a question is hard, and then more slowly.
    """
    a, b = as_scores(right, "right")[:, None], as_scores(wrong, "wrong")[:, None]
    step = np.arange(max(maximum - 1, 0))
    ratios = np.log(b + step) - np.log(a + b + step + 1.0)  # logs do not underflow to ties
    start = np.log(a) - np.log(a + b)
    log_gain = np.concatenate([start, start + np.cumsum(ratios, axis=1)], axis=1)
    return _shared(lambda i, k: float(log_gain[i, k]), len(a), total, minimum, maximum)


def interpolated_allocation(first: Array, second: Array, weight: float) -> Integers:
    """Mix two allocations of the same total: ``weight * first + (1 - weight) * second`` in whole samples."""
    one, two = as_counts(first, "first"), as_counts(second, "second")
    return round_to_total(weight * one + (1.0 - weight) * two, int(one.sum()))


def round_to_total(values: Array, total: int) -> Integers:
    """Round to whole numbers with a given sum: down first, then up where the largest fractions were cut off."""
    shares = as_scores(values, "values")
    # A share a billionth below a whole number is one, in spite of floats.
    whole = np.floor(shares + 1e-9)
    short = total - int(whole.sum())
    whole[np.argsort(whole - shares, kind="stable")[:short]] += 1.0
    return whole.astype(np.int64)


def sequential_allocation(
    outcomes: Sequence[Array], total: int, *, right: Array | float = 1.0, wrong: Array | float = 1.0
) -> tuple[Integers, NDArray[np.bool_]]:
    """Draw recorded samples one at a time, each verified at once, from the likeliest unsolved question.

    A question has the posterior mean ``a / (a + b + failures)`` until its first right sample. Returns the samples drawn
    of each question, and whether one was right [Q].
    """
    rows = [as_labels(row, "outcomes") for row in outcomes]
    a, b = (np.broadcast_to(np.asarray(values, dtype=np.float64), len(rows)) for values in (right, wrong))
    most = [int(row.argmax()) + 1 if row.any() else len(row) for row in rows]  # none is drawn after a right one
    drawn = _of_largest(lambda i, failures: a[i] / (a[i] + b[i] + failures), most, total)
    return drawn, np.array([row[:number].any() for row, number in zip(rows, drawn, strict=True)], dtype=bool)


def _shared(gain: Callable[[int, int], float], size: int, total: int, minimum: int, maximum: int) -> Integers:
    """Give ``minimum`` to every question, and the rest one by one where ``gain(question, given)`` is largest."""
    if not 0 <= minimum <= maximum:
        raise InputError(f"Expected `minimum` to lie between 0 and `maximum` = {maximum}, but got {minimum}.")
    if (left := total - minimum * size) < 0:
        raise InputError(f"Expected `total` to be at least {minimum} for each of {size} questions, but got {total}.")
    return minimum + _of_largest(lambda i, given: gain(i, minimum + given), [maximum - minimum] * size, left)


def _of_largest(gain: Callable[[int, int], float], most: Sequence[int], number: int) -> Integers:
    """Give one by one where ``gain(question, given)``, which falls, is largest, to each question at most ``most``."""
    given = [0] * len(most)
    queue = [(-gain(i, 0), i) for i, limit in enumerate(most) if limit]
    heapq.heapify(queue)
    for _ in range(min(number, sum(most))):
        _, i = heapq.heappop(queue)
        given[i] += 1
        if given[i] < most[i]:
            heapq.heappush(queue, (-gain(i, given[i]), i))
    return np.array(given, dtype=np.int64)
