"""The functions behind post-hoc scalers: temperature, Platt and isotonic regression, fitted and stored as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from selfcal_lightning.confidence.fitting.features import log_odds
from selfcal_lightning.confidence.fitting.logistic import fit_logistic, sigmoid
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats

COOLEST, HOTTEST = 0.01, 100.0


@dataclass(frozen=True)
class TemperatureMap:
    """``sigmoid(logit(p) / temperature)``; keeps 0.5 where it is. Only for probabilities."""

    kind: ClassVar[str] = "temperature"
    temperature: float

    @classmethod
    def fit(cls, values: Floats, targets: Floats) -> TemperatureMap:
        """Find the temperature of least cross-entropy within [0.01, 100].

        In ``b = 1 / T`` the cross-entropy of ``sigmoid(b x)`` is convex, so that its slope has one root. A confidence
        that is worth nothing, or less, ends at the hottest temperature: it says about .5 everywhere.

        Args:
            values: Probabilities [N].
            targets: 1 right, 0 wrong, or shares between [N].

        Example:
            >>> map_ = TemperatureMap.fit(np.array([0.9, 0.9, 0.9, 0.9]), np.array([1.0, 1.0, 1.0, 0.0]))
            >>> round(float(map_.transform(np.array([0.9]))[0]), 6)
            0.75

        Reference:
            Guo et al., On Calibration of Modern Neural Networks, 2017, section 4.2.
        """
        from scipy.optimize import brentq

        x = log_odds(values)

        def slope(inverse: float) -> float:
            return float(x @ (sigmoid(inverse * x) - targets))

        if slope(1.0 / HOTTEST) >= 0.0:
            return cls(HOTTEST)
        if slope(1.0 / COOLEST) <= 0.0:
            return cls(COOLEST)
        return cls(1.0 / float(brentq(slope, 1.0 / HOTTEST, 1.0 / COOLEST, xtol=1e-13, rtol=1e-13)))

    def transform(self, values: Floats) -> Floats:
        """Return scaled probabilities [N]."""
        return sigmoid(log_odds(values) / self.temperature)


@dataclass(frozen=True)
class PlattMap:
    """``sigmoid(slope * x + intercept)``, x the log-odds of a probability, or the score itself.

    Attributes:
        slope: Per unit of x.
        intercept: The constant.
        takes_logit: Whether x is a logit.
    """

    kind: ClassVar[str] = "platt"
    slope: float
    intercept: float
    takes_logit: bool

    @classmethod
    def fit(cls, values: Floats, targets: Floats, *, takes_logit: bool) -> PlattMap:
        """Fit slope and intercept to Platt's targets, which are finite whatever the labels.

        Right responses get ``(n1 + 1) / (n1 + 2)`` and wrong ones ``1 / (n0 + 2)``, n1 and n0 being their numbers.

        Args:
            values: Scores [N].
            targets: 1 right, 0 wrong, or shares between [N].
            takes_logit: Whether to take the log-odds of ``values`` first.

        Reference:
            Platt, Probabilistic Outputs for Support Vector Machines, 1999, section 2.2; Lin, Lin and Weng, 2007.
        """
        x = log_odds(values) if takes_logit else values
        right = float(targets.sum())
        high, low = (right + 1.0) / (right + 2.0), 1.0 / (len(targets) - right + 2.0)
        mean, std = float(x.mean()), float(x.std()) or 1.0
        fit = fit_logistic(((x - mean) / std)[:, None], low + (high - low) * targets, l2=0.0 if x.std() else 1.0)
        slope = float(fit.weights[0]) / std
        return cls(slope, fit.intercept - slope * mean, takes_logit)

    def transform(self, values: Floats) -> Floats:
        """Return probabilities [N]."""
        x = log_odds(values) if self.takes_logit else values
        return sigmoid(self.slope * x + self.intercept)


@dataclass(frozen=True)
class IsotonicMap:
    """A rising piecewise-linear function through knots, constant outside them.

    Attributes:
        x: Knots in rising order [K].
        y: Probabilities at them [K].
    """

    kind: ClassVar[str] = "isotonic"
    x: tuple[float, ...]
    y: tuple[float, ...]

    @classmethod
    def fit(cls, values: Floats, targets: Floats) -> IsotonicMap:
        """Fit the rising function of least squared error.

        Args:
            values: Scores [N].
            targets: 1 right, 0 wrong, or shares between [N].

        Example:
            >>> IsotonicMap.fit(np.array([0.1, 0.4, 0.6]), np.array([0.0, 1.0, 0.5]))
            IsotonicMap(x=(0.1, 0.4, 0.6), y=(0.0, 0.75, 0.75))

        Reference:
            Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability Estimates, 2002.
        """
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(values, targets)
        return cls(tuple(model.X_thresholds_.tolist()), tuple(model.y_thresholds_.tolist()))

    @cached_property
    def _knots(self) -> tuple[Floats, Floats]:
        return np.array(self.x), np.array(self.y)

    def transform(self, values: Floats) -> Floats:
        """Return probabilities [N]; NaN passes through."""
        return np.asarray(np.interp(values, *self._knots))


ScalerMap = TemperatureMap | PlattMap | IsotonicMap


def read_map(kind: str, parameters: Mapping[str, Any]) -> ScalerMap:
    """Return the map of ``kind`` with ``parameters`` (its fields), as they stand in a JSON file.

    Raises:
        KeyError: A parameter is missing.
        TypeError: A parameter is missing or unknown.
        ValueError: A parameter is out of its range.

    Example:
        >>> read_map("temperature", {"temperature": 2.0})
        TemperatureMap(temperature=2.0)
    """
    if kind == "temperature":
        scaled = TemperatureMap(**parameters)
        if not scaled.temperature > 0.0:
            raise InputError(f"Expected `temperature` to be positive, but got {scaled.temperature}.")
        map_: ScalerMap = scaled
    elif kind == "platt":
        map_ = PlattMap(**parameters)
        if not (math.isfinite(map_.slope) and math.isfinite(map_.intercept)):
            raise InputError(f"Expected `slope` and `intercept` to be finite, but got {map_}.")
    else:
        map_ = IsotonicMap(*(tuple(float(value) for value in parameters[axis]) for axis in ("x", "y")))
        is_rising = all((np.diff(knots) >= 0.0).all() for knots in (map_.x, map_.y))
        if not map_.x or len(map_.x) != len(map_.y) or not is_rising:
            raise InputError("Expected the knots `x` and `y` to be rising and of one length of at least 1.")
    return map_
