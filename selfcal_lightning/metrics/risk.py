"""Thresholds with a guarantee: Learn then Test for the error rate among answered questions.

A question is answered when the confidence of its verdict is at least a threshold, and the *selective risk* of a
threshold is ``R = E[loss | answered]``. For each threshold of a grid, ``H: R > risk`` is tested on calibration
questions; thresholds whose H is rejected are certified: with probability at least ``1 - delta`` over the calibration
questions, no certified threshold has a risk above ``risk``.

Why the tests are valid although the number of answered questions is random: questions are drawn independently, and
whether one is answered at a *fixed* threshold depends on that question alone. Given which ones are answered, their
losses are independent draws with mean R; so the number of wrong answers among n answered ones is Binomial(n, R), and
``P(Bin(n, risk) <= wrong)`` is a p-value for every n, hence on average over n. Without an answered question it is 1.
What breaks this is a threshold taken from the calibration questions themselves, such as the best empirical one: grid
and order of testing must not depend on them. They may depend on any *other* questions (``guided_grid``).

Reference:
    Angelopoulos, Bates, Candes, Jordan and Lei, Learn then Test, arXiv 2110.01052, sections 2 and 3.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, as_probabilities, check_positive, check_same_length

Procedure = Literal["fixed_sequence", "bonferroni"]


def binomial_p_value(num_wrong: Array, num_answered: Array, *, risk: float) -> Floats:
    """Compute ``P(Bin(num_answered, risk) <= num_wrong)``, the exact p-value of "the error rate exceeds ``risk``".

    Without answered questions it is 1.
    """
    from scipy.special import bdtr

    check_rate(risk, "risk")
    wrong, answered = np.asarray(num_wrong, dtype=np.float64), np.asarray(num_answered, dtype=np.int64)
    return np.asarray(np.where(answered > 0, bdtr(np.minimum(wrong, answered), np.maximum(answered, 1), risk), 1.0))


def hoeffding_bentkus_p_value(mean_loss: Array, num_answered: Array, *, risk: float) -> Floats:
    """Compute a p-value of "the mean of losses in [0, 1] exceeds ``risk``"; for 0-1 losses the binomial one is better.

    ``min(exp(-n h(min(m, risk), risk)), e P(Bin(n, risk) <= ceil(n m)))`` with m the mean loss, n the number of losses
    (0 gives 1) and ``h(a, b) = a log(a / b) + (1 - a) log((1 - a) / (1 - b))``.

    Reference:
        Angelopoulos et al., arXiv 2110.01052, proposition 1; Bates et al., arXiv 2101.02703, section 3.1.
    """
    from scipy.special import bdtr, rel_entr

    check_rate(risk, "risk")
    n = np.asarray(num_answered, dtype=np.int64)
    mean = np.where(n > 0, np.asarray(mean_loss, dtype=np.float64), 1.0)
    low = np.minimum(mean, risk)
    hoeffding = np.exp(-n * (rel_entr(low, risk) + rel_entr(1.0 - low, 1.0 - risk)))
    # 3 / 10 times ten can give 3.0000000000000004, which must round up to 3 and not 4.
    bentkus = math.e * bdtr(np.minimum(np.ceil(n * mean - 1e-9), n), np.maximum(n, 1), risk)
    return np.asarray(np.where(n > 0, np.minimum(np.minimum(hoeffding, bentkus), 1.0), 1.0))


def reject(p_values: Array, *, delta: float, procedure: Procedure, num_starts: int = 1) -> NDArray[np.bool_]:
    """Return which hypotheses are rejected [G]; the chance of rejecting any true one is at most ``delta``.

    "bonferroni" tests each at ``delta / G``. "fixed_sequence" tests them in order, each at the full ``delta``,
    and stops at the first that is not rejected; with several evenly spread starts, each runs its own sequence at
    ``delta / num_starts``. The order of the p-values must not depend on the data tested (section 2.3, algorithm 1).
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
    """Return evenly spread start positions of a fixed sequence."""
    starts = min(num_starts, num_thresholds)
    return np.arange(starts) * num_thresholds // max(starts, 1)


