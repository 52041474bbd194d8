"""A distribution of capability around its prediction; pass@k needs it, since it is concave in the capability.

A question with predicted capability p has the capability ``theta ~ Beta(s p, s (1 - p))``: mean p, concentration s > 0.
A small s puts theta near 0 and 1, an infinite one at p itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.metrics.arrays import Array, Floats, as_counts, as_rates, as_scores, check_same_length
from selfcal_lightning.metrics.capability import checked_counts, pass_at_k

LEAST_CONCENTRATION, LARGEST_CONCENTRATION = 1e-2, 1e4
# A prediction of exactly 0 or 1 would make a single sample of the other kind impossible.
_LEAST_P = 1e-6


@dataclass(frozen=True)
class InflatedBeta:
    """A Beta distribution with atoms at 0 and 1 that keep its mean.

    ``theta`` is 1 with chance ``w p``, 0 with chance ``w (1 - p)``, and else drawn from ``Beta(s p, s (1 - p))``.
    """

    inflation: float
    concentration: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.inflation <= 1.0:
            raise InputError(f"Expected `inflation` to lie in [0, 1], but got {self.inflation}.")
        if not self.concentration > 0.0:
            raise InputError(f"Expected `concentration` to be above 0, but got {self.concentration}.")

    def pass_at_k(self, p: Array, k: Array | int) -> Floats:
        """Compute the expected chance that one of k samples is right; p and k broadcast."""
        atoms = np.where(as_counts(k, "k") > 0, as_rates(p, "p"), 0.0)
        body = beta_pass_at_k(p, k, concentration=self.concentration)
        return np.asarray(self.inflation * atoms + (1.0 - self.inflation) * body)


def beta_pass_at_k(p: Array, k: Array | int, *, concentration: Array | float) -> Floats:
    """Compute expected pass@k where the capability is Beta distributed around p."""
    chances, draws, strength = np.broadcast_arrays(
        as_rates(p, "p"), as_counts(k, "k"), np.asarray(concentration, dtype=np.float64)
    )
    if not (strength > 0.0).all():
        raise InputError(f"Expected `concentration` to be above 0, but got {strength[~(strength > 0.0)].flat[0]}.")
    step = np.arange(int(draws.max(initial=0)))
    # B(a, b + k) / B(a, b) = prod_{j < k} (b + j) / (s + j) = prod_{j < k} (1 - p / (1 + j / s)).
    with np.errstate(divide="ignore"):
        logs = np.log1p(-chances[..., None] / (1.0 + step / strength[..., None]))
    return np.abs(np.expm1(np.where(step < draws[..., None], logs, 0.0).sum(axis=-1)))


def fit_concentration(predicted: Array, num_correct: Array, num_samples: Array) -> float:
    """Find the maximum-likelihood concentration s of the counts: ``c ~ BetaBinomial(n, s p, s (1 - p))``."""
    p, correct, samples = _counts(predicted, num_correct, num_samples)
    return _least(lambda s: -float(_log_likelihood(p, correct, samples, s).sum()))


def fit_inflated_beta(predicted: Array, num_correct: Array, num_samples: Array) -> InflatedBeta:
    """Find the maximum-likelihood inflation and concentration of the counts.

    ``P(c) = w ((1 - p) [c = 0] + p [c = n]) + (1 - w) BetaBinomial(c; n, s p, s (1 - p))``. For each s the best w
    is the root of a decreasing derivative; s is searched within [0.01, 10000].
    """
    p, correct, samples = _counts(predicted, num_correct, num_samples)
    atoms = (1.0 - p) * (correct == 0) + p * (correct == samples)

    def best(s: float) -> tuple[float, float]:
        return _mixture(atoms, np.exp(_log_likelihood(p, correct, samples, s)))

    concentration = _least(lambda s: best(s)[0])
    return InflatedBeta(best(concentration)[1], concentration)


def _least(loss: Callable[[float], float]) -> float:
    """Return the concentration of least loss: the best of a grid, refined between its neighbours."""
    from scipy.optimize import minimize_scalar

    # The loss of an inflated Beta may have two minima, and a bounded search never evaluates its ends.
    grid = np.geomspace(LEAST_CONCENTRATION, LARGEST_CONCENTRATION, 29)
    losses = [loss(float(s)) for s in grid]
    top = int(np.argmin(losses))
    ends = np.log(grid[[max(top - 1, 0), min(top + 1, len(grid) - 1)]])
    inside = minimize_scalar(
        lambda log_s: loss(math.exp(log_s)), bounds=ends, method="bounded", options={"xatol": 1e-8}
    )
    return float(grid[top]) if losses[top] <= inside.fun else math.exp(inside.x)


def _counts(predicted: Array, num_correct: Array, num_samples: Array) -> tuple[Floats, Floats, Floats]:
    """Return predictions within (0, 1), right samples and samples of each question [Q]."""
    samples, correct = checked_counts(num_samples, num_correct)
    p, correct, samples = np.broadcast_arrays(as_rates(predicted, "predicted"), correct, samples)
    if p.ndim != 1 or not (samples > 1).any():
        most = int(samples.max(initial=0))
        raise InputError(f"Expected `predicted` [Q] and at least 2 samples a question, but got {p.shape} and {most}.")
    return p.clip(_LEAST_P, 1.0 - _LEAST_P), correct.astype(np.float64), samples.astype(np.float64)


def _log_likelihood(p: Floats, correct: Floats, samples: Floats, concentration: float) -> Floats:
    """Return the log of the beta-binomial probability of each count [Q]."""
    from scipy.special import betaln, gammaln

    a, b = concentration * p, concentration * (1.0 - p)
    ways = gammaln(samples + 1.0) - gammaln(correct + 1.0) - gammaln(samples - correct + 1.0)
    return np.asarray(ways + betaln(a + correct, b + samples - correct) - betaln(a, b))


def _mixture(atoms: Floats, body: Floats) -> tuple[float, float]:
    """Return the least negative log-likelihood of ``w atoms + (1 - w) body`` and its w.

    The likelihood is concave in w, so its slope ``sum (atoms - body) / (w atoms + (1 - w) body)`` has one root.
    """
    from scipy.optimize import brentq

    def slope(w: float) -> float:
        return float(((atoms - body) / np.maximum(w * atoms + (1.0 - w) * body, 1e-300)).sum())

    low, high = 0.0, 1.0 - 1e-9
    w = low if slope(low) <= 0.0 else high if slope(high) >= 0.0 else float(brentq(slope, low, high, xtol=1e-12))
    return -float(np.log(np.maximum(w * atoms + (1.0 - w) * body, 1e-300)).sum()), w


@dataclass(frozen=True)
class PassAtKMaps:
    """For each k a rising piecewise-linear function of a score: knots x with pass@k y, constant outside."""

    k: tuple[int, ...]
    x: tuple[tuple[float, ...], ...]
    y: tuple[tuple[float, ...], ...]

    def transform(self, scores: Array) -> Floats:
        """Return the predicted pass@k [K, Q] of scores [Q]."""
        values = as_scores(scores, "scores")
        return np.array([np.interp(values, x, y) for x, y in zip(self.x, self.y, strict=True)]).reshape(len(self.k), -1)


def isotonic_knots(scores: Array, targets: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit the increasing function of least squared error; it is constant outside of its knots."""
    from sklearn.isotonic import IsotonicRegression

    values, wanted = as_scores(scores, "scores"), as_rates(targets, "targets")
    check_same_length(scores=values, targets=wanted)
    if not len(values):
        raise InputError("Expected `scores` to hold at least one score to fit a map to, but got none.")
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(values, wanted)
    return tuple(model.X_thresholds_.tolist()), tuple(model.y_thresholds_.tolist())


