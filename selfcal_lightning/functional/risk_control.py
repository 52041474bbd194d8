"""Thresholds with a guarantee: Learn then Test for the error rate among the questions that are answered.

A question is answered when the confidence of its verdict is at least a threshold, and the *selective risk* of a
threshold is ``R = E[loss | answered]``. For each threshold of a grid, ``H: R > risk`` is tested on calibration
questions; thresholds whose H is rejected are certified: with probability at least ``1 - delta`` over the calibration
questions, none of them has a risk above ``risk``.

Why the tests are valid although the number of answered questions is random: questions are drawn independently, and
whether one is answered at a *fixed* threshold depends on that question alone. Given which ones are answered, their
losses are independent draws with mean R; so the number of wrong answers among n answered ones is Binomial(n, R), and
``P(Bin(n, risk) <= wrong)`` is a p-value for every n, hence on average over n. Without an answered question it is 1.
What breaks this is a threshold taken from the calibration questions themselves, such as the best empirical one: grid
and order of testing must not depend on them. They may depend on any *other* questions (``risk_planning.guided_grid``).

Reference:
    Angelopoulos, Bates, Candes, Jordan and Lei, Learn then Test, arXiv 2110.01052, sections 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_probabilities, check_same_length
from selfcal_lightning.functional.risk_planning import questions_needed
from selfcal_lightning.functional.risk_tests import (
    Procedure,
    binomial_p_value,
    hoeffding_bentkus_p_value,
    reject,
    selective_counts,
    start_positions,
)

Test = Literal["binomial", "hoeffding_bentkus"]
Shortfall = Literal["questions", "start", "ranking"]


@dataclass(frozen=True)
class Certificate:
    """What Learn then Test found.

    Attributes:
        threshold: The lowest certified threshold, the one that answers most; None where none is certified: abstain.
        risk: Stated bound on the selective risk.
        delta: Stated chance that the bound does not hold.
        num_questions: Calibration questions.
        num_answered: Those at or above the threshold; 0 without one.
        loss: Sum of their losses: the number of wrong answers.
        p_value: Of the threshold; 1 without one.
        num_certified: Certified thresholds of the grid.
        message: The outcome in a sentence; without a threshold, about how many more questions it would take.
        shortfall: Without a threshold, what was missing: "questions" (there are too few), "start" (those tested first
            do not look good enough, and the others were not tested) or "ranking" (none of the grid looks good enough).
    """

    threshold: float | None
    risk: float
    delta: float
    num_questions: int
    num_answered: int
    loss: float
    p_value: float
    num_certified: int
    message: str
    shortfall: Shortfall | None = None


def certify_threshold(
    confidence: Array,
    loss: Array,
    grid: Array,
    *,
    risk: float,
    delta: float = 0.1,
    test: Test = "binomial",
    procedure: Procedure = "fixed_sequence",
    num_starts: int = 1,
) -> Certificate:
    """Find the threshold that answers most while the error rate among the answered stays below ``risk``.

    Args:
        confidence: Confidence of the verdict on each calibration question [N]; -inf where there is nothing to answer.
        loss: 1 wrong, 0 right [N]; any loss in [0, 1] with ``test="hoeffding_bentkus"``.
        grid: Thresholds in the order of testing [G]: not a function of ``confidence`` and ``loss``. Of a fixed
            sequence the first should be the most promising one: high, but not so high that few questions are answered.
        risk: Bound on the selective risk, in (0, 1).
        delta: Chance that the bound does not hold, in (0, 1).
        test: Which p-value; the binomial one is exact and takes losses of 0 and 1 only.
        procedure: See ``risk_tests.reject``.
        num_starts: See ``risk_tests.reject``.

    Raises:
        ValueError: An argument is out of its range, or the lengths differ.

    Example:
        >>> certificate = certify_threshold([0.9] * 30 + [0.1] * 30, [0] * 30 + [1] * 30, [0.5, 0.0], risk=0.1)
        >>> certificate.threshold, certificate.num_answered, round(certificate.p_value, 4)  # .9 ** 30
        (0.5, 30, 0.0424)
    """
    scores, losses = np.asarray(confidence, dtype=np.float64), as_probabilities(loss, "loss")
    check_same_length(confidence=scores, loss=losses)
    thresholds = np.asarray(grid, dtype=np.float64)
    if not thresholds.size or np.isnan(scores).any() or not np.isfinite(thresholds).all():
        raise InputError("Expected a `grid` of finite thresholds and a `confidence` without nan (-inf abstains).")
    answered, total = selective_counts(scores, losses, thresholds)
    p_values = _p_values(test, losses, answered, total, risk)
    rejected = reject(p_values, delta=delta, procedure=procedure, num_starts=num_starts)
    common: dict[str, Any] = {"risk": risk, "delta": delta, "num_questions": len(scores)}
    if not rejected.any():
        first = thresholds[start_positions(len(thresholds), num_starts)]
        tested = thresholds if procedure == "bonferroni" else first
        needed = [
            questions_needed(scores, losses, among, risk=risk, delta=delta / len(tested))
            for among in (tested, thresholds)
        ]
        shortfall, message = _no_threshold(risk, delta, len(scores), *needed)
        return Certificate(
            None, num_answered=0, loss=0.0, p_value=1.0, num_certified=0, message=message, shortfall=shortfall, **common
        )
    best = int(np.flatnonzero(rejected)[np.argmin(thresholds[rejected])])
    share = f"{answered[best]} of {len(scores)}"
    return Certificate(
        threshold=float(thresholds[best]),
        num_answered=int(answered[best]),
        loss=float(total[best]),
        p_value=float(p_values[best]),
        num_certified=int(rejected.sum()),
        message=f"Answering at {thresholds[best]:.4g} or above ({share} calibration questions) keeps the error rate "
        f"among the answered at or below {risk:g}, with confidence {1.0 - delta:g}.",
        **common,
    )


def _p_values(test: Test, losses: Floats, answered: NDArray[np.int64], total: Floats, risk: float) -> Floats:
    if test == "hoeffding_bentkus":
        return hoeffding_bentkus_p_value(total / np.maximum(answered, 1), answered, risk=risk)
    if test != "binomial":
        raise InputError(f'Expected `test` to be "binomial" or "hoeffding_bentkus", but got {test!r}.')
    if not np.isin(losses, (0.0, 1.0)).all():
        raise InputError('Expected `loss` to hold 0 and 1 only; use `test="hoeffding_bentkus"` for losses between.')
    return binomial_p_value(total, answered, risk=risk)


def _no_threshold(
    risk: float, delta: float, num_questions: int, needed: int | None, anywhere: int | None
) -> tuple[Shortfall, str]:
    """Say what is missing; ``needed`` questions certify a threshold that is tested first, ``anywhere`` any other."""
    start = (
        f"No threshold keeps the error rate among the answered at or below {risk:g} with confidence {1.0 - delta:g} "
        f"on {num_questions} calibration questions"
    )
    if anywhere is None:
        return "ranking", f"{start}: none looks as good as that, so that more questions would not help."
    if needed is None:
        return "start", (
            f"{start}: the thresholds tested first do not look as good as that, or too few questions reach them, and "
            "the others were not tested."
        )
    more = max(needed - num_questions, 1)
    return "questions", f"{start}; about {more} more would be needed if they are like these."