def selective_counts(confidence: Floats, loss: Floats, thresholds: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return the number of answered questions [G] and the sum of their losses [G] at each threshold (``>=``)."""
    order = np.argsort(confidence, kind="stable")
    below = np.searchsorted(confidence[order], thresholds, side="left")
    from_here = np.append(np.cumsum(loss[order][::-1])[::-1], 0.0)
    return len(confidence) - below, from_here[below]


def check_rate(value: float, name: str) -> None:
    if not 0.0 < value < 1.0:
        raise InputError(f"Expected `{name}` to lie in (0, 1), but got {value}.")


MOST_QUESTIONS = 10_000_000


def guided_grid(confidence: Array, loss: Array, *, num_questions: int, risk: float) -> Floats:
    """Choose thresholds and their order from questions *other* than those of the test, which keeps the test valid.

    The candidates are a hundred quantiles of those confidences. The first is the one that ``num_questions`` calibration
    questions would most clearly certify if they were like these; the lower ones follow in falling order.

    The reference calls it split fixed sequence testing (section 2.3).
    """
    check_positive(num_questions, "num_questions")
    scores, losses = np.asarray(confidence, dtype=np.float64), as_probabilities(loss, "loss")
    check_same_length(confidence=scores, loss=losses)
    known = scores[np.isfinite(scores)]
    if not known.size:
        raise InputError("Expected `confidence` to hold at least one finite value, but got none.")
    candidates = np.unique(np.quantile(known, np.linspace(0.0, 1.0, 100), method="lower"))[::-1]
    answered, total = selective_counts(scores, losses, candidates)
    expected = np.floor(answered * (num_questions / len(scores)))
    p_values = hoeffding_bentkus_p_value(_guarded_rate(total, answered), expected, risk=risk)
    return np.asarray(candidates[int(np.argmin(p_values)) :])


def questions_needed(confidence: Array, loss: Array, grid: Array, *, risk: float, delta: float) -> int | None:
    """Estimate how many calibration questions would certify some threshold if new ones are like those seen.

    ``delta`` is the level of a single test. None if no threshold looks likely to have a risk below ``risk``.
    """
    from scipy.special import rel_entr

    scores, losses = np.asarray(confidence, dtype=np.float64), np.asarray(loss, dtype=np.float64)
    answered, total = selective_counts(scores, losses, np.asarray(grid, dtype=np.float64))
    rates = _guarded_rate(total, answered)
    promising = (answered > 0) & (rates < risk)
    if not promising.any():
        return None
    rates, answered = rates[promising], answered[promising]
    # Chernoff's bound picks the threshold that is cheapest to certify; the exact test then counts the questions.
    divergence = rel_entr(rates, risk) + rel_entr(1.0 - rates, 1.0 - risk)
    best = int(np.argmax(divergence * answered))
    count = _answers_needed(float(rates[best]), risk, delta)
    return None if count is None else math.ceil(count * len(scores) / int(answered[best]))


def _answers_needed(rate: float, risk: float, delta: float) -> int | None:
    """Return about how many answered questions it takes to reject at ``delta`` if a share ``rate`` of them is wrong."""
    from scipy.special import betainc

    def rejects(count: int) -> bool:
        # The incomplete beta function extends the binomial tail to fractional numbers of wrong answers, so it falls
        # smoothly with the count, while the exact tail jumps at every further wrong answer.
        return bool(betainc(count * (1.0 - rate), count * rate + 1.0, 1.0 - risk) <= delta)

    found = bisect_left(range(MOST_QUESTIONS + 1), True, lo=1, key=rejects)
    return found if found <= MOST_QUESTIONS else None


def _guarded_rate(total: Floats, answered: NDArray[np.int64]) -> Floats:
    """Return error rates by which three right answers do not look like certainty."""
    return (total + 0.5) / (answered + 1.0)


Test = Literal["binomial", "hoeffding_bentkus"]
Shortfall = Literal["questions", "start", "ranking", "grid"]


@dataclass(frozen=True)
class Certificate:
    """Result of Learn then Test."""

    # The lowest certified threshold, the one that answers most; None if none is certified: abstain.
    threshold: float | None
    risk: float
    delta: float
    num_questions: int  # of calibration
    num_answered: int  # of them at or above the threshold
    loss: float  # sum of their losses: the number of wrong answers
    p_value: float  # 1 without a threshold
    num_certified: int  # thresholds of the grid
    message: str  # the outcome in a sentence; without a threshold, about how many more questions it would take
    # Without a threshold, what was missing: "questions" (there are too few), "start" (those tested first do not look
    # good enough, and the others were not tested), "ranking" (none of the grid looks good enough) or "grid" (all of it
    # lies above the confidences).
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
        grid: Thresholds in the order of testing [G]: not a function of ``confidence`` and ``loss``. For a fixed
            sequence, put the most promising one first: high, but not so high that few questions are answered.
        risk: Bound on the selective risk, in (0, 1).
        delta: Chance that the bound fails, in (0, 1).
        test: Which p-value; the binomial one is exact and takes losses of 0 and 1 only.
        procedure: See :func:`reject`.
        num_starts: See :func:`reject`.

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
    if test == "hoeffding_bentkus":
        p_values = hoeffding_bentkus_p_value(total / np.maximum(answered, 1), answered, risk=risk)
    elif test != "binomial":
        raise InputError(f'Expected `test` to be "binomial" or "hoeffding_bentkus", but got {test!r}.')
    elif not np.isin(losses, (0.0, 1.0)).all():
        raise InputError('Expected `loss` to hold 0 and 1 only; use `test="hoeffding_bentkus"` for losses between.')
    else:
        p_values = binomial_p_value(total, answered, risk=risk)
    rejected = reject(p_values, delta=delta, procedure=procedure, num_starts=num_starts)
    common: dict[str, Any] = {"risk": risk, "delta": delta, "num_questions": len(scores)}
    if not rejected.any():
        first = thresholds[start_positions(len(thresholds), num_starts)]
        tested = thresholds if procedure == "bonferroni" else first
        needed = [
            questions_needed(scores, losses, among, risk=risk, delta=delta / len(tested))
            for among in (tested, thresholds)
        ]
        highest = float(scores.max(initial=-math.inf))
        is_above = -math.inf < highest < thresholds.min()
        shortfall, message = _no_threshold(risk, delta, len(scores), *needed, above=highest if is_above else None)
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


def _no_threshold(
    risk: float, delta: float, num_questions: int, needed: int | None, anywhere: int | None, *, above: float | None
) -> tuple[Shortfall, str]:
    """Say what is missing; ``needed`` questions certify a threshold that is tested first, ``anywhere`` any other.

    ``above`` is the highest confidence if the whole grid lies above it.
    """
    start = (
        f"No threshold keeps the error rate among the answered at or below {risk:g} with confidence {1.0 - delta:g} "
        f"on {num_questions} calibration questions"
    )
    if above is not None:
        return "grid", f"{start}: the grid lies above all confidences, of which {above:.4g} is the highest."
    if anywhere is None:
        return "ranking", f"{start}: none looks as good as that, so that more questions would not help."
    if needed is None:
        return "start", (
            f"{start}: the thresholds tested first do not look as good as that, or too few questions reach them, and "
            "the others were not tested."
        )
    more = max(needed - num_questions, 1)
    return "questions", f"{start}; about {more} more would be needed if they are like these."
