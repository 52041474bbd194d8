"""The confidences that an evaluation weighs by: those that the pool carries, scaled ones, and their fusion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE, add_scores, check_confidence, confidence_of
from selfcal_lightning.confidence.dependence import pool_dependent, recorded_confidences, refuse_looking_ahead
from selfcal_lightning.confidence.fitting.calibration_split import check_not_fitted_on
from selfcal_lightning.confidence.fitting.features import LOGIT
from selfcal_lightning.confidence.fitting.fusion import FUSED, FusionTarget, fit_fusion
from selfcal_lightning.confidence.fitting.loading import FittedScorer
from selfcal_lightning.confidence.fitting.scaling import SCALER_KINDS, fit_scaler
from selfcal_lightning.pools.recorded import RecordedPool
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.path_names import file_name


@dataclass(frozen=True)
class WeighedPool:
    """A pool with the confidences that strategies may read.

    Attributes:
        pool: The samples, with what the scorers added.
        confidences: Names to weigh by.
        scorers: What was fitted or read from files.
        query_tokens: Tokens that each confidence costs a sample; absent is 0.
    """

    pool: RecordedPool
    confidences: tuple[str, ...]
    scorers: tuple[FittedScorer, ...]
    query_tokens: Mapping[str, int]


def carried_confidences(pool: RecordedPool) -> list[str]:
    """Return the names of the confidences that every question with a readable answer has, in a fixed order.

    What depends on the other responses to the question is left out: computed over the whole pool it would let a
    strategy look ahead.
    """
    names = {name for entry in pool.entries for sample in entry.samples for name in sample.confidences}
    candidates = [P_TRUE, LOGPROB, MEAN_LOGPROB, *sorted(names - {P_TRUE, LOGPROB, MEAN_LOGPROB})]
    left_out = pool_dependent(candidates, recorded_confidences(pool.estimators))
    return [name for name in candidates if name not in left_out and all(_has(entry, name) for entry in pool.entries)]


def is_probability(pool: RecordedPool, name: str) -> bool:
    """Whether all values of a confidence lie in [0, 1], so that they can weigh votes as they are."""
    values = (confidence_of(sample, name) for entry in pool.entries for sample in entry.samples)
    return name not in (LOGPROB, MEAN_LOGPROB) and all(value is None or 0.0 <= value <= 1.0 for value in values)


def default_confidences(pool: RecordedPool, *, can_fit: bool) -> list[str]:
    """Return what to weigh by when nothing is said: probabilities as they are, scores scaled, and the fusion.

    Args:
        pool: The samples.
        can_fit: Whether there are calibration questions to fit on; without them scores are left out.
    """
    carried = carried_confidences(pool)
    parts = [(name, is_probability(pool, name)) for name in carried]
    names = [name if probable else f"{name}_platt" for name, probable in parts if probable or can_fit]
    return [*names, FUSED] if can_fit and len(carried) > 1 else names


def fit_confidences(
    pool: RecordedPool, names: Sequence[str], *, target: FusionTarget = "label", known: Sequence[FittedScorer] = ()
) -> list[FittedScorer]:
    """Fit those of ``names`` that a pool does not carry: ``SOURCE_platt`` (or another scaler) and ``fused``.

    Args:
        pool: The calibration questions of the fit.
        names: What is asked for.
        target: What the fusion is fitted to.
        known: Other scorers in use, whose names need no fit.

    Raises:
        MissingConfidenceError: A name is neither carried nor something that can be fitted.
        ValueError: A name or its source depends on the other responses.
    """
    scorers: list[FittedScorer] = []
    carried = carried_confidences(pool)
    there = {*carried, *(scorer.name for scorer in known)}
    for name in names:
        source, _, kind = name.rpartition("_")
        if name in there:
            continue
        if name == FUSED:
            features = [f"{LOGIT}{part}" if is_probability(pool, part) else part for part in carried]
            scorers.append(fit_fusion(pool.entries, features, target=target))
        elif kind in SCALER_KINDS and source in carried:
            scorers.append(fit_scaler(pool.entries, kind, source=source))
        else:
            refuse_looking_ahead([name, source], recorded_confidences(pool.estimators))
            check_confidence(pool.entries, name)
    return scorers


def weigh_pool(
    pool: RecordedPool, names: Sequence[str], scorers: Sequence[FittedScorer], *, fitting: Sequence[str] = ()
) -> WeighedPool:
    """Put the scorers' confidences on a pool and check that every name is there.

    Args:
        pool: The samples.
        names: Confidences to weigh by.
        scorers: What to add.
        fitting: Names of scorers that were fitted on these very questions: for tuning, never for reports.

    Raises:
        MissingConfidenceError: A confidence is absent; names the estimator to run.
        ValueError: A scorer was fitted on one of these questions, or a name depends on the other responses.
    """
    check_not_fitted_on(pool.entries, [scorer for scorer in scorers if scorer.name not in fitting])
    refuse_looking_ahead(names, [*recorded_confidences(pool.estimators), *scorers])
    entries = tuple(
        replace(entry, samples=tuple(add_scores(sample, scorers) for sample in entry.samples)) for entry in pool.entries
    )
    for name in names:
        check_confidence(entries, name)
    costs = {name: pool.query_tokens for name in names if P_TRUE in sources_of(name, scorers)}
    return WeighedPool(replace(pool, entries=entries), tuple(names), tuple(scorers), costs)


def sources_of(name: str, scorers: Sequence[FittedScorer]) -> set[str]:
    """Return the confidences that one is computed from in the end; itself where nothing was fitted."""
    by_name = {scorer.name: scorer for scorer in scorers}
    if name not in by_name:
        return {name}
    return {source for part in by_name[name].requires for source in sources_of(part, scorers)}


def save_scorers(scorers: Sequence[FittedScorer], folder: Path) -> list[str]:
    """Write each scorer to a file of its name; return the file names."""
    names = [f"{file_name(scorer.name)}.json" for scorer in scorers]
    for scorer, name in zip(scorers, names, strict=True):
        scorer.save(folder / name)
    return names


def _has(entry: QuestionSamples, name: str) -> bool:
    readable = [sample for sample in entry.samples if sample.answer is not None]
    return not readable or any(confidence_of(sample, name) is not None for sample in readable)
