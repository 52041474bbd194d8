"""Post-hoc scalers: one confidence turned into a calibrated probability by temperature, Platt or isotonic regression.

Scaling changes the values of a confidence but not its ranking (isotonic regression may add ties).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

from selfcal_lightning.confidence import features
from selfcal_lightning.confidence.base import P_TRUE, STORED
from selfcal_lightning.confidence.fitted_files import save_fitted
from selfcal_lightning.confidence.registry import KnownConfidence, may_be_probability, pool_dependent
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError, RunError, unknown_name
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import QuestionSamples, Sample


def fit_logistic(columns: Floats, targets: Floats, *, l2: float = 1.0) -> tuple[Floats, float]:
    r"""Return weights [F] and intercept of ``p = sigmoid(intercept + x . weights)``, fitted to targets in [0, 1] [N].

    ``min sum_i CE(t_i, sigmoid(b + x_i . w)) + l2 / 2 |w|^2`` with ``CE(t, p) = -t log p - (1 - t) log(1 - p)``; a
    soft target t counts as right with weight t and wrong with weight 1 - t. The intercept is not regularised.
    """
    from scipy.optimize import minimize

    check_both(targets)
    design = np.column_stack([columns, np.ones(len(columns))])
    ridge = np.append(np.full(columns.shape[1], l2), 0.0)

    def objective(theta: Floats) -> float:
        z = design @ theta
        return float(np.logaddexp(0.0, z).sum() - targets @ z + 0.5 * ridge @ theta**2)

    def gradient(theta: Floats) -> Floats:
        return np.asarray(design.T @ (sigmoid(design @ theta) - targets) + ridge * theta)

    def hessian(theta: Floats) -> Floats:
        p = sigmoid(design @ theta)
        return np.asarray((design * (p * (1.0 - p))[:, None]).T @ design + np.diag(ridge))

    start = np.zeros(design.shape[1])
    tolerance = 1e-9 * len(targets)
    found = minimize(objective, start, jac=gradient, hess=hessian, method="trust-exact", options={"gtol": tolerance})
    # Rounding may stop the last step just short of a tolerance as tight as this one; a hundred times it is still tight.
    if not found.success and np.abs(gradient(found.x)).max() > 100.0 * tolerance:
        raise RunError(f"Expected the logistic fit to converge, but got: {found.message}")
    return found.x[:-1], float(found.x[-1])


def check_both(targets: Floats) -> None:
    if not 0.0 < float(targets.mean()) < 1.0:
        raise InputError(f"Expected right and wrong responses to fit on, but all {len(targets)} are {targets[0]:g}.")


def centre_and_scale(values: Floats) -> tuple[Floats, Floats]:
    """Return mean and standard deviation of each feature [D]; features that never change keep their scale."""
    centre, scale = values.mean(axis=0), values.std(axis=0)
    return centre, np.where(scale > 1e-9 * (np.abs(centre) + 1.0), scale, 1.0)


def sigmoid(z: Floats) -> Floats:
    """Compute ``1 / (1 + exp(-z))`` without overflow."""
    e = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0.0, 1.0, e) / (1.0 + e))


def sigmoid_of(z: float) -> float:
    e = math.exp(-abs(z))
    return (1.0 if z >= 0.0 else e) / (1.0 + e)


COOLEST, HOTTEST = 0.01, 100.0


@dataclass(frozen=True)
class TemperatureMap:
    """``sigmoid(logit(p) / temperature)``; leaves 0.5 unchanged. Only for probabilities."""

    kind: ClassVar[str] = "temperature"
    temperature: float

    @classmethod
    def fit(cls, values: Floats, targets: Floats) -> Self:
        """Find the temperature in [0.01, 100] with the lowest cross-entropy.

        The cross-entropy of ``sigmoid(b x)`` is convex in ``b = 1 / T``, so its derivative has one root. An
        uninformative confidence gets the highest temperature and becomes about .5 everywhere.
        """
        from scipy.optimize import brentq

        x = features.log_odds(values)

        def slope(inverse: float) -> float:
            return float(x @ (sigmoid(inverse * x) - targets))

        if slope(1.0 / HOTTEST) >= 0.0:
            return cls(HOTTEST)
        if slope(1.0 / COOLEST) <= 0.0:
            return cls(COOLEST)
        return cls(1.0 / float(brentq(slope, 1.0 / HOTTEST, 1.0 / COOLEST, xtol=1e-13, rtol=1e-13)))

    def transform(self, values: Floats) -> Floats:
        return sigmoid(features.log_odds(values) / self.temperature)

    def scaled(self, value: float) -> float:
        return sigmoid_of(features.log_odds_of(value) / self.temperature)


@dataclass(frozen=True)
class PlattMap:
    """``sigmoid(slope * x + intercept)``, where x is the log-odds of a probability, or an unbounded score itself."""

    kind: ClassVar[str] = "platt"
    slope: float
    intercept: float
    takes_logit: bool

    @classmethod
    def fit(cls, values: Floats, targets: Floats, *, takes_logit: bool) -> Self:
        """Fit slope and intercept to Platt's targets, which keep the fit finite.

        The n1 right responses get ``(n1 + 1) / (n1 + 2)`` and the n0 wrong ones ``1 / (n0 + 2)``.
        """
        x = features.log_odds(values) if takes_logit else values
        right = float(targets.sum())
        high, low = (right + 1.0) / (right + 2.0), 1.0 / (len(targets) - right + 2.0)
        (mean,), (std,) = centre_and_scale(x[:, None])
        standard = (x - mean) / std
        l2 = 0.0 if standard.std() > 0.5 else 1.0  # 1, or about 0 where all are alike
        weights, intercept = fit_logistic(standard[:, None], low + (high - low) * targets, l2=l2)
        slope = float(weights[0] / std)
        return cls(slope, float(intercept - slope * mean), takes_logit)

    def transform(self, values: Floats) -> Floats:
        x = features.log_odds(values) if self.takes_logit else values
        return sigmoid(self.slope * x + self.intercept)

    def scaled(self, value: float) -> float:
        x = features.log_odds_of(value) if self.takes_logit else value
        return sigmoid_of(self.slope * x + self.intercept)


@dataclass(frozen=True)
class IsotonicMap:
    """A non-decreasing piecewise-linear function through knots, constant outside them."""

    kind: ClassVar[str] = "isotonic"
    x: tuple[float, ...]  # knots in ascending order [K]
    y: tuple[float, ...]  # probabilities at them [K]

    @classmethod
    def fit(cls, values: Floats, targets: Floats) -> Self:
        """Fit the non-decreasing function with the least squared error."""
        from sklearn.isotonic import IsotonicRegression

        model = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(values, targets)
        return cls(tuple(model.X_thresholds_.tolist()), tuple(model.y_thresholds_.tolist()))

    @cached_property
    def _knots(self) -> tuple[Floats, Floats]:
        return np.array(self.x), np.array(self.y)

    def transform(self, values: Floats) -> Floats:
        """Return probabilities [N]; NaN passes through."""
        return np.asarray(np.interp(values, *self._knots))

    def scaled(self, value: float) -> float:
        return float(np.interp(value, *self._knots))


ScalerMap = TemperatureMap | PlattMap | IsotonicMap


def read_map(kind: str, parameters: Mapping[str, Any]) -> ScalerMap:
    if kind == "temperature":
        found: ScalerMap = TemperatureMap(**parameters)
        is_sound = parameters["temperature"] > 0.0
    elif kind == "platt":
        found = PlattMap(**parameters)
        is_sound = math.isfinite(found.slope) and math.isfinite(found.intercept)
    else:
        found = IsotonicMap(tuple(parameters["x"]), tuple(parameters["y"]))
        is_sound = len(found.x) == len(found.y) > 0 and all((np.diff(k) >= 0.0).all() for k in (found.x, found.y))
    if not is_sound:
        raise InputError(f"Expected the parameters of {kind} scaling, but got {found}.")
    return found


ScalerKind = Literal["temperature", "platt", "isotonic"]
SCALER_KINDS: tuple[ScalerKind, ...] = ("temperature", "platt", "isotonic")


@dataclass(frozen=True)
class Scaler:
    """Adds a calibrated version of one confidence to a sample (a ``SampleScorer``)."""

    name: str
    source: str
    map: ScalerMap
    needs_pool: bool
    fitted_on: FittedOn
    before: features.ConfidenceScores
    after: features.ConfidenceScores
    held_out_before: features.ConfidenceScores | None = None
    held_out_after: features.ConfidenceScores | None = None

    @property
    def requires(self) -> tuple[str, ...]:
        return (self.source,)

    def score_sample(self, sample: Sample) -> float | None:
        value = features.feature_value(sample, self.source)
        return None if value is None else self.map.scaled(value)

    def as_json(self) -> dict[str, Any]:
        held_out = None
        if self.held_out_before is not None and self.held_out_after is not None:
            held_out = {"before": asdict(self.held_out_before), "after": asdict(self.held_out_after)}
        return {
            "name": self.name, "source": self.source, "parameters": asdict(self.map), "needs_pool": self.needs_pool,
            "fitted_on": self.fitted_on.as_json(), "held_out_scores": held_out,
            "scores": {"before": asdict(self.before), "after": asdict(self.after)},
        }  # fmt: skip

    @classmethod
    def from_json(cls, kind: str, content: Mapping[str, Any]) -> Self:
        held_out = content["held_out_scores"] or {}
        scores = content["scores"] | {f"held_out_{name}": row for name, row in held_out.items()}
        read: dict[str, Any] = {name: content[name] for name in ("name", "source", "needs_pool")}
        read |= {name: features.ConfidenceScores(**row) for name, row in scores.items()}
        fitted_on = FittedOn.from_json(content["fitted_on"])
        return cls(map=read_map(kind, content["parameters"]), fitted_on=fitted_on, **read)

    def save(self, path: str | Path) -> None:
        save_fitted(path, self.map.kind, self.as_json())


def fit_scaler(
    pool: Sequence[QuestionSamples],
    kind: ScalerKind,
    *,
    source: str = P_TRUE,
    name: str | None = None,
    held_out: Sequence[QuestionSamples] | None = None,
    known: Sequence[KnownConfidence] = (),
) -> Scaler:
    """Fit a scaler of one confidence to correctness on a calibration split.

    Responses without the confidence are left out and counted; unreadable ones are wrong. If the source depends on other
    responses, so does the scaler (``needs_pool``).
    """
    name = f"{source}_{kind}" if name is None else name
    check_new_name(name, (source,))
    if kind not in SCALER_KINDS:
        raise unknown_name("kind", kind, SCALER_KINDS)
    table = features.ResponseTable.from_pool(pool, (source,))
    check_labels(table)
    used = table.is_complete
    if not used.any():
        raise InputError(f"Expected responses with the confidence {source!r} to fit on, but got none.")
    values, targets = table.values[used, 0], table.correct[used]
    check_both(targets)
    # Of an estimator that is not known here, only the range of the values tells.
    is_probability = may_be_probability(source, known) and bool(((values >= 0.0) & (values <= 1.0)).all())
    if kind == "isotonic":
        map_: ScalerMap = IsotonicMap.fit(values, targets)
    elif kind == "platt":
        map_ = PlattMap.fit(values, targets, takes_logit=is_probability)
    elif is_probability:
        map_ = TemperatureMap.fit(values, targets)
    else:
        raise InputError(f"Temperature scaling needs a probability, which {source!r} is not. Use Platt or isotonic.")
    fitted_on = FittedOn.from_pool(pool, used)
    before, after = _scores(table, source, name, map_, known)
    scaler = Scaler(name, source, map_, bool(pool_dependent([source], known)), fitted_on, before, after)
    if held_out is None:
        return scaler
    check_not_fitted_on(held_out, scaler)
    held_before, held_after = _scores(features.ResponseTable.from_pool(held_out, (source,)), source, name, map_, known)
    return replace(scaler, held_out_before=held_before, held_out_after=held_after)


def check_labels(table: features.ResponseTable) -> None:
    unknown = np.isnan(table.correct)
    if unknown.any():
        question = table.question_ids[int(table.question[unknown][0])]
        found = f"{int(unknown.sum())} of {len(unknown)} responses are neither right nor wrong"
        raise InputError(
            f'{found}, such as one to {question!r}, which has no reference. A fusion needs none with the target "ssc".'
        )


def check_new_name(name: str, sources: Sequence[str]) -> None:
    taken = (*STORED, *sources)
    if not name or name in taken:
        raise InputError(f"Expected `name` to be a new one, but got {name!r}; taken are {', '.join(taken)}.")


def _scores(
    table: features.ResponseTable, source: str, name: str, map_: ScalerMap, known: Sequence[KnownConfidence]
) -> tuple[features.ConfidenceScores, features.ConfidenceScores]:
    values = table.values[:, 0]
    before = features.score_confidence(source, values, table.correct, table.question, known)
    return before, features.score_confidence(name, map_.transform(values), table.correct, table.question)
