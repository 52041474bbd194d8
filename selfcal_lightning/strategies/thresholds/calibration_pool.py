"""Calibration questions made ready for a choice: checked once, with the confidences that the strategy reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from selfcal_lightning.confidence.base import add_scores, check_confidence
from selfcal_lightning.confidence.dependence import KnownConfidence, refuse_looking_ahead
from selfcal_lightning.confidence.fitting.calibration_split import FittedOn, check_disjoint, check_not_fitted_on
from selfcal_lightning.confidence.fitting.loading import FittedScorer
from selfcal_lightning.errors import InputError
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.registry import check_can_answer


@dataclass(frozen=True)
class CalibrationPool:
    """Calibration questions on which a threshold may be chosen.

    Attributes:
        entries: The questions with the scorers' confidences.
        scorers: What was put on them.
        fitted_on: Their record.
    """

    entries: tuple[QuestionSamples, ...]
    scorers: tuple[FittedScorer, ...]
    fitted_on: FittedOn

    @property
    def num_samples(self) -> int:
        """Responses that every question has: as many as the shortest one."""
        return min(len(entry.samples) for entry in self.entries)


def calibration_pool(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    scorers: Sequence[FittedScorer] = (),
    *,
    known: Iterable[KnownConfidence] = (),
) -> CalibrationPool:
    """Check everything that a choice on ``pool`` depends on, once.

    Args:
        strategy: What a threshold is chosen for.
        pool: Questions with references.
        scorers: Fitted confidences to put on the samples, in the order of computation.
        known: What the pool knows of its confidences; see ``confidence.dependence.pool_dependent``.

    Raises:
        MissingConfidenceError: A question lacks the confidence that the strategy reads.
        ValueError: There is no question or one without a reference, a scorer was fitted on one of them, the strategy
            knows the reference, reads what depends on the other responses, or may draw more than a question has.
    """
    check_can_answer(strategy.name)
    if not pool:
        raise InputError("Expected `pool` to hold at least one calibration question, but got none.")
    check_not_fitted_on(pool, scorers)
    entries = ready_entries(strategy, pool, scorers, known=known)
    return CalibrationPool(entries, tuple(scorers), FittedOn.from_pool(pool))


def check_guide(calibration: CalibrationPool, guide: Sequence[QuestionSamples]) -> None:
    """Raise ValueError where a guide shares a question with the calibration questions: luck would be chosen with it."""
    check_disjoint(
        (entry.question for entry in calibration.entries),
        (entry.question for entry in guide),
        names=("`pool`", "`guide`"),
        way_out="Take other questions for it, such as those that the scorers were fitted on, or none.",
    )


def ready_entries(
    strategy: Strategy,
    pool: Sequence[QuestionSamples],
    scorers: Sequence[FittedScorer],
    *,
    known: Iterable[KnownConfidence] = (),
) -> tuple[QuestionSamples, ...]:
    """Return the questions with the scorers' confidences, checked for what the strategy needs of them."""
    unknown = next((e.question.id for e in pool if any(sample.correct is None for sample in e.samples)), None)
    if unknown is not None:
        raise InputError(f"Expected every calibration question to have a reference answer, but {unknown!r} has none.")
    _check_width(strategy, pool)
    scored = tuple(
        replace(entry, samples=tuple(add_scores(sample, scorers) for sample in entry.samples)) for entry in pool
    )
    if strategy.confidence is not None:
        refuse_looking_ahead([strategy.confidence], [*known, *scorers])
        check_confidence(scored, strategy.confidence)
    return scored


def _check_width(strategy: Strategy, pool: Sequence[QuestionSamples]) -> None:
    shortest = min(pool, key=lambda entry: len(entry.samples))
    if strategy.max_samples > len(shortest.samples):
        raise InputError(
            f"Expected `max_samples` of {strategy.name} to be at most {len(shortest.samples)}, the fewest responses "
            f"that a calibration question has ({shortest.question.id!r}), but got {strategy.max_samples}: where the "
            "responses end, another procedure is tested than the one that will be used. Lower it, or sample more."
        )
