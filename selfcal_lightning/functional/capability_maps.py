"""Maps fitted on calibration questions: a score to capability, to pass@k for each k, or to a known distribution.

By Jensen's inequality ``1 - (1 - p)^k`` of a predicted p is too high. A map for each k, fitted to the pass@k that the
calibration questions show, has no such bias on questions like them; on others it is not safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats, as_rates, as_scores, check_same_length
from selfcal_lightning.functional.capability import pass_at_k
from selfcal_lightning.functional.discrimination import average_rank


@dataclass(frozen=True)
class PassAtKMaps:
    """A rising piecewise-linear function of a score for each k, constant outside its knots.

    Attributes:
        k: The numbers of samples [K], rising.
        x: Knots in rising order, one tuple for each k.
        y: pass@k at the knots, likewise.
    """

    k: tuple[int, ...]
    x: tuple[tuple[float, ...], ...]
    y: tuple[tuple[float, ...], ...]

    def transform(self, scores: Array) -> Floats:
        """Return the predicted pass@k [K, Q] of scores [Q]; it never falls from one k to the next."""
        values = as_scores(scores, "scores")
        return np.array([np.interp(values, x, y) for x, y in zip(self.x, self.y, strict=True)]).reshape(len(self.k), -1)


def isotonic_knots(scores: Array, targets: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit the rising function of least squared error; outside its knots it is meant to be constant.

    Args:
        scores: Scores [N]; any real numbers.
        targets: What they should become [N], in [0, 1].

    Returns:
        Its knots in rising order and its values in [0, 1] there. Equal scores share one knot.

    Raises:
        ValueError: If the lengths differ, there is nothing to fit, or a value is unknown or out of its range.

    Example:
        >>> isotonic_knots([0.1, 0.4, 0.6], [0.0, 1.0, 0.5])
        ((0.1, 0.4, 0.6), (0.0, 0.75, 0.75))

    Reference:
        Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, 2002.
    """
    from sklearn.isotonic import IsotonicRegression

    values, wanted = as_scores(scores, "scores"), as_rates(targets, "targets")
    check_same_length(scores=values, targets=wanted)
    if not len(values):
        raise InputError("Expected `scores` to hold at least one score to fit a map to, but got none.")
    model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(values, wanted)
    return tuple(model.X_thresholds_.tolist()), tuple(model.y_thresholds_.tolist())


def fit_pass_at_k_maps(scores: Array, num_correct: Array, num_samples: Array, *, ks: Sequence[int]) -> PassAtKMaps:
    """Fit an isotonic map of a score to the unbiased pass@k of calibration questions, for each k.

    Args:
        scores: A score of each question [Q], such as its predicted capability.
        num_correct: Right samples of each question [Q].
        num_samples: n of each question [Q] or one number; at least the largest k.
        ks: The numbers of samples that maps are wanted for.

    Raises:
        ValueError: If lengths differ, a value is out of its range, a k is above n, or there is no k.

    Example:
        >>> maps = fit_pass_at_k_maps([0.2, 0.8], [1, 3], 4, ks=[1, 2])
        >>> maps.transform([0.0, 0.5, 1.0]).round(6).tolist()  # pass@1 is 1/4 and 3/4, pass@2 is 1/2 and 1
        [[0.25, 0.5, 0.75], [0.5, 0.75, 1.0]]
    """
    if not len(ks):
        raise InputError("Expected `ks` to hold at least one number of samples, but got none.")
    ordered = tuple(sorted(set(ks)))
    knots = [isotonic_knots(scores, pass_at_k(num_samples, num_correct, k)) for k in ordered]
    return PassAtKMaps(ordered, tuple(x for x, _ in knots), tuple(y for _, y in knots))


def quantile_mapping(scores: Array, distribution: Array, *, ties: Literal["mean", "first"] = "mean") -> Floats:
    """Give scores the distribution of known values: the share of scores below one becomes the quantile that it gets.

    ``quantile(distribution, (rank - 1) / (N - 1))`` with ranks from 1 to N; a lone score gets the median.

    Args:
        scores: Scores of the questions at hand [N]; only their order counts.
        distribution: Values whose distribution is wanted [M], such as c* of calibration questions.
        ties: "mean" gives equal scores the mean of their ranks, whatever their order. "first" ranks the earlier one
            lower, as the published evaluation does.

    Returns:
        The values [N].

    Raises:
        ValueError: If a value is None or NaN, or there is no value to draw quantiles from.

    Example:
        >>> quantile_mapping([0.1, 0.9, 0.5], [0.0, 0.0, 0.2, 0.9, 1.0]).tolist()
        [0.0, 1.0, 0.2]
    """
    values, wanted = as_scores(scores, "scores"), as_scores(distribution, "distribution")
    if ties not in ("mean", "first"):
        raise InputError(f'Expected `ties` to be "mean" or "first", but got {ties!r}.')
    if not len(wanted):
        raise InputError("Expected `distribution` to hold at least one value, but got none.")
    if not len(values):
        return np.zeros(0)
    ranks = average_rank(values) if ties == "mean" else np.argsort(np.argsort(values, kind="stable")) + 1.0
    places = (ranks - 1.0) / (len(values) - 1) if len(values) > 1 else np.array([0.5])
    return np.asarray(np.quantile(wanted, places), dtype=np.float64)
