"""Errors of capability predictions against sampled responses, without counting sampling noise as error.

The capability c* of a question is known only from n verified samples, whose share of right ones has the variance
``c* (1 - c*) / n``. Debiased errors subtract an unbiased estimate of it, so 8 samples and 100 agree on average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, Integers, as_counts, as_rates, as_scores, check_same_length
from selfcal_lightning.metrics.discrimination import kendall, spearman


def agreeing_pairs(answers: Sequence[str | None]) -> float | None:
    """Compute the share of pairs of responses to one question that give the same answer, in [0, 1].

    ``sum_a n_a (n_a - 1) / (k (k - 1))`` with n_a of the k responses giving answer a: the unbiased estimate of the
    chance that two samples agree. It needs no labels, and approximates c* where wrong answers scatter. Where a model is
    consistently wrong it is too high: compare its mean with that of c* on some labelled questions.

    A response that could not be read (None) agrees with nothing but counts towards k. None for fewer than two
    responses.

    Example:
        >>> agreeing_pairs(["7", "7", "7", "8"]), agreeing_pairs(["7", None]), agreeing_pairs(["7"])
        (0.5, 0.0, None)
    """
    size = len(answers)
    if size < 2:
        return None
    votes = Counter(answer for answer in answers if answer is not None)
    return sum(count * (count - 1) for count in votes.values()) / (size * (size - 1))


def top_share(answers: Sequence[str | None]) -> float | None:
    """Compute the share of responses that give the most frequent answer, in [0, 1]: response consistency.

    It is at least 1/k if any answer could be read, so it is biased upwards for small k; see ``agreeing_pairs``.

    Example:
        >>> top_share(["7", "7", "8", None]), top_share([None]), top_share([])
        (0.5, 0.0, None)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes.values(), default=0) / len(answers) if answers else None


def expected_accuracy(num_samples: Array, num_correct: Array) -> Floats:
    """Compute the share of right samples, the plain estimate of c*, in [0, 1].

    Example:
        >>> expected_accuracy([4, 10], [1, 10]).tolist()
        [0.25, 1.0]
    """
    samples, correct = checked_counts(num_samples, num_correct)
    return np.asarray(correct / samples)


