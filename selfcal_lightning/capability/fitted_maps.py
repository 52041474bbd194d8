"""Maps and distributions of predicted capabilities, fitted to labelled questions and saved.

They hold for similar questions and for values that are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from selfcal_lightning.capability.distributions import (
    InflatedBeta,
    PassAtKMaps,
    beta_pass_at_k,
    fit_concentration,
    fit_inflated_beta,
    fit_pass_at_k_maps,
    isotonic_knots,
    quantile_mapping,
)
from selfcal_lightning.capability.question_table import QuestionTable, as_column, load_capability_pool, question_table
from selfcal_lightning.capability.scoring import QuestionScore, check_origins, origin_digest
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_replaceable, check_seal, json_object_or_none, sealed, write_atomically
from selfcal_lightning.data.store.annotations import QuestionAnnotation, question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.capability import simulated_pass_at_k
from selfcal_lightning.records import Question


@dataclass(frozen=True)
class CalibrationQuestions:
    """Q labelled questions with predicted capabilities."""

    predicted: Floats
    table: QuestionTable
    questions: tuple[Question, ...]
    scored_by: str  # digest of what predicted the capabilities


def calibration_questions(
    store_dir: str, *, split: str | None, name: str, asked: Sequence[QuestionScore] = ()
) -> CalibrationQuestions:
    """Read the questions of a split that have a value of the name."""
    read = load_capability_pool(store_dir, split=split, task=None)
    keys = [(question.id, question_digest(question)) for question in read.questions]
    values = question_values(store_dir, name, keys)
    check_origins(read, [name])
    record = QuestionAnnotation(store_dir, name).record
    digest = origin_digest({} if record is None else record.origin)
    if {one.scored_by for one in asked} - {None, digest}:
        raise InputError(f"`scores` are of another probe, model or query than the values {name!r} in {store_dir}.")
    known = ~np.isnan(column := as_column(values))
    if not known.any():
        way_out = f"Score them first: `selfcal score-questions --store_dir {store_dir} --split {split}`."
        raise InputError(f"No question of split {split!r} in {store_dir} has a value of {name!r}. {way_out}")
    table = question_table(read.pool.entries).select(known)
    table.check_judged("calibration_split", str(split))
    if shared := {one.id for one in asked}.intersection(table.question_id.tolist()):
        raise InputError(
            f"{len(shared):,} calibration questions, such as {min(shared)!r}, are among those that are predicted. Name "
            "another `calibration_split`."
        )
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
        """Return mapped capabilities [Q]."""
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
        """Read what ``asdict`` gave."""
        per_k = content["per_k"]
        plain = {name: tuple(content[name]) for name in ("knots", "heights", "distribution")}
        maps = PassAtKMaps(tuple(per_k["k"]), *(tuple(map(tuple, per_k[side])) for side in ("x", "y")))
        return cls(
            **plain, concentration=content["concentration"], inflated=InflatedBeta(**content["inflated"]), per_k=maps
        )


@dataclass(frozen=True)
class KeptMaps:
    """Maps as saved, with what identifies their values."""

    maps: CapabilityMaps
    estimator: str
    scored_by: str | None
    fitted_on: FittedOn

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"maps of {self.estimator}"

    def check(self, scored_by: Iterable[str | None], question_ids: Iterable[str]) -> None:
        """Raise InputError if values were computed differently, or questions are those of the fit."""
        if self.scored_by is not None and set(scored_by) - {None, self.scored_by}:
            raise InputError(
                f"Capabilities are of another probe, model or query than the values {self.estimator!r} that the maps "
                "were fitted to. Fit others with `selfcal fit-capability-maps`."
            )
        check_not_fitted_on(question_ids, self)

    def save(self, path: str | Path) -> None:
        """Write the maps to a JSON file."""
        check_maps_target(path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        record = {
            "format": FORMAT, "version": VERSION, "estimator": self.estimator, "scored_by": self.scored_by,
            "fitted_on": self.fitted_on.as_json(), **asdict(self.maps),
        }  # fmt: skip
        write_atomically(Path(path), sealed(record))


def load_maps(path: str | Path) -> KeptMaps:
    """Read what :meth:`KeptMaps.save` wrote."""
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
    """Raise InputError unless ``path`` is new or holds earlier maps."""
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
    """Fit all maps to labelled questions."""
    p, samples = np.asarray(predicted, dtype=np.float64), np.asarray(num_samples)
    most = int(samples.min(initial=np.iinfo(np.int64).max)) if len(samples) else 0
    wanted = range(1, most + 1) if ks is None else [k for k in ks if k <= most]
    shares = np.asarray(num_correct, dtype=np.float64) / samples
    knots, heights = isotonic_knots(p, shares)
    return CapabilityMaps(
        knots=knots,
        heights=heights,
        distribution=tuple(np.sort(shares).tolist()),
        concentration=fit_concentration(p, num_correct, samples),
        inflated=fit_inflated_beta(p, num_correct, samples),
        per_k=fit_pass_at_k_maps(p, num_correct, samples, ks=wanted) if len(wanted) else PassAtKMaps((), (), ()),
    )


def maps_of(found: CalibrationQuestions, estimator: str, *, ks: Sequence[int] | None = None) -> KeptMaps:
    """Fit all maps to the labelled questions of a store."""
    table = found.table
    fitted_on = FittedOn.from_questions(found.questions, num_responses=int(table.num_samples.sum()))
    maps = fit_capability_maps(found.predicted, table.num_correct, table.num_samples, ks=ks)
    return KeptMaps(maps, estimator, found.scored_by, fitted_on)


def power_alone(p: Floats, ks: Sequence[int]) -> dict[str, Floats]:
    """Return ``1 - (1 - p)^k`` [K, Q], which needs no calibration questions and is too high for a predicted p."""
    return {POWER: np.stack([simulated_pass_at_k(p, k) for k in ks])}
