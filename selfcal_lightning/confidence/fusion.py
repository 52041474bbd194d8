"""Fused confidence: a small logistic model over several confidences of one response, with or without labels.

P(True) may know which questions are hard, and likelihood which response is right; the fusion combines both. It reads
one response at a time, so it works while sampling.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from selfcal_lightning.confidence import base, registry, scaling
from selfcal_lightning.confidence import features as inputs
from selfcal_lightning.confidence.fitted_files import load_whole, save_fitted
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import file_name
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.consistency import soft_self_consistency, vote_share
from selfcal_lightning.records import QuestionSamples, Sample

FusionTarget = Literal["label", "ssc", "vote_share"]
TARGETS: tuple[FusionTarget, ...] = ("label", "ssc", "vote_share")
FUSED = "fused"
KIND = "fusion"
POOL_NOTE = "It depends on the other responses: for recorded pools only (`selfcal serve` has cocoa and vote_share)."
DEFAULT_FEATURES = (f"{inputs.LOGIT}{base.P_TRUE}", base.LOGPROB, base.MEAN_LOGPROB)


@dataclass(frozen=True)
class Fusion:
    """Adds the fused confidence to a sample (a ``SampleScorer``).

    ``sigmoid(intercept + sum_f weight_f * (x_f - mean_f) / std_f)`` over the F features f.
    """

    name: str
    features: tuple[str, ...]  # see ``confidence.features``
    weights: tuple[float, ...]  # per standard deviation [F]
    intercept: float
    means: tuple[float, ...]  # in the fit [F]
    stds: tuple[float, ...]  # in the fit [F]; 1 where a feature was constant
    target: FusionTarget
    l2: float
    needs_pool: bool  # whether a feature depends on the other responses to the question: recorded pools only
    fitted_on: FittedOn
    scores: tuple[inputs.ConfidenceScores, ...] = ()  # of each part alone and, last, of the fusion, where it was fitted
    held_out_scores: tuple[inputs.ConfidenceScores, ...] = ()  # the same on other questions; empty if none were given

    def __post_init__(self) -> None:
        sizes = {len(part) for part in (self.features, self.weights, self.means, self.stds)}
        numbers = (self.intercept, *self.weights, *self.means, *self.stds)
        if len(sizes) > 1 or not self.features or not all(map(math.isfinite, numbers)) or min(self.stds) <= 0.0:
            raise InputError(f"Expected as many finite weights, means and positive stds as features, but got {self}.")

    @property
    def requires(self) -> tuple[str, ...]:
        return inputs.required_confidences(self.features)

    def transform(self, values: Floats) -> Floats:
        """Return the fused confidence [N] of features [N, F]; nan where one is missing."""
        standard = (values - np.array(self.means)) / np.array(self.stds)
        return scaling.sigmoid(standard @ np.array(self.weights) + self.intercept)

    def score_sample(self, sample: Sample) -> float | None:
        z = self.intercept
        for name, weight, mean, std in zip(self.features, self.weights, self.means, self.stds, strict=True):
            value = inputs.feature_value(sample, name)
            if value is None:
                return None
            z += weight * (value - mean) / std
        return scaling.sigmoid_of(z)

    def score_parts(
        self, pool: Sequence[QuestionSamples], known: Sequence[registry.KnownConfidence]
    ) -> tuple[inputs.ConfidenceScores, ...]:
        """Return the scores on ``pool`` of each feature alone and, last, of the fusion."""
        parts = self.requires
        raw, table = (inputs.ResponseTable.from_pool(pool, names) for names in (parts, self.features))
        columns = [(name, raw.values[:, column]) for column, name in enumerate(parts)]
        columns.append((self.name, self.transform(table.values)))
        return tuple(inputs.score_confidence(name, row, table.correct, table.question, known) for name, row in columns)

    def describe(self) -> str:
        head = f"{self.name}: fitted to {self.target} on {self.fitted_on.num_responses} responses to"
        lines = [f"{head} {self.fitted_on.num_questions} questions ({self.fitted_on.num_left_out} left out)"]
        if self.needs_pool:
            lines.append(POOL_NOTE)
        lines.append(f"{'feature':<26}{'weight':>9}{'per unit':>11}{'mean':>10}{'std':>10}")
        for name, weight, mean, std in zip(self.features, self.weights, self.means, self.stds, strict=True):
            lines.append(f"{name:<26}{weight:>+9.3f}{weight / std:>+11.4f}{mean:>10.3f}{std:>10.3f}")
        lines.append(f"{'intercept':<26}{self.intercept:>+9.3f}")
        for title, scores in (("on the fitting half", self.scores), ("on the held-out half", self.held_out_scores)):
            if scores:
                lines += ["", inputs.scores_text(scores, title=title)]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "fitted_on": self.fitted_on.as_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Fusion:
        read: dict[str, Any] = {field.name: content[field.name] for field in fields(cls)}
        for name in ("features", "weights", "means", "stds"):
            read[name] = tuple(read[name])
        for name in ("scores", "held_out_scores"):
            read[name] = tuple(inputs.ConfidenceScores(**row) for row in read[name])
        return cls(**{**read, "fitted_on": FittedOn.from_json(content["fitted_on"])})

    def save(self, path: str | Path) -> None:
        save_fitted(path, KIND, self.as_json())

    @classmethod
    def load(cls, path: str | Path) -> Fusion:
        """Read a fusion from a JSON file; :func:`load_scorer` reads files of any kind."""
        return cast(Fusion, load_scorer(path, (KIND,)))


def fit_fusion(
    pool: Sequence[QuestionSamples],
    features: Sequence[str] = DEFAULT_FEATURES,
    *,
    target: FusionTarget = "label",
    name: str = FUSED,
    l2: float = 1.0,
    held_out: Sequence[QuestionSamples] | None = None,
    allow_pool_features: bool = False,
    known: Sequence[registry.KnownConfidence] = (),
) -> Fusion:
    """Fit the fusion on a calibration split, to labels or, without labels, to soft self-consistency or vote shares."""
    features = tuple(features)
    scaling.check_new_name(name, inputs.required_confidences(features))
    if target not in TARGETS:
        raise unknown_name("target", target, TARGETS)
    if not features or len(set(features)) < len(features):
        raise InputError(f"Expected `features` to be at least one name, each once, but got {features}.")
    if l2 <= 0.0:
        raise InputError(f"Expected `l2` to be positive, but got {l2}.")
    of_pool = registry.pool_dependent(inputs.required_confidences(features), known)
    if of_pool and not allow_pool_features:
        found = f"{', '.join(of_pool)}, which depend on the other responses"
        way_out = "Set `allow_pool_features` for a fusion for recorded pools only."
        raise InputError(f"Expected `features` of one response, but got {found}. {way_out}")
    table = inputs.ResponseTable.from_pool(pool, features)
    targets = _targets(pool, table, target)
    used = table.is_complete & ~np.isnan(targets)
    if not used.any():
        raise InputError(f"Expected responses with all of {features} and a target {target!r}, but got none.")
    values = table.values[used]
    means, stds = scaling.centre_and_scale(values)
    weights, intercept = scaling.fit_logistic((values - means) / stds, targets[used], l2=l2)
    fusion = Fusion(
        name=name, features=features, weights=tuple(weights.tolist()), intercept=intercept, means=tuple(means.tolist()),
        stds=tuple(stds.tolist()), target=target, l2=float(l2), needs_pool=bool(of_pool),
        fitted_on=FittedOn.from_pool(pool, used),
    )  # fmt: skip
    fusion = replace(fusion, scores=fusion.score_parts(pool, known))
    if held_out is None:
        return fusion
    check_not_fitted_on(held_out, fusion)
    return replace(fusion, held_out_scores=fusion.score_parts(held_out, known))


def _targets(pool: Sequence[QuestionSamples], table: inputs.ResponseTable, target: FusionTarget) -> Floats:
    """Return the target of every response [N]; nan if it has none."""
    if target == "label":
        scaling.check_labels(table)
        return table.correct
    if target == "ssc":
        base.check_confidence(pool, base.P_TRUE)
    targets: list[float | None] = []
    for entry in pool:
        answers = [sample.answer for sample in entry.samples]
        if target == "vote_share":
            targets += vote_share(answers)
        else:
            targets += soft_self_consistency(answers, [base.confidence_of(s, base.P_TRUE) for s in entry.samples])
    return np.array(targets, dtype=np.float64)  # None is NaN


FittedScorer = scaling.Scaler | Fusion


def load_scorer(path: str | Path, kinds: Sequence[str] = (*scaling.SCALER_KINDS, KIND)) -> FittedScorer:
    def make(kind: str, content: Mapping[str, Any]) -> FittedScorer:
        return Fusion.from_json(content) if kind == KIND else scaling.Scaler.from_json(kind, content)

    return load_whole(path, kinds, make)


def load_scorers(paths: Sequence[str | Path] | str) -> list[FittedScorer]:
    """Read a scorer or several; each may use the confidences of those before it."""
    scorers = [load_scorer(path) for path in ([paths] if isinstance(paths, str) else paths)]
    names = [scorer.name for scorer in scorers]
    if len(set(names)) < len(names):
        raise InputError(f"Expected fitted confidences of different names, but got {names}.")
    for position, scorer in enumerate(scorers):
        late = [name for name in scorer.requires if name in names[position:]]
        if late:
            raise InputError(f"Expected {late[0]!r} before {scorer.name!r}, which reads it, but got it after.")
    return scorers


def scorer_digests(confidence: str | None, scorers: Sequence[FittedScorer]) -> dict[str, str]:
    """Return the sha256, by name, of each scorer that a confidence depends on, directly or indirectly."""
    wanted = {confidence}
    found = {}
    for scorer in reversed(scorers):
        if scorer.name in wanted:
            wanted.update(scorer.requires)
            kind = KIND if isinstance(scorer, Fusion) else scorer.map.kind
            content = json.dumps({"kind": kind, **scorer.as_json()}, sort_keys=True)
            found[scorer.name] = hashlib.sha256(content.encode()).hexdigest()
    return dict(sorted(found.items()))


def load_for_fitting(
    pool: str,
    split: str | None,
    task: str | None,
    needed: Sequence[str],
    scorers: Sequence[FittedScorer],
    *,
    texts: bool = False,
) -> RecordedPool:
    """Return a calibration split's questions, with the store annotations that fitting needs."""
    names = {*needed, *(name for scorer in scorers for name in scorer.requires)}
    names -= {*base.STORED, *(scorer.name for scorer in scorers)}
    annotations = sorted(names & set(annotation_names(pool))) if Path(pool).is_dir() else []
    return load_recorded_pool(pool, split=split, task=task, confidences=annotations, texts=texts)


