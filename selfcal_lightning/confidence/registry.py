"""Estimators by name, for ``selfcal score --estimator``, and what each needs."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any, Protocol, cast, get_args

from selfcal_lightning.confidence import estimators
from selfcal_lightning.confidence.agreement import Cocoa, SemanticEntropy, SemanticShare, TwoSampleHybrid
from selfcal_lightning.confidence.base import STORED, Estimator, RewardSupport, SampleScorer
from selfcal_lightning.confidence.verbalized import Verbalized, VerbalizedPercent, VerbalizedWords
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.plugins import Registry
from selfcal_lightning.data.step_settings import Aggregation, Steps, check_steps
from selfcal_lightning.metrics.arrays import check_positive


class EstimatorClass(Protocol):
    """An estimator before it is created: a class, or a row of a table.

    ``reads`` is what it is created with: "engine" (an engine and its chat format), "tokens" (a reader of token
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
        estimators.PTrue, Verbalized, VerbalizedWords, VerbalizedPercent, estimators.ResponseConsistency, SemanticShare,
        SemanticEntropy, Cocoa, TwoSampleHybrid, *estimators.TOKEN_STATISTICS, estimators.LowestGroupConfidence,
        *estimators.STEP_STATISTICS, estimators.StepSelfEvaluation, *estimators.TRAJECTORIES, *estimators.WEIGHTS,
        estimators.ProbedResponses, *resolve_name("selfcal_lightning.rewards.estimator:REWARD_SCORES"),
    ),
)  # fmt: skip
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


@dataclass(frozen=True)
class CriteriaSettings:
    """How token and step scores are combined into one score per response.

    Attributes:
        steps: Where steps end: "sentence", "line", "blank_line", "heading", "marker:TEXT" (after that text), or "auto",
            the coarsest of the first four that occurs in a response.
        weight: How much the token probabilities of a step count against its metric, in [0, 1].
        over_steps: Combines the step scores of a response: "mean", "min", "last" or "prod".
        window: Length of the window in tokens, for lowest_group_confidence.
        lowest: Averages this share of the windows, the least certain ones; 0 takes only the least certain window.
        entailment: Folder or hub name of a classifier with a label named entailment, such as
            microsoft/deberta-large-mnli, by which semantic_share, semantic_entropy and cocoa compare free text; null
            compares answers.
        probe: File of `selfcal fit-response-probe`, for response_probe.
    """

    steps: Steps = "auto"
    weight: float = 0.5
    over_steps: Aggregation = "mean"
    window: int = 2048
    lowest: float = 0.0
    entailment: str | None = None
    probe: str | None = None

    def __post_init__(self) -> None:
        check_steps("criteria.steps", self.steps)
        check_positive(self.window, "criteria.window")
        for name in ("weight", "lowest"):
            estimators.check_share(f"criteria.{name}", getattr(self, name))
        if self.over_steps not in get_args(Aggregation):
            raise unknown_name("criteria.over_steps", self.over_steps, get_args(Aggregation))

    def of(self, kind: EstimatorClass) -> dict[str, Any]:
        taken = inspect.signature(kind).parameters
        return {name: value for name, value in asdict(self).items() if name in taken}

    def check_taken(self, kinds: Sequence[EstimatorClass]) -> None:
        """Refuse a changed setting that none of the estimators takes."""
        taken = {name for kind in kinds for name in self.of(kind)}
        changed = [name for name, value in asdict(self).items() if value != getattr(CriteriaSettings, name)]
        if unread := [name for name in changed if name not in taken]:
            names = [kind.name for kind in kinds]
            raise InputError(f"Expected `criteria.{unread[0]}` with an estimator that takes it, but got {names}.")


def estimator_settings(name: str, **changes: Any) -> dict[str, Any]:
    """Return the estimator's settings, its defaults with ``changes``, for the record of a run."""
    parameters = inspect.signature(ESTIMATORS[name]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY} | changes


@dataclass(frozen=True, slots=True)
class RecordedConfidence:
    """A confidence found on samples; ``needs_pool`` if it depends on the question's other responses."""

    name: str
    needs_pool: bool
    is_probability: bool
    requires: tuple[str, ...] = ()


KnownConfidence = RecordedConfidence | SampleScorer

# Finished training targets, which imported responses carry among their confidences.
TARGETS = tuple(
    RecordedConfidence(name, needs_pool=True, is_probability=True)
    for name in ("ssc", "soft_self_consistency", "consistency", "vote_share")
)


def recorded_confidences(by_name: Mapping[str, str]) -> list[RecordedConfidence]:
    known = {name: ESTIMATORS[estimator] for name, estimator in by_name.items() if estimator in ESTIMATORS}
    return [RecordedConfidence(name, kind.needs_pool, kind.is_probability) for name, kind in known.items()]


def pool_dependent(names: Iterable[str], known: Iterable[KnownConfidence] = ()) -> list[str]:
    """Return those of ``names`` that depend on a question's other responses, in order."""
    # Asked each time: plug-ins add estimators.
    needs = {one.name: one.needs_pool for one in ESTIMATORS.values()} | {one.name: one.needs_pool for one in TARGETS}
    for one in known:
        needs[one.name] = one.needs_pool or any(needs.get(source, False) for source in one.requires)
    return [name for name in names if needs.get(name, False)]


def may_be_probability(name: str, known: Iterable[KnownConfidence] = ()) -> bool:
    """Return whether a confidence may be a probability: False if its estimator says that it is none."""
    declared = {one.name: one.is_probability for one in ESTIMATORS.values()}
    declared |= {one.name: one.is_probability for one in known if isinstance(one, RecordedConfidence)}
    return declared.get(name, True)


def refuse_looking_ahead(names: Iterable[str], known: Iterable[KnownConfidence] = ()) -> None:
    """Refuse confidences that depend on other responses, which a strategy has not seen yet."""
    if ahead := pool_dependent(names, known):
        way_out = "Leave them out, with what was fitted to them."
        reason = f"{', '.join(ahead)}, which depend on the other responses to the question"
        raise InputError(f"A strategy cannot read {reason}. {way_out}")


def check_name_tells(confidence: KnownConfidence) -> None:
    """Refuse a name under which a JSONL pool, which stores only names, would hide that a confidence looks ahead."""
    if confidence.needs_pool and not pool_dependent([confidence.name]):
        raise InputError(
            f"Expected {confidence.name!r} to keep its estimator's name in a JSONL pool, since it depends on the other "
            "responses. A store remembers the estimator of each annotation."
        )
