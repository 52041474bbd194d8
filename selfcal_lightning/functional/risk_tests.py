"""Tests of "the error rate exceeds a bound": p-values, and procedures that reject many at once.

:mod:`selfcal_lightning.functional.risk_control` says why they are valid for the error rate among answered questions.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, check_positive

Procedure = Literal["fixed_sequence", "bonferroni"]


def binomial_p_value(num_wrong: Array, num_answered: Array, *, risk: float) -> Floats:
    """Compute ``P(Bin(num_answered, risk) <= num_wrong)``, the exact p-value of "the error rate exceeds ``risk``".

    Args:
        num_wrong: Wrong answers [...].
        num_answered: Answered questions [...]; 0 gives 1.
        risk: The error rate tested, in (0, 1).

    Example:
        >>> binomial_p_value([0, 1], [2, 2], risk=0.5).tolist()  # .25; .25 + .5
        [0.25, 0.75]
    """
    from scipy.special import bdtr

    check_rate(risk, "risk")
    wrong, answered = np.asarray(num_wrong, dtype=np.float64), np.asarray(num_answered, dtype=np.int64)
    return np.asarray(np.where(answered > 0, bdtr(np.minimum(wrong, answered), np.maximum(answered, 1), risk), 1.0))


def hoeffding_bentkus_p_value(mean_loss: Array, num_answered: Array, *, risk: float) -> Floats:
    """Compute a p-value of "the mean of losses in [0, 1] exceeds ``risk``"; for 0-1 losses the binomial one is better.

    ``min(exp(-n h(min(m, risk), risk)), e P(Bin(n, risk) <= ceil(n m)))`` with m the mean loss, n the number of losses
    and ``h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b))``.

    Args:
        mean_loss: m [...], in [0, 1]; what it is without losses does not matter.
        num_answered: n [...]; 0 gives 1.
        risk: The mean tested, in (0, 1).

    Example:
        >>> round(float(hoeffding_bentkus_p_value(0.0, 4, risk=0.5)), 4)  # .5 ** 4, which e times it exceeds
        0.0625

    Reference:
        Angelopoulos et al., arXiv 2110.01052, proposition 1; Bates et al., arXiv 2101.02703, section 3.1.
    """
    from scipy.special import bdtr, rel_entr

    check_rate(risk, "risk")
    n = np.asarray(num_answered, dtype=np.int64)
    mean = np.where(n > 0, np.asarray(mean_loss, dtype=np.float64), 1.0)
    low = np.minimum(mean, risk)
    hoeffding = np.exp(-n * (rel_entr(low, risk) + rel_entr(1.0 - low, 1.0 - risk)))
    # A mean such as 3 / 10 comes back as 3.0000000000000004 when multiplied by ten: that is 3 and not 4.
    bentkus = math.e * bdtr(np.minimum(np.ceil(n * mean - 1e-9), n), np.maximum(n, 1), risk)
    return np.asarray(np.where(n > 0, np.minimum(np.minimum(hoeffding, bentkus), 1.0), 1.0))


def reject(p_values: Array, *, delta: float, procedure: Procedure, num_starts: int = 1) -> NDArray[np.bool_]:
    """Return which hypotheses are rejected [G], with a chance of at most ``delta`` to reject any true one.

    "bonferroni" tests each at ``delta / G``. "fixed_sequence" goes through them in their order, each at the full
    ``delta``, and stops at the first that is not rejected; with several starts, spread evenly, each start goes on its
    own way at ``delta / num_starts``.

    Args:
        p_values: G p-values in the order of testing, which must not depend on the data that they come from.
        delta: Chance, in (0, 1).
        procedure: How to pay for testing many.
        num_starts: Starts of the fixed sequence.

    Example:
        >>> reject([0.01, 0.04, 0.2, 0.01], delta=0.05, procedure="fixed_sequence").tolist()
        [True, True, False, False]
        >>> reject([0.01, 0.04, 0.2, 0.01], delta=0.05, procedure="bonferroni").tolist()
        [True, False, False, True]

    Reference:
        Angelopoulos et al., arXiv 2110.01052, section 2.3 and algorithm 1.
    """
    check_rate(delta, "delta")
    check_positive(num_starts, "num_starts")
    values = np.asarray(p_values, dtype=np.float64)
    if procedure == "bonferroni":
        return np.asarray(values <= delta / max(len(values), 1))
    if procedure != "fixed_sequence":
        raise InputError(f'Expected `procedure` to be "fixed_sequence" or "bonferroni", but got {procedure!r}.')
    starts = start_positions(len(values), num_starts)
    passes = values <= delta / max(len(starts), 1)
    rejected = np.zeros(len(values), dtype=bool)
    for start in starts:
        rejected[start:] |= np.logical_and.accumulate(passes[start:])
    return rejected


def start_positions(num_thresholds: int, num_starts: int) -> NDArray[np.int64]:
    """Return where the chains of a fixed sequence begin, spread evenly."""
    starts = min(num_starts, num_thresholds)
    return np.arange(starts) * num_thresholds // max(starts, 1)


def selective_counts(confidence: Floats, loss: Floats, thresholds: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return the number of answered questions [G] and the sum of their losses [G] at each threshold (``>=``).

    Example:
        >>> selective_counts(np.array([0.2, 0.8, 0.5]), np.array([1.0, 0.0, 1.0]), np.array([0.5, 0.0]))
        (array([2, 3]), array([1., 2.]))
    """
    order = np.argsort(confidence, kind="stable")
    below = np.searchsorted(confidence[order], thresholds, side="left")
    from_here = np.append(np.cumsum(loss[order][::-1])[::-1], 0.0)
    return len(confidence) - below, from_here[below]


def check_rate(value: float, name: str) -> None:
    """Raise ValueError unless ``value`` lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise InputError(f"Expected `{name}` to lie in (0, 1), but got {value}.")
