"""Estimators by name, for ``selfcal score --estimator``, and what each needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, cast

from selfcal_lightning.confidence.agreement import Cocoa, SemanticEntropy, SemanticShare, TwoSampleHybrid
from selfcal_lightning.confidence.base import STORED, Estimator, RewardSupport, SampleScorer
from selfcal_lightning.confidence.estimators import (
    WEIGHTS,
    LowestGroupConfidence,
    LowestLogprob,
    MeanLogprob,
    PTrue,
    ResponseCertainty,
    ResponseConsistency,
    SelfCertainty,
    SequenceLogprob,
    TokenEntropy,
    TokenSteadiness,
)
from selfcal_lightning.confidence.step_estimators import (
    STEP_TRAJECTORIES,
    StepCertainty,
    StepEntropy,
    StepSelfEvaluation,
)
from selfcal_lightning.confidence.trajectories import TRAJECTORIES
from selfcal_lightning.confidence.verbalized import Verbalized, VerbalizedPercent, VerbalizedWords
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.registry import Registry


class EstimatorClass(Protocol):
    """An estimator before it is created: a class, or a row of a table.

    Attributes:
        reads: What it is created with: "engine" (an engine and its chat format), "tokens" (a reader of token
            statistics), "rewards" (a reward model) or "pool" (nothing).
    """

    name: str
    is_probability: bool
    needs_pool: bool
    reads: str

    def __call__(self, *args: Any, **settings: Any) -> Estimator:
        """Create it."""


# Rows of the neighbours above this room are named, as plug-ins are, and import no torch.
_OWN = cast(  # a class whose attributes are class variables is one of them
    "tuple[EstimatorClass, ...]",
    (
        PTrue,
        Verbalized,
        VerbalizedWords,
        VerbalizedPercent,
        ResponseConsistency,
        SemanticShare,
        SemanticEntropy,
        Cocoa,
        TwoSampleHybrid,
        SequenceLogprob,
        MeanLogprob,
        LowestLogprob,
        SelfCertainty,
        ResponseCertainty,
        TokenEntropy,
        TokenSteadiness,
        LowestGroupConfidence,
        StepCertainty,
        StepEntropy,
        *STEP_TRAJECTORIES,
        StepSelfEvaluation,
        *TRAJECTORIES,
        *WEIGHTS,
        *resolve_name("selfcal_lightning.rewards.estimator:REWARD_SCORES"),
    ),
)
ESTIMATORS: Registry[EstimatorClass] = Registry("estimator", _OWN)
REWARDS: RewardSupport = resolve_name("selfcal_lightning.rewards.estimator:REWARDS")
READS = ("engine", "tokens", "rewards", "pool")
_PARTS = ("name", "is_probability", "needs_pool", "reads", "score")


def register_estimator(estimator: EstimatorClass) -> EstimatorClass:
    """Register an estimator class under its ``name``; usable as a decorator."""
    if missing := [name for name in _PARTS if name not in dir(estimator)]:
        raise InputError(f"Expected the estimator {estimator!r} to have {', '.join(_PARTS)}; it lacks {missing}.")
    if estimator.reads not in READS:
        raise InputError(f"Expected `reads` of {estimator.name} to be one of {READS}, but got {estimator.reads!r}.")
    return ESTIMATORS.register(estimator, reserved=STORED)


def estimator_settings(name: str, **changes: Any) -> dict[str, Any]:
    """Return the estimator's settings, its defaults with ``changes``, for the record of a run."""
    parameters = inspect.signature(ESTIMATORS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY} | changes


@dataclass(frozen=True, slots=True)
class RecordedConfidence:
    """A confidence found on samples; ``needs_pool`` if it depends on the question's other responses."""

    name: str
    needs_pool: bool
    requires: tuple[str, ...] = ()


KnownConfidence = RecordedConfidence | SampleScorer

# Finished training targets, which imported responses carry among their confidences.
TARGETS = tuple(
    RecordedConfidence(name, needs_pool=True) for name in ("ssc", "soft_self_consistency", "consistency", "vote_share")
)


def recorded_confidences(estimators: Mapping[str, str]) -> list[RecordedConfidence]:
    """Return what is known about annotations."""
    known = {name: ESTIMATORS[estimator] for name, estimator in estimators.items() if estimator in ESTIMATORS}
    return [RecordedConfidence(name, estimator.needs_pool) for name, estimator in known.items()]


def pool_dependent(names: Iterable[str], known: Iterable[KnownConfidence] = ()) -> list[str]:
    """Return those of ``names`` that depend on a question's other responses, in order."""
    # Asked each time: plug-ins add estimators.
    needs = {one.name: one.needs_pool for one in ESTIMATORS.values()} | {one.name: one.needs_pool for one in TARGETS}
    for one in known:
        needs[one.name] = one.needs_pool or any(needs.get(source, False) for source in one.requires)
    return [name for name in names if needs.get(name, False)]


def refuse_looking_ahead(names: Iterable[str], known: Iterable[KnownConfidence] = ()) -> None:
    """Refuse confidences that depend on other responses, which a strategy has not seen yet."""
    if ahead := pool_dependent(names, known):
        raise InputError(
            f"A strategy cannot read {', '.join(ahead)}, which depend on the other responses to the question. Leave "
            "them out, with what was fitted to them."
        )


def check_name_tells(confidence: KnownConfidence) -> None:
    """Refuse a name under which a JSONL pool, which stores only names, would hide that a confidence looks ahead."""
    if confidence.needs_pool and not pool_dependent([confidence.name]):
        raise InputError(
            f"Expected {confidence.name!r} to keep its estimator's name in a JSONL pool, since it depends on the other "
            "responses. A store remembers the estimator of each annotation."
        )
