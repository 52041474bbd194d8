"""Capability: the chance c* that a sampled response to a question is right, from answers or from counts.

It belongs to a question, a model and a way of sampling; *confidence* belongs to one response. Numbers of samples and of
right ones may be sequences, NumPy arrays or tensors of any shapes that broadcast; everything is computed in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, Integers, as_counts, as_rates


def agreeing_pairs(answers: Sequence[str | None]) -> float | None:
    """Compute the share of pairs of responses to one question that give the same answer, in [0, 1].

    ``sum_a n_a (n_a - 1) / (k (k - 1))`` with n_a of the k responses giving answer a: the unbiased estimate of the
    chance that two samples agree. It needs no label, and stands in for c* where wrong answers scatter. Where a model is
    consistently wrong it is too high: compare its mean with that of c* on any sample whose answers are known.

    Args:
        answers: The k answers; None where a response could not be read. It agrees with nothing but counts in k.

    Returns:
        The share; None for fewer than two responses.

    Example:
        >>> agreeing_pairs(["7", "7", "7", "8"]), agreeing_pairs(["7", None]), agreeing_pairs(["7"])
        (0.5, 0.0, None)
    """
    size = len(answers)
    if size < 2:
        return None
    pairs = sum(count * (count - 1) for count in _votes(answers).values())
    return pairs / (size * (size - 1))


def top_share(answers: Sequence[str | None]) -> float | None:
    """Compute the share of responses that give the most frequent answer, in [0, 1]: response consistency.

    It is at least 1/k wherever an answer could be read, so it is biased upwards for small k; see ``agreeing_pairs``.

    Args:
        answers: The k answers; None where a response could not be read. It is no answer but counts in k.

    Returns:
        The share; None without responses.

    Example:
        >>> top_share(["7", "7", "8", None]), top_share([None]), top_share([])
        (0.5, 0.0, None)
    """
    return max(_votes(answers).values(), default=0) / len(answers) if answers else None


def expected_accuracy(num_samples: Array, num_correct: Array) -> Floats:
    """Compute the share of right samples, the plain estimate of c*, in [0, 1].

    Args:
        num_samples: n [...], at least 1 each.
        num_correct: c of them were right [...].

    Raises:
        ValueError: If a count is not whole, n is 0, or c is above n.

    Example:
        >>> expected_accuracy([4, 10], [1, 10]).tolist()
        [0.25, 1.0]
    """
    samples, correct = checked_counts(num_samples, num_correct)
    return np.asarray(correct / samples)


def pass_at_k(num_samples: Array, num_correct: Array, k: Array | int) -> Floats:
    """Estimate the chance that at least one of k sampled responses is right, without bias, in [0, 1].

    ``1 - C(n - c, k) / C(n, k)``: the chance that k of the n samples, drawn without replacement, hold a right one.

    Args:
        num_samples: n [...], at least 1 each.
        num_correct: c of them were right [...].
        k: Number of draws, at most n; a number or [...]. Nothing is found with 0.

    Returns:
        Chances, of the shape that the three broadcast to.

    Raises:
        ValueError: If a count is not whole, c is above n, or k is above n.

    Example:
        >>> pass_at_k([4, 4, 4], [0, 1, 3], 2).round(6).tolist()  # C(3, 2) / C(4, 2) = 1 / 2
        [0.0, 0.5, 1.0]

    Reference:
        Chen et al., Evaluating Large Language Models Trained on Code, arXiv 2107.03374, equation 1.
    """
    samples, correct = checked_counts(num_samples, num_correct)
    draws = as_counts(k, "k")
    samples, correct, draws = np.broadcast_arrays(samples, correct, draws)
    if (draws > samples).any():
        n, most = int(samples[draws > samples].flat[0]), int(draws[draws > samples].flat[0])
        raise InputError(
            f"Expected `k` to be at most the number of samples, but got k = {most} for {n}. "
            "Sample more responses, or estimate c* and use `simulated_pass_at_k`."
        )
    # The chance of k wrong draws is prod_{j < k} (1 - c / (n - j)): no overflow, and small chances keep digits.
    step = np.arange(int(draws.max(initial=0)))
    share = correct[..., None] / np.maximum(samples[..., None] - step, 1)
    with np.errstate(divide="ignore"):
        logs = np.log1p(-np.minimum(share, 1.0))
    return np.abs(np.expm1(np.where(step < draws[..., None], logs, 0.0).sum(axis=-1)))


def simulated_pass_at_k(p: Array, k: Array | int) -> Floats:
    """Compute ``1 - (1 - p)^k``, the chance that one of k samples is right where each is with chance p, in [0, 1].

    It holds for a known p. Of an *estimate* of p it is too high for k > 1 (Jensen): see ``beta_pass_at_k``.

    Args:
        p: Chances [...].
        k: Number of samples, at least 0; a number or [...].

    Raises:
        ValueError: If p lies outside [0, 1], or k is negative or not whole.

    Example:
        >>> simulated_pass_at_k([0.0, 0.5, 1.0], 2).tolist()
        [0.0, 0.75, 1.0]
    """
    chances, draws = np.broadcast_arrays(as_rates(p, "p"), as_counts(k, "k"))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(draws > 0, draws * np.log1p(-chances), 0.0)
    return np.abs(np.expm1(logs))


def checked_counts(num_samples: Array, num_correct: Array) -> tuple[Integers, Integers]:
    """Return the numbers of samples and of right ones, broadcast against each other.

    Raises:
        ValueError: If a count is not whole, there is a question without samples, or with more right ones than samples.
    """
    samples = as_counts(num_samples, "num_samples")
    correct = as_counts(num_correct, "num_correct")
    samples, correct = np.broadcast_arrays(samples, correct)
    if (samples < 1).any():
        raise InputError(
            "Expected `num_samples` to be at least 1 everywhere, but got 0. "
            "Leave questions without samples out and report how many they are."
        )
    if (correct > samples).any():
        raise InputError(
            "Expected `num_correct` to be at most `num_samples`, "
            f"but got {int(correct[correct > samples].flat[0])} of {int(samples[correct > samples].flat[0])}."
        )
    return samples, correct


def _votes(answers: Sequence[str | None]) -> Counter[str]:
    """Count the readable answers."""
    return Counter(answer for answer in answers if answer is not None)
