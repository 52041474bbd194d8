"""What to test, and on how many questions: choices that come before Learn then Test, or after it has failed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_probabilities, check_positive, check_same_length
from selfcal_lightning.functional.risk_tests import check_rate, hoeffding_bentkus_p_value, selective_counts

MOST_QUESTIONS = 10_000_000


def guided_grid(
    confidence: Array, loss: Array, *, num_questions: int, risk: float, delta: float = 0.1, num_thresholds: int = 100
) -> Floats:
    """Choose thresholds and their order from *other* questions than those of the test, so that it loses no level.

    The candidates are quantiles of the confidences there. The first is the one that ``num_questions`` calibration
    questions would most clearly certify if they were like these; after it come the lower ones in falling order.

    Args:
        confidence: Confidence of the verdicts on the other questions [M]; -inf where there is nothing to answer.
        loss: Their losses in [0, 1] [M].
        num_questions: Calibration questions of the test to come.
        risk: Bound on the selective risk.
        delta: Not used beyond a check; stands here so that both calls take the same settings.
        num_thresholds: Thresholds at most.

    Returns:
        Thresholds in the order of testing.

    Raises:
        ValueError: No question has a confidence, or an argument is out of its range.

    Example:
        >>> confidence = np.repeat([0.25, 0.5, 0.75, 1.0], 10)
        >>> loss = np.repeat([0.9, 0.5, 0.05, 0.05], 10)
        >>> guided_grid(confidence, loss, num_questions=40, risk=0.2).tolist()
        [0.75, 0.5, 0.25]

    Reference:
        Angelopoulos et al., arXiv 2110.01052, section 2.3 (split fixed sequence testing).
    """
    check_rate(delta, "delta")
    check_positive(num_questions, "num_questions")
    scores, losses = np.asarray(confidence, dtype=np.float64), as_probabilities(loss, "loss")
    check_same_length(confidence=scores, loss=losses)
    known = scores[np.isfinite(scores)]
    if not known.size:
        raise InputError("Expected `confidence` to hold at least one finite value, but got none.")
    quantiles = np.linspace(0.0, 1.0, num_thresholds)
    candidates = np.unique(np.quantile(known, quantiles, method="lower"))[::-1]
    answered, total = selective_counts(scores, losses, candidates)
    expected = np.floor(answered * (num_questions / len(scores)))
    p_values = hoeffding_bentkus_p_value(_guarded_rate(total, answered), expected, risk=risk)
    return np.asarray(candidates[int(np.argmin(p_values)) :])


def questions_needed(confidence: Array, loss: Array, grid: Array, *, risk: float, delta: float) -> int | None:
    """Estimate the calibration questions that would certify some threshold, were new ones like those seen.

    The error rate of each threshold is taken as ``(wrong + 1/2) / (answered + 1)``, so that three right answers do not
    promise the moon.

    Args:
        confidence: See ``risk_control.certify_threshold`` [N].
        loss: Losses [N].
        grid: Thresholds [G].
        risk: Bound on the selective risk.
        delta: Level of a single test.

    Returns:
        A number of questions in all; None where no threshold promises a risk below ``risk``.
    """
    from scipy.special import rel_entr

    scores, losses = np.asarray(confidence, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    answered, total = selective_counts(scores, losses, np.asarray(grid, dtype=np.float64))
    promising = (answered > 0) & (_guarded_rate(total, answered) < risk)
    if not promising.any():
        return None
    rates, answered = _guarded_rate(total, answered)[promising], answered[promising]
    # Chernoff's bound says which threshold is the cheapest to certify; the exact test then says how much it takes.
    divergence = rel_entr(rates, risk) + rel_entr(1.0 - rates, 1.0 - risk)
    best = int(np.argmax(divergence * answered))
    count = _answers_needed(float(rates[best]), risk, delta)
    return None if count is None else math.ceil(count * len(scores) / int(answered[best]))


def _answers_needed(rate: float, risk: float, delta: float) -> int | None:
    """Return about how many answered questions reject at ``delta`` when a share ``rate`` of them is wrong."""
    from scipy.special import betainc

    def rejects(count: int) -> bool:
        # The binomial tail as an incomplete beta function goes on between whole numbers of wrong answers; so it falls
        # with the count, where the exact one jumps at every further wrong answer.
        return float(betainc(count * (1.0 - rate), count * rate + 1.0, 1.0 - risk)) <= delta

    high = 1
    while not rejects(high):
        high *= 2
        if high > MOST_QUESTIONS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rejects(middle) else (middle, high)
    return high


def _guarded_rate(total: Floats, answered: NDArray[np.int64]) -> Floats:
    return np.asarray((total + 0.5) / (answered + 1.0))
