"""Which confidences are computed from the other responses to the question: asked here and nowhere else.

Such a confidence does not exist while sampling is under way, and one that was computed over a whole pool lets whoever
reads it response by response look ahead. What is computed from one depends on the other responses as much as itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from selfcal_lightning.confidence.estimators.registry import ESTIMATORS
from selfcal_lightning.errors import InputError


class KnownConfidence(Protocol):
    """What says of itself whether it needs the other responses: scalers, fusions, recorded confidences."""

    @property
    def name(self) -> str:
        """Key of the confidence on a sample."""
        ...

    @property
    def requires(self) -> tuple[str, ...]:
        """Names of the confidences that it is computed from."""
        ...

    @property
    def needs_pool(self) -> bool:
        """Whether it is computed from the other responses to the question, directly or through what it reads."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedConfidence:
    """A confidence that samples carry and that no estimator or scorer at hand computed.

    Attributes:
        name: Key of the confidence on a sample.
        needs_pool: Whether it was computed from the other responses to the question.
    """

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
    """Return what is known of annotations.

    Args:
        estimators: The estimator that computed each, by the annotation's name.

    Example:
        >>> recorded_confidences({"agreement": "response_consistency"})
        [RecordedConfidence(name='agreement', needs_pool=True)]
    """
    known = {name: ESTIMATORS[estimator] for name, estimator in estimators.items() if estimator in ESTIMATORS}
    return [RecordedConfidence(name, estimator.needs_pool) for name, estimator in known.items()]


def pool_dependent(names: Iterable[str], known: Iterable[KnownConfidence] = ()) -> list[str]:
    """Return those of ``names`` that depend on the other responses to the question, in their order.

    Args:
        names: Names of confidences.
        known: Scorers in use, in the order of computation, and what a pool knows of its confidences. Of other names
            the estimators and targets of this library are known; all the rest is taken for a property of one response.

    Example:
        >>> pool_dependent(["p_true", "response_consistency", "agreement"])
        ['response_consistency']
        >>> pool_dependent(["agreement"], [RecordedConfidence("agreement", needs_pool=True)])
        ['agreement']
    """
    # Asked each time: plug-ins add estimators.
    needs = {one.name: one.needs_pool for one in ESTIMATORS.values()} | {one.name: one.needs_pool for one in TARGETS}
    for one in known:
        needs[one.name] = one.needs_pool or any(needs.get(source, False) for source in one.requires)
    return [name for name in names if needs.get(name, False)]


def refuse_looking_ahead(names: Iterable[str], known: Iterable[KnownConfidence] = ()) -> None:
    """Raise ValueError where a strategy would read a confidence that depends on the other responses.

    Args:
        names: What it reads.
        known: See :func:`pool_dependent`.
    """
    ahead = pool_dependent(names, known)
    if ahead:
        raise InputError(
            f"Expected confidences that belong to one response, but got {', '.join(ahead)}, which depend on the other "
            "responses to the question: a strategy that reads them looks ahead. Leave them out, with what was fitted "
            "to them."
        )


def check_name_tells(confidence: KnownConfidence) -> None:
    """Raise ValueError where a JSON-lines pool, which keeps no more of a confidence than its name, would hide this.

    Args:
        confidence: What is about to be written.
    """
    if confidence.needs_pool and not pool_dependent([confidence.name]):
        raise InputError(
            f"Expected a confidence that depends on the other responses to keep its estimator's name in a JSON-lines "
            f"pool, but got {confidence.name!r}: by another name nobody would know. Leave the name as it is; a store "
            "remembers the estimator of each of its annotations and may hold several."
        )
