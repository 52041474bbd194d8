"""A value with its interval, a change of one, and the responses that both are computed from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Array, Floats
from selfcal_lightning.functional.calibration_bias import ErrorBounds


@dataclass(frozen=True)
class ScoredResponses:
    """Responses with a confidence and a verdict, in any order.

    Attributes:
        confidence: Confidences [N] in [0, 1].
        correct: Labels [N]; an unreadable response is a wrong one.
        question_index: The question of each response [N], as integers or strings.
    """

    confidence: Array
    correct: Array
    question_index: Array


@dataclass(frozen=True)
class Estimate:
    """A value with its bootstrap interval; None where it is not defined.

    Attributes:
        value: The value on all questions.
        low: Lower end of the interval.
        high: Upper end of the interval.
        num_undefined: Resamples without a value (say, without a wrong response); the interval leaves them out.
    """

    value: float | None
    low: float | None
    high: float | None
    num_undefined: int = 0

    @classmethod
    def from_resamples(cls, value: float, resampled: Floats, *, level: float = 0.95) -> Estimate:
        """Build the estimate from its value and the values of the resamples [R]; NaN is "not defined".

        Raises:
            ValueError: If ``level`` lies outside (0, 1).

        Example:
            >>> Estimate.from_resamples(0.5, np.arange(5) / 4, level=0.5)
            Estimate(value=0.5, low=0.25, high=0.75, num_undefined=0)
        """
        if not 0.0 < level < 1.0:
            raise InputError(f"Expected `level` to lie in (0, 1), but got {level}.")
        defined = resampled[~np.isnan(resampled)]
        low, high = (None, None)
        if len(defined):
            low, high = (float(end) for end in np.quantile(defined, [0.5 - level / 2.0, 0.5 + level / 2.0]))
        return cls(None if np.isnan(value) else float(value), low, high, len(resampled) - len(defined))

    @classmethod
    def from_bounds(
        cls, bounds: ErrorBounds | None, *, least: float = -np.inf, most: float = np.inf, level: float = 0.95
    ) -> Estimate:
        """Build the estimate from bounds of a calibration error, its interval cut to what is possible.

        Example:
            >>> Estimate.from_bounds(ErrorBounds(0.125, np.full(9, -0.25), np.full(9, 0.25)), least=0.0)
            Estimate(value=0.125, low=0.0, high=0.375, num_undefined=0)
        """
        if not 0.0 < level < 1.0:
            raise InputError(f"Expected `level` to lie in (0, 1), but got {level}.")
        if bounds is None or np.isnan(bounds.value):
            return cls(None, None, None)
        undefined = int(np.isnan(bounds.least).sum())
        if undefined == len(bounds.least):
            return cls(bounds.value, None, None, undefined)
        low, high = bounds.interval(level)
        return cls(bounds.value, max(low, least), min(high, most), undefined)


@dataclass(frozen=True)
class MetricChange:
    """One metric on the same questions before and after, with intervals from the same resamples.

    Attributes:
        metric: Its key, say "calibration/ECE".
        before: The metric before.
        after: The metric after.
        change: After minus before.
        ratio: After divided by before; None where that is 0.
    """

    metric: str
    before: Estimate
    after: Estimate
    change: Estimate
    ratio: Estimate
