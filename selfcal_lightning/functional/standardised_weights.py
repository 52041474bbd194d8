"""Weights of the responses to one question by how each stands out among them: ``exp(z)`` of standardised scores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_scores, check_same_length

# Keeps equal scores apart from a division by 0: all of them then weigh the same.
_LEAST_SPREAD = 1e-9


def standardised_weights(*scores: Array) -> Floats:
    """Compute ``exp(sum_j z_j)`` with ``z = (x - mean) / (std + 1e-9)`` over the responses to one question.

    Higher scores weigh more; pass minus what should be low. The sum of the weights of equal answers is their vote.

    Args:
        scores: One score or several of each response [N]; those without one are left out.

    Returns:
        Weights, above 0 [N].

    Raises:
        ValueError: If lengths differ, a score is unknown, or there is none.

    Example:
        >>> standardised_weights([1.0, 3.0]).round(3).tolist(), standardised_weights([2.0, 2.0]).tolist()
        ([0.368, 2.718], [1.0, 1.0])

    Reference:
        The voting weights of SASC, `run_evaluation.py` of Multi-step Test-time Training with Data Selection.
    """
    if not scores:
        raise InputError("Expected at least one score of each response, but got none.")
    rows = [as_scores(row, "scores") for row in scores]
    check_same_length(**{f"scores {number}": row for number, row in enumerate(rows)})
    return np.exp(np.sum([_standardised(row) for row in rows], axis=0))


def masked_standardised_weights(scores: Floats) -> Floats:
    """Compute :func:`standardised_weights` of many questions at once, to the same bit however many there are.

    Args:
        scores: One of each response [N, Q], finite; nan where there is none.

    Returns:
        Weights [N, Q]; 0 where there is no score.

    Example:
        >>> masked_standardised_weights(np.array([[1.0, 2.0], [3.0, np.nan]])).round(3).tolist()
        [[0.368, 1.0], [2.718, 0.0]]
    """
    is_known = ~np.isnan(scores)
    values, count = np.where(is_known, scores, 0.0), np.maximum(is_known.sum(axis=0), 1)
    # Summed response by response: a mean in another order may differ in its last bit, and turn a tie.
    distance = np.where(is_known, values - _summed(values) / count, 0.0)
    spread = np.sqrt(_summed(distance**2) / count)
    return np.where(is_known, np.exp(distance / (spread + _LEAST_SPREAD)), 0.0)


def lowest_share(values: Array, share: float = 0.8) -> NDArray[np.bool_]:
    """Return which responses have a value of at most the quantile ``share`` of those to the question [N].

    Args:
        values: One of each response [N].
        share: In (0, 1].

    Raises:
        ValueError: If ``share`` is out of its range.

    Example:
        >>> lowest_share([0.5, 0.1, 0.9, 0.2, 0.3], 0.8).tolist()
        [True, True, False, True, True]
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"Expected `share` to lie in (0, 1], but got {share}.")
    row = as_scores(values, "values")
    return np.asarray(row <= np.quantile(row, share)) if len(row) else np.zeros(0, dtype=bool)


def _standardised(row: Floats) -> Floats:
    return (row - row.mean()) / (row.std() + _LEAST_SPREAD) if len(row) else row


def _summed(rows: Floats) -> Floats:
    total: Floats = np.zeros(rows.shape[1])
    for row in rows:
        total = total + row
    return total
