"""Choosing by scores: the best response, the questions or responses to keep, and what leaving some out costs.

A score of None is unknown: it is never chosen, and its question never kept. Thresholds are at least (``>=``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_rates, as_scores, check_positive, check_same_length
from selfcal_lightning.functional.curves import risk_coverage

# Keeps candidates with equal scores from being told apart by rounding.
_LEAST_SPREAD = 1e-9


@dataclass(frozen=True)
class Selective:
    """What is left when the questions with the lowest scores are not asked.

    Attributes:
        coverage: Share of the questions that are asked.
        accuracy: Mean capability of these; None where none is asked.
        lost: Share of all right answers that the others would have given; None where there is none at all.
    """

    coverage: float
    accuracy: float | None
    lost: float | None


def select_best(scores: Sequence[float | None], answers: Sequence[str | None] | None = None) -> int | None:
    """Return the position of the response with the highest score, the first one on ties; None where there is none.

    Args:
        scores: Of the N responses; None or NaN where unknown.
        answers: Their answers; unreadable ones (None or empty) are not chosen. Without answers all may be.

    Raises:
        ValueError: If the lengths differ.

    Example:
        >>> select_best([0.5, None, 0.9, 0.9]), select_best([0.5, 0.9], ["7", None]), select_best([None])
        (2, 0, None)
    """
    readable = [True] * len(scores) if answers is None else [bool(answer) for answer in answers]
    known = [
        at
        for at, (score, is_readable) in enumerate(zip(scores, readable, strict=True))
        if is_readable and score is not None and not math.isnan(score)
    ]
    return max(known, key=lambda at: (scores[at], -at), default=None)


def threshold_for_count(scores: Sequence[float | None], count: int) -> float | None:
    """Return the highest threshold that keeps at least ``count`` of the known scores: more where some are equal.

    Args:
        scores: Of the N questions or responses; None where unknown.
        count: How many to keep, at least 1.

    Returns:
        The threshold; None where fewer are known.

    Raises:
        ValueError: If the count is not positive.

    Example:
        >>> threshold_for_count([0.2, None, 0.9, 0.5], 2), threshold_for_count([0.2], 2)
        (0.5, None)
    """
    check_positive(count, "count")
    known = sorted((score for score in scores if score is not None), reverse=True)
    return known[count - 1] if count <= len(known) else None


def threshold_for_share(scores: Sequence[float | None], share: float) -> float | None:
    """Return the highest threshold that keeps at least a share of all, unknown ones counted among these.

    Args:
        scores: Of the N questions or responses; None where unknown.
        share: Of N, in (0, 1].

    Returns:
        The threshold; None where too few are known.

    Raises:
        ValueError: If the share is out of its range.

    Example:
        >>> threshold_for_share([0.2, None, 0.9, 0.5], 0.5)
        0.5
    """
    if not 0.0 < share <= 1.0:
        raise InputError(f"Expected `share` to lie in (0, 1], but got {share}.")
    # .35 of 20 are 7, in spite of floats.
    return threshold_for_count(scores, max(1, math.ceil(share * len(scores) - 1e-9)))


def threshold_for_accuracy(scores: Array, correct: Array, accuracy: float) -> float | None:
    """Return the lowest threshold at which those kept are right often enough. Choose it on other data than it serves.

    Args:
        scores: Of N labelled questions or responses.
        correct: Their labels [N].
        accuracy: Wanted share of right ones among those kept, in [0, 1].

    Returns:
        The threshold with the largest coverage; None where no threshold reaches it.

    Raises:
        ValueError: If a score or label is unknown, the lengths differ, or the accuracy is out of its range.

    Example:
        >>> threshold_for_accuracy([0.9, 0.8, 0.5, 0.1], [True, False, True, False], 0.66)
        0.5
    """
    if not 0.0 <= accuracy <= 1.0:
        raise InputError(f"Expected `accuracy` to lie in [0, 1], but got {accuracy}.")
    curve = risk_coverage(scores, correct)
    enough = np.flatnonzero(1.0 - curve.risk >= accuracy - 1e-12)
    return float(curve.threshold[enough[-1]]) if len(enough) else None


def kept(scores: Sequence[float | None], threshold: float) -> list[bool]:
    """Return which scores reach a threshold; unknown ones do not.

    Example:
        >>> kept([0.2, None, 0.5], 0.5)
        [False, False, True]
    """
    return [score is not None and score >= threshold for score in scores]


def selective(scores: Array, capability: Array, *, left_out: float) -> Selective:
    """Say what it costs not to ask the questions with the lowest scores.

    Among equal scores at the edge each question is as likely to be asked as the others, so that their order is nothing.

    Args:
        scores: Of the Q questions; higher is asked first.
        capability: Share of right answers of each question [Q], in [0, 1].
        left_out: Share of the questions that are not asked, in [0, 1].

    Raises:
        ValueError: If a value is unknown or out of its range, or the lengths differ.

    Example:
        >>> selective([0.9, 0.1, 0.5, 0.8], [1.0, 0.0, 0.5, 0.5], left_out=0.5)
        Selective(coverage=0.5, accuracy=0.75, lost=0.25)
    """
    values, right = as_scores(scores, "scores"), as_rates(capability, "capability")
    check_same_length(scores=values, capability=right)
    if not 0.0 <= left_out <= 1.0:
        raise InputError(f"Expected `left_out` to lie in [0, 1], but got {left_out}.")
    asked = len(values) * (1.0 - left_out)
    distinct, group = np.unique(-values, return_inverse=True)
    sizes = np.bincount(group, minlength=len(distinct))
    before = np.cumsum(sizes) - sizes
    weight = (np.clip(asked - before, 0.0, sizes) / np.maximum(sizes, 1))[group]
    gained, everything = float(weight @ right), float(right.sum())
    return Selective(
        coverage=1.0 - left_out,
        accuracy=gained / asked if asked > 1e-9 else None,
        lost=max(0.0, 1.0 - gained / everything) if everything else None,
    )


def relative_weights(*columns: Array) -> Floats:
    """Return vote weights of the candidates of one question from how they stand among each other.

    ``exp(-sum_j z_j)`` with ``z = (x - mean) / std`` over the candidates: the lower a column, the more weight. Give the
    negative of a column of which more is better.

    Args:
        columns: One or more statistics of each candidate [N], such as the spread of its entropy.

    Returns:
        Weights [N]; 1 in a column without differences.

    Raises:
        ValueError: If there is no column, a value is unknown, or the lengths differ.

    Example:
        >>> relative_weights([1.0, 1.0]).tolist(), relative_weights([0.0, 2.0]).round(3).tolist()  # e and 1/e
        ([1.0, 1.0], [2.718, 0.368])
    """
    if not columns:
        raise InputError("Expected at least one column, but got none.")
    values = {f"columns[{at}]": as_scores(column, f"columns[{at}]") for at, column in enumerate(columns)}
    check_same_length(**values)
    total = np.zeros(len(next(iter(values.values()))))
    if len(total):
        for column in values.values():
            total += (column - column.mean()) / (column.std() + _LEAST_SPREAD)
    return np.exp(-total)


def below_percentile(values: Array, percentile: float) -> NDArray[np.bool_]:
    """Return which candidates of a question have a value at or below a percentile of all of them [N].

    Args:
        values: A statistic of each candidate [N], such as the spread of its entropy.
        percentile: In [0, 100].

    Raises:
        ValueError: If a value is unknown or the percentile out of its range.

    Example:
        >>> below_percentile([0.1, 0.2, 0.3, 0.9], 75).tolist()
        [True, True, True, False]
    """
    column = as_scores(values, "values")
    if not 0.0 <= percentile <= 100.0:
        raise InputError(f"Expected `percentile` to lie in [0, 100], but got {percentile}.")
    return column <= np.percentile(column, percentile) if len(column) else np.zeros(0, dtype=bool)


def difficulty_level(capability: Array, edges: Sequence[float]) -> NDArray[np.int64]:
    """Return the level of difficulty of questions: 1 for the easiest, one more than there are edges for the hardest.

    Args:
        capability: Of each question [Q].
        edges: Rising capabilities between the levels, such as the quintiles of a data set; an edge is of the easier.

    Raises:
        ValueError: If a capability is unknown or the edges do not rise.

    Example:
        >>> difficulty_level([0.0, 0.2, 0.6, 1.0], [0.2, 0.4, 0.6, 0.8]).tolist()
        [5, 4, 2, 1]
    """
    if any(low > high for low, high in pairwise(edges)):
        raise InputError(f"Expected `edges` to rise, but got {list(edges)}.")
    below = np.searchsorted(np.asarray(edges, dtype=np.float64), as_scores(capability, "capability"), side="right")
    return (len(edges) + 1 - below).astype(np.int64)