def fit_pass_at_k_maps(scores: Array, num_correct: Array, num_samples: Array, *, ks: Sequence[int]) -> PassAtKMaps:
    """Fit an isotonic map of a score to the unbiased pass@k of calibration questions, for each k."""
    ordered = tuple(sorted(set(ks)))
    knots = [isotonic_knots(scores, pass_at_k(num_samples, num_correct, k)) for k in ordered]
    return PassAtKMaps(ordered, tuple(x for x, _ in knots), tuple(y for _, y in knots))


def quantile_mapping(scores: Array, distribution: Array, *, ties: Literal["mean", "first"] = "mean") -> Floats:
    """Map scores to the distribution of known values, by rank.

    ``quantile(distribution, (rank - 1) / (N - 1))`` with ranks from 1 to N; a lone score gets the median.
    """
    from scipy.stats import rankdata

    values, wanted = as_scores(scores, "scores"), as_scores(distribution, "distribution")
    if not len(wanted):
        raise InputError("Expected `distribution` to hold at least one value, but got none.")
    if not len(values):
        return np.zeros(0)
    ranks = rankdata(values, method="average" if ties == "mean" else "ordinal")
    places = (ranks - 1.0) / (len(values) - 1) if len(values) > 1 else np.array([0.5])
    return np.asarray(np.quantile(wanted, places), dtype=np.float64)
