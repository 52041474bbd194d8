"""Estimators by name, for ``selfcal score --estimator``, and what each needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, cast

from selfcal_lightning.confidence.agreement import Cocoa, SemanticEntropy, SemanticShare, TwoSampleHybrid
from selfcal_lightning.confidence.base import STORED, Estimator, RewardSupport
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
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.engines.base import Engine

if TYPE_CHECKING:
    from selfcal_lightning.confidence.token_reader import TokenReader
    from selfcal_lightning.models.chat_format import ChatFormat


class EstimatorClass(Protocol):
    """What the registry knows about an estimator before it is created."""

    name: str
    is_probability: bool
    needs_pool: bool
    reads: str

    def __call__(self, *args: Any, **settings: Any) -> Estimator:
        """Make one."""


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
ESTIMATORS: dict[str, EstimatorClass] = {estimator.name: estimator for estimator in _OWN}
REWARDS: RewardSupport = resolve_name("selfcal_lightning.rewards.estimator:REWARDS")
READS = ("engine", "tokens", "rewards", "pool")
_PARTS = ("name", "is_probability", "needs_pool", "reads", "score")


def register_estimator(estimator: EstimatorClass) -> EstimatorClass:
    """Register an estimator class under its ``name``; usable as a decorator.

    Raises:
        InputError: The name is taken, or the class lacks required attributes.
    """
    missing = [name for name in _PARTS if name not in dir(estimator)]
    if missing:
        raise InputError(
            f"Expected the estimator {estimator!r} to have {', '.join(_PARTS)}, but {', '.join(missing)} is missing."
        )
    if estimator.reads not in READS:
        raise InputError(f"Expected `reads` of {estimator.name} to be one of {READS}, but got {estimator.reads!r}.")
    if estimator.name in (*ESTIMATORS, *STORED):
        raise InputError(f"Expected the estimator's `name` to be new, but {estimator.name!r} is taken already.")
    ESTIMATORS[estimator.name] = estimator
    return estimator


def estimator_class(name: str) -> EstimatorClass:
    """Return the class of the estimator ``name``."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    raise unknown_name("estimator", name, ESTIMATORS)


def estimator_settings(name: str, **changes: Any) -> dict[str, Any]:
    """Return the estimator's settings, its defaults with ``changes``, for the record of a run."""
    parameters = inspect.signature(estimator_class(name)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    if unknown := sorted(changes.keys() - defaults.keys()):
        raise InputError(f"Expected settings of {name!r} among {sorted(defaults)}, but got {unknown}.")
    return {**defaults, **changes}


def build_estimator(
    name: str,
    *,
    engine: Engine | None = None,
    chat: ChatFormat | None = None,
    tokens: TokenReader | None = None,
    rewards: Any = None,
    **settings: Any,
) -> Estimator:
    """Create the estimator ``name`` from the arguments that it accepts."""
    estimator = estimator_class(name)
    given: dict[str, tuple[Any, ...]] = {
        "engine": (engine, chat),
        "tokens": (tokens,),
        "rewards": (rewards,),
        "pool": (),
    }
    needed = given[estimator.reads]
    if any(part is None for part in needed):
        wanted = "`engine` and `chat`" if estimator.reads == "engine" else f"`{estimator.reads}`"
        raise InputError(f"Expected {wanted} for the estimator {name!r}, but got None.")
    return estimator(*needed, **settings)


class KnownConfidence(Protocol):
    """A confidence that knows whether it depends on other responses: a scaler, a fusion or a recorded confidence."""

    @property
    def name(self) -> str:
        """Key of the confidence on a sample."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Names of the confidences that it is computed from."""

    @property
    def needs_pool(self) -> bool:
        """Whether it depends on the question's other responses, directly or indirectly."""


@dataclass(frozen=True, slots=True)
class RecordedConfidence:
    """A confidence found on samples, not computed here."""

    name: str
    needs_pool: bool

    @property
    def requires(self) -> tuple[str, ...]:
        """Nothing that is known."""
        return ()


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
    """Raise ValueError if a strategy would read a confidence that depends on other responses."""
    ahead = pool_dependent(names, known)
    if ahead:
        raise InputError(
            f"Expected confidences that belong to one response, but got {', '.join(ahead)}, which depend on the other "
            "responses to the question: a strategy that reads them looks ahead. Leave them out, with what was fitted "
            "to them."
        )


def check_name_tells(confidence: KnownConfidence) -> None:
    """Raise ValueError if a JSONL pool, which stores only names, would hide that a confidence looks ahead."""
    if confidence.needs_pool and not pool_dependent([confidence.name]):
        raise InputError(
            f"Expected a confidence that depends on the other responses to keep its estimator's name in a JSON-lines "
            f"pool, but got {confidence.name!r}: by another name nobody would know. Leave the name as it is; a store "
            "remembers the estimator of each of its annotations and may hold several."
        )