@dataclass(frozen=True)
class WeighedPool:
    pool: RecordedPool
    confidences: tuple[str, ...]
    scorers: tuple[FittedScorer, ...]
    query_tokens: Mapping[str, int]


def carried_confidences(pool: RecordedPool) -> list[str]:
    """Return the confidences of one response that every question with a readable answer has, in a fixed order."""
    names = {name for entry in pool.entries for sample in entry.samples for name in sample.confidences}
    candidates = [*base.STORED, *sorted(names.difference(base.STORED))]
    left_out = registry.pool_dependent(candidates, registry.recorded_confidences(pool.estimators))
    kept = [name for name in candidates if name not in left_out]
    return [name for name in kept if not any(base.lacks(entry, name) for entry in pool.entries)]


def is_probability(pool: RecordedPool, name: str) -> bool:
    """Whether a confidence is a probability by its values and its estimator, so that it can weight votes unscaled."""
    values = (base.confidence_of(sample, name) for entry in pool.entries for sample in entry.samples)
    may_be = registry.may_be_probability(name, registry.recorded_confidences(pool.estimators))
    return may_be and all(value is None or 0.0 <= value <= 1.0 for value in values)


def default_confidences(pool: RecordedPool, *, can_fit: bool) -> list[str]:
    """Return the confidences that weigh by default: probabilities as they are, other scores scaled, and the fusion."""
    carried = carried_confidences(pool)
    probable = {name for name in carried if is_probability(pool, name)}
    names = [name if name in probable else f"{name}_platt" for name in carried if name in probable or can_fit]
    return [*names, FUSED] if can_fit and len(carried) > 1 else names


