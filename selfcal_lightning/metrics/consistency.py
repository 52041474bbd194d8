"""Agreement among the responses to one question: the targets of self-calibration."""

import math
from collections.abc import Sequence

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Floats, check_positive

_UNREADABLE = object()


def soft_self_consistency(
    answers: Sequence[str | None], confidences: Sequence[float | None], *, drop_none: bool = True
) -> list[float | None]:
    """Compute the soft self-consistency (SSC) of every response to one question, in [0, 1].

    ``SSC(y) = sum_{i: y_i = y} c_i / sum_i c_i`` with ``c_i`` the confidence in response i and ``y_i`` its answer.

    Args:
        answers: The N answers; None where a response could not be read.
        confidences: The N confidences, at least 0. A response whose confidence is None counts as unreadable.
        drop_none: Leave unreadable responses out of both sums; they get None. If False, they form one class, as in
            the report of the reference's generator; a confidence of None then adds no mass.

    Returns:
        N scores; None for unreadable responses that were dropped, and for all responses if the confidences sum to 0.

    Example:
        >>> soft_self_consistency(["7", "7", "8", None], [0.5, 0.25, 0.25, 0.9])
        [0.75, 0.75, 0.25, None]

    Reference:
        Huang et al., Efficient Test-Time Scaling via Self-Calibration, arXiv 2503.00031, section 4.
    """
    classes, masses = _weighed_classes(answers, confidences)
    return _class_shares(classes, masses, drop_none=drop_none)


def vote_share(answers: Sequence[str | None], *, drop_none: bool = True) -> list[float | None]:
    """Compute the share of responses that give the same answer, in [0, 1]: SSC with equal weights.

    ``drop_none`` is that of :func:`soft_self_consistency`.

    Example:
        >>> vote_share(["7", "7", "8", None], drop_none=False)
        [0.5, 0.5, 0.25, 0.25]
    """
    classes = [_UNREADABLE if answer is None else answer for answer in answers]
    return _class_shares(classes, [1.0] * len(classes), drop_none=drop_none)


def leave_one_out(
    answers: Sequence[str | None], confidences: Sequence[float | None] | None = None, *, drop_none: bool = True
) -> list[float | None]:
    """Compute how far each response to one question agrees with the *others*, in [0, 1]: SSC without one's own vote.

    ``L(y_i) = sum_{j != i: y_j = y_i} c_j / sum_{j != i} c_j``; without confidences every ``c_j`` is 1. Unlike SSC and
    the vote share, it is an unbiased estimate of the chance that another sample agrees: a response that nobody repeats
    gets 0, not 1 / N. A response without others of positive confidence gets None. Arguments are those of
    :func:`soft_self_consistency`.

    Example:
        >>> leave_one_out(["7", "7", "7", "8", "9", None])
        [0.5, 0.5, 0.5, 0.0, 0.0, None]
        >>> leave_one_out(["7", "7", "8"], [0.5, 0.25, 0.75])
        [0.25, 0.4, 0.0]
    """
    classes, masses = _weighed_classes(answers, [1.0] * len(answers) if confidences is None else confidences)
    present = [i for i, label in enumerate(classes) if not (drop_none and label is _UNREADABLE)]
    scores: list[float | None] = [None] * len(classes)
    for i in present:
        others = [j for j in present if j != i]
        total = math.fsum(masses[j] for j in others)
        if total > 0.0:
            scores[i] = min(math.fsum(masses[j] for j in others if classes[j] == classes[i]) / total, 1.0)
    return scores


def consistency_bucket(target: float, num_buckets: int = 20) -> int:
    """Return the bucket of a target in [0, 1] among ``num_buckets`` equal ones; 1.0 belongs to the last.

    A target a billionth below an edge counts as on it, so .15, .3 and .35 land in the expected bucket despite rounding.

    Example:
        >>> [consistency_bucket(target) for target in (0.0, 0.15, 0.35, 0.99, 1.0)]
        [0, 3, 7, 19, 19]
    """
    check_positive(num_buckets, "num_buckets")
    if not -1e-9 <= target <= 1.0 + 1e-9:
        raise InputError(f"Expected `target` to lie in [0, 1], but got {target}.")
    return min(max(math.floor(target * num_buckets + 1e-9 * num_buckets), 0), num_buckets - 1)


def _weighed_classes(
    answers: Sequence[str | None], confidences: Sequence[float | None]
) -> tuple[list[object], list[float]]:
    """Return the class and mass of every response; one without an answer or a confidence is unreadable."""
    if len(answers) != len(confidences):
        lengths = len(answers), len(confidences)
        raise InputError(f"Expected `answers` and `confidences` to have the same length, but got {lengths}.")
    for confidence in confidences:
        if confidence is not None and not (math.isfinite(confidence) and confidence >= 0.0):
            raise InputError(f"Expected `confidences` to be finite and at least 0, but got {confidence}.")
    classes = [
        _UNREADABLE if answer is None or confidence is None else answer
        for answer, confidence in zip(answers, confidences, strict=True)
    ]
    return classes, [0.0 if confidence is None else float(confidence) for confidence in confidences]


def _class_shares(classes: Sequence[object], masses: Sequence[float], *, drop_none: bool) -> list[float | None]:
    """Return the share of the total mass that each member's class holds; None without mass or when dropped."""
    members: dict[object, list[float]] = {}
    for label, mass in zip(classes, masses, strict=True):
        if not (drop_none and label is _UNREADABLE):
            members.setdefault(label, []).append(mass)
    total = math.fsum(mass for group in members.values() for mass in group)
    if total <= 0.0:
        return [None] * len(classes)
    shares = {label: min(math.fsum(group) / total, 1.0) for label, group in members.items()}
    return [shares.get(label) for label in classes]


# Avoids a division by 0 for equal scores, which then all weigh the same.
_LEAST_SPREAD = 1e-9


def masked_standardised_weights(scores: Floats) -> Floats:
    """Compute ``exp(z)`` with ``z = (x - mean) / (std + 1e-9)`` over the N responses to each of Q questions [N, Q].

    Higher scores weigh more; unknown (NaN) ones weigh 0. Equal answers sum their weights in the vote.
    """
    is_known = ~np.isnan(scores)
    values, count = np.where(is_known, scores, 0.0), np.maximum(is_known.sum(axis=0), 1)
    # cumsum adds response by response: another order may change the last bit and so break a tie.
    distance = np.where(is_known, values - np.cumsum(values, axis=0)[-1:] / count, 0.0)
    spread = np.sqrt(np.cumsum(distance**2, axis=0)[-1:] / count)
    return np.where(is_known, np.exp(distance / (spread + _LEAST_SPREAD)), 0.0)
