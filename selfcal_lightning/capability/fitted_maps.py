"""Distributions and maps of predicted capabilities, fitted to labelled questions and saved.

A question with predicted capability p has the capability ``theta ~ Beta(s p, s (1 - p))``: mean p, concentration s > 0.
A small s puts theta near 0 and 1, an infinite one at p itself. pass@k is concave in theta, so it needs the
distribution. Fits hold for similar questions and for values that are computed in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from selfcal_lightning.capability.question_table import QuestionTable, as_column, load_capability_pool, question_table
from selfcal_lightning.capability.scoring import QuestionScore, check_origins, origin_digest
from selfcal_lightning.confidence.scaling import IsotonicMap
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_replaceable, check_seal, json_object_or_none, sealed, write_atomically
from selfcal_lightning.data.store.annotations import QuestionAnnotation, question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.metrics.arrays import Array, Floats, as_counts, as_rates, as_scores
from selfcal_lightning.metrics.capability import checked_counts, pass_at_k, simulated_pass_at_k
from selfcal_lightning.records import Question

LEAST_CONCENTRATION, LARGEST_CONCENTRATION = 1e-2, 1e4
# A prediction of exactly 0 or 1 would make a single sample of the other kind impossible.
_LEAST_P = 1e-6


@dataclass(frozen=True)
class InflatedBeta:
    """``theta`` is 1 with chance ``w p``, 0 with chance ``w (1 - p)``, and else drawn from ``Beta(s p, s (1 - p))``."""

    inflation: float
    concentration: float

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
    inside = minimize_scalar(lambda s: loss(math.exp(s)), bounds=ends, method="bounded", options={"xatol": 1e-8})
    return float(grid[top]) if losses[top] <= inside.fun else math.exp(inside.x)


def _counts(predicted: Array, num_correct: Array, num_samples: Array) -> tuple[Floats, Floats, Floats]:
    """Return predictions within (0, 1), right samples and samples of each question [Q]."""
    samples, correct = checked_counts(num_samples, num_correct)
    p, correct, samples = np.broadcast_arrays(as_rates(predicted, "predicted"), correct, samples)
    if not (samples > 1).any():
        raise InputError(f"Expected at least 2 samples of a question, but got {int(samples.max(initial=0))}.")
    return p.clip(_LEAST_P, 1.0 - _LEAST_P), correct.astype(np.float64), samples.astype(np.float64)


def _log_likelihood(p: Floats, correct: Floats, samples: Floats, concentration: float) -> Floats:
    """Return the log of the beta-binomial probability of each count [Q]."""
    from scipy.special import betaln, gammaln

    a, b = concentration * p, concentration * (1.0 - p)
    ways = gammaln(samples + 1.0) - gammaln(correct + 1.0) - gammaln(samples - correct + 1.0)
    return np.asarray(ways + betaln(a + correct, b + samples - correct) - betaln(a, b))


def _mixture(atoms: Floats, body: Floats) -> tuple[float, float]:
    """Return the least negative log-likelihood of ``w atoms + (1 - w) body`` and its w."""
    from scipy.optimize import brentq

    def slope(w: float) -> float:  # falls: the likelihood is concave in w
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
        rows = [np.interp(values, x, y) for x, y in zip(self.x, self.y, strict=True)]
        return np.array(rows).reshape(len(self.k), len(values))


def fit_pass_at_k_maps(scores: Array, num_correct: Array, num_samples: Array, *, ks: Sequence[int]) -> PassAtKMaps:
    """Fit an isotonic map of a score to the unbiased pass@k of calibration questions, for each k."""
    ordered = tuple(sorted(set(ks)))
    fitted = [IsotonicMap.fit(as_scores(scores, "scores"), pass_at_k(num_samples, num_correct, k)) for k in ordered]
    return PassAtKMaps(ordered, tuple(one.x for one in fitted), tuple(one.y for one in fitted))


def quantile_mapping(scores: Array, distribution: Array, *, ties: Literal["mean", "first"] = "mean") -> Floats:
    """Map scores to the distribution of known values, by rank.

    ``quantile(distribution, (rank - 1) / (N - 1))`` with ranks from 1 to N; a lone score gets the median.
    """
    from scipy.stats import rankdata

    values, wanted = as_scores(scores, "scores"), as_scores(distribution, "distribution")
    ranks = rankdata(values, method="average" if ties == "mean" else "ordinal")
    places = (ranks - 1.0) / (len(values) - 1) if len(values) > 1 else np.array([0.5])
    return np.asarray(np.quantile(wanted, places), dtype=np.float64)


@dataclass(frozen=True)
class CalibrationQuestions:
    predicted: Floats
    table: QuestionTable
    questions: tuple[Question, ...]
    scored_by: str  # digest of what predicted the capabilities


def calibration_questions(
    store_dir: str, *, split: str | None, name: str, asked: Sequence[QuestionScore] = ()
) -> CalibrationQuestions:
    """Read the questions of a split that have a value of the name; none of them may be in ``asked``."""
    read = load_capability_pool(store_dir, split=split, task=None)
    keys = [(question.id, question_digest(question)) for question in read.questions]
    values = question_values(store_dir, name, keys)
    check_origins(read, [name])
    record = QuestionAnnotation(store_dir, name).record
    digest = origin_digest({} if record is None else record.origin)
    if {one.scored_by for one in asked} - {None, digest}:
        raise InputError(f"`scores` are mapped, or of another probe, model or query than {name!r} in {store_dir}.")
    known = ~np.isnan(column := as_column(values))
    if not known.any():
        way_out = f"Score them first: `selfcal score-questions --store_dir {store_dir} --split {split}`."
        raise InputError(f"No question of split {split!r} in {store_dir} has a value of {name!r}. {way_out}")
    table = question_table(read.pool.entries).select(known)
    table.check_judged("calibration_split", str(split))
    if shared := {one.id for one in asked}.intersection(table.question_id.tolist()):
        which = f"{len(shared):,} calibration questions, such as {min(shared)!r}, are among those that are predicted"
        raise InputError(f"{which}. Name another `calibration_split`.")
    return CalibrationQuestions(column[known], table, tuple(compress(read.questions, known)), digest)


MapName = Literal["isotonic", "quantile"]
POWER, BETA, INFLATED, MAPS = "power", "beta", "inflated_beta", "maps"
FORMAT, VERSION = "selfcal_lightning.capability_maps", 2


@dataclass(frozen=True)
class CapabilityMaps:
    """Maps of a predicted capability p, fitted on labelled questions."""

    knots: tuple[float, ...]
    heights: tuple[float, ...]
    distribution: tuple[float, ...]
    concentration: float
    inflated: InflatedBeta
    per_k: PassAtKMaps

    def apply(self, name: MapName, p: Floats) -> Floats:
        if name == "isotonic":
            return np.interp(p, self.knots, self.heights)
        if name == "quantile":
            return quantile_mapping(p, self.distribution)
        raise unknown_name("map", name, get_args(MapName))

    def pass_at_k(self, p: Floats, ks: Sequence[int]) -> dict[str, Floats]:
        """Return pass@k [K, Q] predicted in each way; nan where no map for a k was fitted."""
        known = dict(zip(self.per_k.k, self.per_k.transform(p), strict=True))
        return {
            **power_alone(p, ks),
            BETA: np.stack([beta_pass_at_k(p, k, concentration=self.concentration) for k in ks]),
            INFLATED: np.stack([self.inflated.pass_at_k(p, k) for k in ks]),
            MAPS: np.stack([known.get(k, np.full(len(p), np.nan)) for k in ks]),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CapabilityMaps:
        per_k = content["per_k"]
        plain = {name: tuple(content[name]) for name in ("knots", "heights", "distribution")}
        maps = PassAtKMaps(tuple(per_k["k"]), *(tuple(map(tuple, per_k[side])) for side in ("x", "y")))
        inflated = InflatedBeta(**content["inflated"])
        return cls(**plain, concentration=content["concentration"], inflated=inflated, per_k=maps)


@dataclass(frozen=True)
class KeptMaps:
    """Maps as saved, with what identifies their values."""

    maps: CapabilityMaps
    estimator: str
    scored_by: str | None
    fitted_on: FittedOn

    @property
    def name(self) -> str:
        return f"maps of {self.estimator}"

    def check(self, scored_by: Iterable[str | None], question_ids: Iterable[str]) -> None:
        """Raise InputError if values were computed differently, or questions are those of the fit."""
        if self.scored_by is not None and set(scored_by) - {None, self.scored_by}:
            raise InputError(
                f"Capabilities are mapped, or of another probe, model or query than the values {self.estimator!r} that "
                "the maps were fitted to. Give those of `selfcal score-questions`, or fit maps of the same kind."
            )
        check_not_fitted_on(question_ids, self)

    def save(self, path: str | Path) -> None:
        check_maps_target(path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        record = {
            "format": FORMAT, "version": VERSION, "estimator": self.estimator, "scored_by": self.scored_by,
            "fitted_on": self.fitted_on.as_json(), **asdict(self.maps),
        }  # fmt: skip
        write_atomically(Path(path), sealed(record))


def load_maps(path: str | Path) -> KeptMaps:
    if not Path(path).is_file():
        raise FileNotFoundError(f"`maps`: there is no file {path}. `selfcal fit-capability-maps` writes one.")
    record = json_object_or_none(Path(path)) or {}
    if record.get("format") != FORMAT or record.get("version") != VERSION:
        found = f"{record.get('format')!r} of version {record.get('version')!r}"
        raise InputError(f"Expected {path} to hold maps of version {VERSION}, but got {found}. Fit them again.")
    check_seal(record, Path(path), way_out="Fit them again.")
    try:
        fitted_on = FittedOn.from_json(record["fitted_on"])
        return KeptMaps(CapabilityMaps.from_json(record), record["estimator"], record["scored_by"], fitted_on)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"Expected {path} to hold whole maps, but got {error!r}. Fit them again.") from error


def check_maps_target(path: str | Path) -> None:
    check_replaceable(
        path, lambda file: (json_object_or_none(file) or {}).get("format") == FORMAT, option="output",
        kind="earlier maps of capabilities",
    )  # fmt: skip


def fit_capability_maps(
    predicted: Floats | Sequence[float],
    num_correct: Floats | Sequence[float],
    num_samples: np.ndarray | Sequence[int],
    *,
    ks: Sequence[int] | None = None,
) -> CapabilityMaps:
    p, samples = as_scores(predicted, "predicted"), np.asarray(num_samples)
    most = int(samples.min(initial=np.iinfo(np.int64).max)) if len(samples) else 0
    wanted = range(1, most + 1) if ks is None else [k for k in ks if k <= most]
    shares = np.asarray(num_correct, dtype=np.float64) / samples
    rising = IsotonicMap.fit(p, shares)
    return CapabilityMaps(
        knots=rising.x,
        heights=rising.y,
        distribution=tuple(np.sort(shares).tolist()),
        concentration=fit_concentration(p, num_correct, samples),
        inflated=fit_inflated_beta(p, num_correct, samples),
        per_k=fit_pass_at_k_maps(p, num_correct, samples, ks=wanted) if len(wanted) else PassAtKMaps((), (), ()),
    )


def maps_of(found: CalibrationQuestions, estimator: str, *, ks: Sequence[int] | None = None) -> KeptMaps:
    table = found.table
    fitted_on = FittedOn.from_questions(found.questions, num_responses=int(table.num_samples.sum()))
    maps = fit_capability_maps(found.predicted, table.num_correct, table.num_samples, ks=ks)
    return KeptMaps(maps, estimator, found.scored_by, fitted_on)


def power_alone(p: Floats, ks: Sequence[int]) -> dict[str, Floats]:
    """Return ``1 - (1 - p)^k`` [K, Q], which needs no calibration questions and is too high for a predicted p."""
    return {POWER: np.stack([simulated_pass_at_k(p, k) for k in ks])}