def fit_confidences(
    pool: RecordedPool, names: Sequence[str], *, target: FusionTarget = "label", known: Sequence[FittedScorer] = ()
) -> list[FittedScorer]:
    """Fit those of ``names`` that a pool lacks: ``SOURCE_platt`` (or another scaler) and ``fused``."""
    scorers: list[FittedScorer] = []
    recorded = registry.recorded_confidences(pool.estimators)
    carried = carried_confidences(pool)
    there = {*carried, *(scorer.name for scorer in known)}
    for name in names:
        source, _, kind = name.rpartition("_")
        if name in there:
            continue
        if name == FUSED:
            features = [f"{inputs.LOGIT}{part}" if is_probability(pool, part) else part for part in carried]
            scorers.append(fit_fusion(pool.entries, features, target=target, known=recorded))
        elif kind in scaling.SCALER_KINDS and source in carried:
            scorers.append(scaling.fit_scaler(pool.entries, kind, source=source, known=recorded))
        else:
            registry.refuse_looking_ahead([name, source], recorded)
            base.check_confidence(pool.entries, name)
    return scorers


def weigh_pool(
    pool: RecordedPool, names: Sequence[str], scorers: Sequence[FittedScorer], *, fitting: Sequence[str] = ()
) -> WeighedPool:
    check_not_fitted_on(pool.entries, [scorer for scorer in scorers if scorer.name not in fitting])
    registry.refuse_looking_ahead(names, [*registry.recorded_confidences(pool.estimators), *scorers])
    entries = base.scored_pool(pool.entries, scorers)
    for name in names:
        base.check_confidence(entries, name)
    costs = {name: pool.query_tokens for name in names if base.P_TRUE in sources_of(name, scorers)}
    return WeighedPool(replace(pool, entries=entries), tuple(names), tuple(scorers), costs)


def sources_of(name: str, scorers: Sequence[FittedScorer]) -> set[str]:
    """Return the unfitted confidences that a confidence is computed from; itself if it was not fitted."""
    scorer = next((scorer for scorer in scorers if scorer.name == name), None)
    return {name} if scorer is None else {source for part in scorer.requires for source in sources_of(part, scorers)}


def save_scorers(scorers: Sequence[FittedScorer], folder: Path) -> list[str]:
    names = [f"{file_name(scorer.name)}.json" for scorer in scorers]
    for scorer, name in zip(scorers, names, strict=True):
        scorer.save(folder / name)
    return names
