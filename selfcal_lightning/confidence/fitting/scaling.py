"""Post-hoc scalers: one confidence turned into a calibrated probability by temperature, Platt or isotonic regression.

Scaling changes what a confidence says, not (temperature, Platt) or hardly (isotonic: ties) whom it ranks first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.dependence import KnownConfidence, pool_dependent
from selfcal_lightning.confidence.fitting.calibration_split import FittedOn, check_not_fitted_on
from selfcal_lightning.confidence.fitting.earlier_files import load_confidence
from selfcal_lightning.confidence.fitting.features import ResponseTable, feature_value
from selfcal_lightning.confidence.fitting.files import save_fitted
from selfcal_lightning.confidence.fitting.scaling_maps import IsotonicMap, PlattMap, ScalerMap, TemperatureMap, read_map
from selfcal_lightning.confidence.fitting.scores import ConfidenceScores, score_confidence
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.records import QuestionSamples, Sample

ScalerKind = Literal["temperature", "platt", "isotonic"]
SCALER_KINDS: tuple[ScalerKind, ...] = ("temperature", "platt", "isotonic")


@dataclass(frozen=True)
class Scaler:
    """Adds the calibrated form of one confidence to a sample (a ``SampleScorer``).

    Attributes:
        name: Key under which the probability is added.
        source: The confidence that it reads.
        map: The fitted function.
        needs_pool: Whether the source depends on the other responses to the question: recorded pools only.
        fitted_on: The questions of the fit.
        before: Scores of the source on them.
        after: Scores of the scaled confidence on them.
        held_out_before: Scores of the source on other questions, or None.
        held_out_after: Scores of the scaled confidence on these.
    """

    name: str
    source: str
    map: ScalerMap
    needs_pool: bool
    fitted_on: FittedOn
    before: ConfidenceScores
    after: ConfidenceScores
    held_out_before: ConfidenceScores | None = None
    held_out_after: ConfidenceScores | None = None

    @property
    def requires(self) -> tuple[str, ...]:
        """The one confidence that it reads."""
        return (self.source,)

    def score_sample(self, sample: Sample) -> float | None:
        """Return the scaled confidence, or None where the sample has none."""
        value = feature_value(sample, self.source)
        return None if value is None else float(self.map.transform(np.array([value]))[0])

    def as_json(self) -> dict[str, Any]:
        """Return the scaler as plain JSON types."""
        held_out = None
        if self.held_out_before is not None and self.held_out_after is not None:
            held_out = {"before": self.held_out_before.as_json(), "after": self.held_out_after.as_json()}
        return {
            "name": self.name,
            "source": self.source,
            "parameters": asdict(self.map),
            "needs_pool": self.needs_pool,
            "fitted_on": self.fitted_on.as_json(),
            "scores": {"before": self.before.as_json(), "after": self.after.as_json()},
            "held_out_scores": held_out,
        }

    @classmethod
    def from_json(cls, kind: str, content: Mapping[str, Any]) -> Scaler:
        """Read what :meth:`as_json` wrote; ``kind`` stands beside it in the file.

        Raises:
            KeyError: A field is missing.
            TypeError: A parameter is missing or unknown.
            ValueError: A parameter is out of its range.
        """
        held_out = content["held_out_scores"] or {}
        read = ConfidenceScores.from_json
        return cls(
            name=content["name"],
            source=content["source"],
            map=read_map(kind, content["parameters"]),
            needs_pool=bool(content["needs_pool"]),
            fitted_on=FittedOn.from_json(content["fitted_on"]),
            before=read(content["scores"]["before"]),
            after=read(content["scores"]["after"]),
            held_out_before=read(held_out["before"]) if held_out else None,
            held_out_after=read(held_out["after"]) if held_out else None,
        )

    def save(self, path: str | Path) -> None:
        """Write the scaler to a JSON file."""
        save_fitted(path, self.map.kind, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> Scaler:
        """Read a scaler from a JSON file; see ``confidence.fitted.load_scorer`` for files of any kind."""
        return cls.from_json(*load_confidence(path, SCALER_KINDS))


def fit_scaler(
    pool: Sequence[QuestionSamples],
    kind: ScalerKind,
    *,
    source: str = P_TRUE,
    name: str | None = None,
    is_probability: bool | None = None,
    held_out: Sequence[QuestionSamples] | None = None,
    known: Iterable[KnownConfidence] = (),
) -> Scaler:
    """Fit a scaler of one confidence to correctness on a calibration split.

    Responses without the confidence are left out and counted; unreadable ones are wrong. Of a source that depends on
    the other responses, the scaler does too, and says so (``needs_pool``).

    Args:
        pool: Questions with references.
        kind: "temperature" (probabilities only), "platt" or "isotonic".
        source: Name of the confidence.
        name: Name of the new one; None makes ``SOURCE_KIND``.
        is_probability: Whether the confidence is a probability, which Platt and temperature take by its log-odds. None
            knows P(True) and log-probabilities, and else says yes when all values lie in [0, 1].
        held_out: Other questions, to score the scaler on.
        known: Where the source may come from; see ``confidence.dependence.pool_dependent``.

    Raises:
        MissingConfidenceError: The confidence is absent; names the estimator to run.
        ValueError: A question has no reference, temperature is asked of a score, or ``held_out`` shares questions.
    """
    name = f"{source}_{kind}" if name is None else name
    check_new_name(name, (source,))
    if kind not in SCALER_KINDS:
        raise InputError(f"Expected `kind` to be one of {', '.join(SCALER_KINDS)}, but got {kind!r}.")
    table = ResponseTable.from_pool(pool, (source,))
    check_labels(table)
    used = table.is_complete
    values, targets = table.values[used, 0], table.correct[used]
    map_ = _fit_map(kind, values, targets, source=source, is_probability=is_probability)
    fitted_on = FittedOn.from_questions(
        (entry.question for entry in pool), num_responses=int(used.sum()), num_left_out=int((~used).sum())
    )
    before, after = _scores(table, source, name, map_)
    scaler = Scaler(name, source, map_, bool(pool_dependent([source], known)), fitted_on, before, after)
    if held_out is None:
        return scaler
    check_not_fitted_on(held_out, scaler)
    held_before, held_after = _scores(ResponseTable.from_pool(held_out, (source,)), source, name, map_)
    return replace(scaler, held_out_before=held_before, held_out_after=held_after)


def check_labels(table: ResponseTable) -> None:
    """Raise unless the correctness of every response is known."""
    unknown = np.isnan(table.correct)
    if unknown.any():
        question = table.question_ids[int(table.question[unknown][0])]
        raise InputError(
            f"Expected every response to be right or wrong, but got {int(unknown.sum())} of {len(unknown)} that nobody "
            f"can judge, such as one to {question!r}, which has no reference. Fit to label-free targets "
            '(target "ssc"), or on questions with references.'
        )


def check_new_name(name: str, sources: Sequence[str]) -> None:
    """Raise when a fitted confidence would take the name of something else."""
    taken = (P_TRUE, LOGPROB, MEAN_LOGPROB, *sources)
    if not name or name in taken:
        raise InputError(f"Expected `name` to be a new one, but got {name!r}; taken are {', '.join(taken)}.")


def _fit_map(
    kind: ScalerKind, values: Floats, targets: Floats, *, source: str, is_probability: bool | None
) -> ScalerMap:
    if is_probability is None:
        inside = bool(((values >= 0.0) & (values <= 1.0)).all())
        is_probability = source == P_TRUE or (source not in (LOGPROB, MEAN_LOGPROB) and inside)
    if kind == "isotonic":
        return IsotonicMap.fit(values, targets)
    if kind == "platt":
        return PlattMap.fit(values, targets, takes_logit=is_probability)
    if not is_probability:
        raise InputError(
            f"Expected the confidence {source!r} to be a probability for temperature scaling, but got a score. "
            "Use Platt or isotonic scaling."
        )
    return TemperatureMap.fit(values, targets)


def _scores(table: ResponseTable, source: str, name: str, map_: ScalerMap) -> tuple[ConfidenceScores, ConfidenceScores]:
    values = table.values[:, 0]
    before = score_confidence(source, values, table.correct, table.question)
    return before, score_confidence(name, map_.transform(values), table.correct, table.question)