def pass_at_k(num_samples: Array, num_correct: Array, k: Array | int) -> Floats:
    """Estimate the chance that at least one of k sampled responses is right, without bias, in [0, 1].

    ``1 - C(n - c, k) / C(n, k)``: the chance that k of the n samples, drawn without replacement, include a right one.

    Args:
        num_samples: n [...], at least 1 each.
        num_correct: c, how many of them were right [...].
        k: Number of draws, at most n; a number or [...]. 0 draws give 0.

    Returns:
        Chances, in the broadcast shape of the three arguments.

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
        raise InputError(f"Expected `k` to be at most the number of samples, but got k = {most} for {n}.")
    # The chance of k wrong draws is prod_{j < k} (1 - c / (n - j)): no overflow, and small chances keep digits.
    step = np.arange(int(draws.max(initial=0)))
    share = correct[..., None] / np.maximum(samples[..., None] - step, 1)
    with np.errstate(divide="ignore"):
        logs = np.log1p(-np.minimum(share, 1.0))
    return np.abs(np.expm1(np.where(step < draws[..., None], logs, 0.0).sum(axis=-1)))


def simulated_pass_at_k(p: Array, k: Array | int) -> Floats:
    """Compute ``1 - (1 - p)^k``, the chance that one of k samples is right if each is with chance p, in [0, 1].

    Exact for a known p. With an *estimate* of p it is biased for k > 1 (Jensen): see ``beta_pass_at_k``.

    Example:
        >>> simulated_pass_at_k([0.0, 0.5, 1.0], 2).tolist()
        [0.0, 0.75, 1.0]
    """
    chances, draws = np.broadcast_arrays(as_rates(p, "p"), as_counts(k, "k"))
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(draws > 0, draws * np.log1p(-chances), 0.0)
    return np.abs(np.expm1(logs))


def checked_counts(num_samples: Array, num_correct: Array) -> tuple[Integers, Integers]:
    """Return the numbers of samples and of right ones, broadcast against each other."""
    samples = as_counts(num_samples, "num_samples")
    correct = as_counts(num_correct, "num_correct")
    samples, correct = np.broadcast_arrays(samples, correct)
    if (samples < 1).any():
        raise InputError("Expected `num_samples` to be at least 1 everywhere, but got 0: leave such questions out.")
    if (correct > samples).any():
        of = f"{int(correct[correct > samples].flat[0])} of {int(samples[correct > samples].flat[0])}"
        raise InputError(f"Expected `num_correct` to be at most `num_samples`, but got {of}.")
    return samples, correct


@dataclass(frozen=True)
class ErrorParts:
    """Decomposition of a prediction's squared error against single responses: ``response = capability + spread``.

    Attributes:
        response: ``mean E(p - y)^2`` with y = 1 for a right response: what response calibration measures.
        capability: ``mean (p - c*)^2``: the part that a better prediction could remove.
        spread: ``mean c* (1 - c*)``: what no prediction made before the response can remove.
    """

    response: float
    capability: float
    spread: float


def squared_errors(predicted: Array, num_correct: Array, num_samples: Array, *, debiased: bool = True) -> Floats:
    """Compute the squared error of the predicted capability of each question.

    ``(p - c)^2 - [debiased] c (1 - c) / (n - 1)`` with c the share of right ones among n samples. The debiased error
    has the expectation ``(p - c*)^2``; that of a single question may be negative.

    Args:
        predicted: p, the predicted capability of each question [Q], in [0, 1].
        num_correct: Right samples of each question [Q].
        num_samples: n, the samples of each question [Q] or one number.
        debiased: Whether to subtract the sampling noise, which needs at least 2 samples.

    Example:
        >>> squared_errors([0.5, 0.5], [1, 2], [2, 2]).tolist()
        [-0.25, 0.25]
    """
    p, share, samples = _columns(predicted, num_correct, num_samples)
    errors = (p - share) ** 2
    return errors - _noise(share, samples) if debiased else errors


def squared_error(predicted: Array, num_correct: Array, num_samples: Array, *, debiased: bool = True) -> float | None:
    """Compute the mean of :func:`squared_errors` over the questions; lower is better. None without questions.

    If debiased, it estimates ``E (p - c*)^2`` for any n, and may be negative by chance.

    Example:
        >>> squared_error([1.0, 0.5], [3, 2], [4, 4], debiased=False)
        0.03125
    """
    errors = squared_errors(predicted, num_correct, num_samples, debiased=debiased)
    return float(errors.mean()) if len(errors) else None


def skill(predicted: Array, num_correct: Array, num_samples: Array, *, debiased: bool = True) -> float | None:
    """Compute the share of the variance of capability that a prediction explains, at most 1; higher is better.

    ``1 - MSE(p) / MSE(mean c)``: 0 for a constant, so a small error on equally hard questions earns nothing. None if
    the capabilities do not differ beyond the noise. Arguments are those of :func:`squared_errors`.

    Example:
        >>> skill([0.25, 0.75], [0, 4], [4, 4]), skill([0.5, 0.5], [0, 4], [4, 4])
        (0.75, 0.0)
    """
    p, share, samples = _columns(predicted, num_correct, num_samples)
    if not len(p):
        return None
    noise = float(_noise(share, samples).mean()) if debiased else 0.0
    spread = float(np.var(share)) - noise
    error = float(np.mean((p - share) ** 2)) - noise
    return 1.0 - error / spread if spread > 1e-12 else None


def error_parts(predicted: Array, num_correct: Array, num_samples: Array) -> ErrorParts | None:
    """Split the squared error against single responses into error of capability and spread of the responses.

    ``E (p - y)^2 = E (p - c*)^2 + E c* (1 - c*)`` for every p that does not look at the response. All three
    estimates are unbiased, and the equation holds exactly for them too. Every question needs at least 2 samples.

    Example:
        >>> error_parts([0.5], [1], [2])  # c* (1 - c*) is estimated by 1/4 * 2 / (2 - 1)
        ErrorParts(response=0.25, capability=-0.25, spread=0.5)
    """
    p, share, samples = _columns(predicted, num_correct, num_samples)
    if not len(p):
        return None
    noise = _noise(share, samples)
    response = share * (1.0 - p) ** 2 + (1.0 - share) * p**2
    capability = (p - share) ** 2 - noise
    return ErrorParts(float(response.mean()), float(capability.mean()), float((noise * samples).mean()))


def random_brier(expected_accuracy: Array) -> float | None:
    """Compute ``mean(1/3 - c* + c*^2)``, the expected squared error of a confidence drawn uniformly from [0, 1].

    Example:
        >>> round(random_brier([0.5]), 6), round(random_brier([0.0, 1.0]), 6)
        (0.083333, 0.333333)
    """
    truth = as_rates(expected_accuracy, "expected_accuracy")
    return float(np.mean(1.0 / 3.0 - truth + truth**2)) if truth.size else None


def _columns(predicted: Array, num_correct: Array, num_samples: Array) -> tuple[Floats, Floats, Floats]:
    """Return predictions, shares of right samples and numbers of samples, each [Q]."""
    p = as_rates(predicted, "predicted")
    samples, correct = checked_counts(num_samples, num_correct)
    if p.ndim != 1:
        raise InputError(f"Expected `predicted` to be one-dimensional, but got shape {p.shape}.")
    check_same_length(predicted=p, num_correct=np.atleast_1d(correct))
    return p, correct / samples, samples.astype(np.float64)


def _noise(share: Floats, samples: Floats) -> Floats:
    """Return the unbiased estimate of the variance of each share [Q]."""
    if (samples < 2).any():
        raise InputError("Expected `num_samples` to be at least 2, but got 1; or set `debiased=False`.")
    return share * (1.0 - share) / (samples - 1.0)


@dataclass(frozen=True)
class TargetGap:
    """Difference between the verdicts on one response per question and the capabilities.

    Attributes:
        mae: Mean absolute difference.
        spearman: Rank correlation; None if either is constant.
        kendall: Kendall's tau-b; None if either is constant.
    """

    mae: float
    spearman: float | None
    kendall: float | None


def target_gap(correct: Array, expected_accuracy: Array) -> TargetGap | None:
    """Compare the verdicts (0 or 1) on one response to each question with the capabilities; None without questions.

    Example:
        >>> target_gap([0, 1], [0.25, 0.75])
        TargetGap(mae=0.25, spearman=1.0, kendall=1.0)

    Reference:
        arXiv 2602.13540 (the difference between response and capability calibration).
    """
    verdicts, truth = as_rates(correct, "correct"), as_rates(expected_accuracy, "expected_accuracy")
    check_same_length(correct=verdicts, expected_accuracy=truth)
    if not len(truth):
        return None
    return TargetGap(float(np.abs(verdicts - truth).mean()), spearman(verdicts, truth), kendall(verdicts, truth))


def drawn_verdicts(expected_accuracy: Array, *, seed: int = 0) -> np.ndarray:
    """Return the verdict on one response to each question [Q], drawn with its capability: 0.0 or 1.0."""
    truth = as_scores(expected_accuracy, "expected_accuracy")
    return (np.random.default_rng(seed).random(len(truth)) < truth).astype(np.float64)
