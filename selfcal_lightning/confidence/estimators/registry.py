"""Estimators by name: what ``selfcal score --estimator`` can run, and what each needs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol, cast

from selfcal_lightning.confidence.base import STORED, Estimator
from selfcal_lightning.confidence.estimators.consistency import ResponseConsistency
from selfcal_lightning.confidence.estimators.p_true import PTrue
from selfcal_lightning.confidence.estimators.reward_model import REWARD_SCORES
from selfcal_lightning.confidence.estimators.standardised import WEIGHTS
from selfcal_lightning.confidence.estimators.step_self_evaluation import StepSelfEvaluation
from selfcal_lightning.confidence.estimators.step_statistics import STEP_TRAJECTORIES, StepCertainty, StepEntropy
from selfcal_lightning.confidence.estimators.token_statistics import (
    LowestGroupConfidence,
    LowestLogprob,
    MeanLogprob,
    ResponseCertainty,
    SelfCertainty,
    SequenceLogprob,
    TokenEntropy,
    TokenSteadiness,
)
from selfcal_lightning.confidence.estimators.trajectories import TRAJECTORIES
from selfcal_lightning.confidence.estimators.verbalized import Verbalized, VerbalizedPercent, VerbalizedWords
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.errors import InputError, unknown_name

if TYPE_CHECKING:
    from selfcal_lightning.confidence.estimators.token_reader import TokenReader
    from selfcal_lightning.prompts.chat_format import ChatFormat
    from selfcal_lightning.rewards.reading import RewardReader


class EstimatorClass(Protocol):
    """What the registry knows of an estimator before there is one.

    Attributes:
        name: Its name.
        is_probability: See :class:`~selfcal_lightning.confidence.base.Estimator`.
        needs_pool: Likewise.
        reads: What it is made from: "engine" (an engine and a chat format), "tokens" (a token reader, which is a local
            model), "rewards" (a reward reader) or "pool" (nothing but the samples).
    """

    name: str
    is_probability: bool
    needs_pool: bool
    reads: str

    def __call__(self, *args: Any, **settings: Any) -> Estimator:
        """Make one."""
        ...


_OWN = cast(  # a class whose attributes are class variables is one of them
    "tuple[EstimatorClass, ...]",
    (
        PTrue,
        Verbalized,
        VerbalizedWords,
        VerbalizedPercent,
        ResponseConsistency,
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
        *REWARD_SCORES,
    ),
)
ESTIMATORS: dict[str, EstimatorClass] = {estimator.name: estimator for estimator in _OWN}
READS = ("engine", "tokens", "rewards", "pool")
_PARTS = ("name", "is_probability", "needs_pool", "reads", "score")


def register_estimator(estimator: EstimatorClass) -> EstimatorClass:
    """Add an estimator under the ``name`` of its class, and return the class: it can stand as a decorator.

    Raises:
        InputError: The name is taken, or the class does not say what it is and what it reads.
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
    """Return the class of the estimator ``name``.

    Raises:
        InputError: There is none of that name; the message says which there are.

    Example:
        >>> estimator_class("token_entropy").is_probability
        False
    """
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    raise unknown_name("estimator", name, ESTIMATORS)


def estimator_settings(name: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of the estimator ``name``: its defaults with ``changes``, for the record of what was run.

    Raises:
        InputError: It has no such setting.

    Example:
        >>> estimator_settings("response_consistency", num_samples=5)
        {'num_samples': 5, 'seed': 0}
    """
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
    rewards: RewardReader | None = None,
    **settings: Any,
) -> Estimator:
    """Return the estimator ``name``, made from those of the arguments that it reads.

    Args:
        name: Name of the estimator.
        engine: Who answers, where it asks.
        chat: Chat format of the engine's tokenizer.
        tokens: Reader of token statistics, where it reads those.
        rewards: Reader of a reward model's scores, where it reads those.
        **settings: Keyword arguments of its class.

    Raises:
        InputError: The name is unknown, or what it reads was not given.
    """
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
