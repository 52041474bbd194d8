"""What an evaluation takes from a side's calibration questions: one half fits, the other chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from selfcal_lightning.confidence.fitting.calibration_split import halve_pool
from selfcal_lightning.confidence.fitting.loading import FittedScorer
from selfcal_lightning.confidence.fitting.weighed_pool import (
    WeighedPool,
    default_confidences,
    fit_confidences,
    weigh_pool,
)
from selfcal_lightning.evaluation.strategies.settings import StrategySettings
from selfcal_lightning.pools.recorded import RecordedPool


@dataclass(frozen=True)
class Calibrated:
    """What came of a side's calibration questions.

    Attributes:
        names: Confidences to weigh by.
        scorers: Fitted on the first half, or read from files.
        first_half: The questions of the fit, with the scorers' confidences.
        second_half: The questions on which settings are chosen, with the scorers' confidences.
    """

    names: tuple[str, ...]
    scorers: tuple[FittedScorer, ...]
    first_half: WeighedPool | None
    second_half: WeighedPool | None


def calibrate_side(
    pool: RecordedPool, calibration: RecordedPool | None, scorers: Sequence[FittedScorer], settings: StrategySettings
) -> Calibrated:
    """Fit what is asked for on the first half of the calibration questions, and keep the second for settings.

    Args:
        pool: The side's samples of test questions, of which only the names of the confidences are read.
        calibration: The side's samples of the calibration questions, or None.
        scorers: Fitted confidences from files.
        settings: How.
    """
    given = [scorer.name for scorer in scorers]
    wanted = settings.confidences
    if calibration is None:
        names = [*default_confidences(pool, can_fit=False), *given] if wanted is None else list(wanted)
        return Calibrated(tuple(names), tuple(scorers), None, None)
    names = [*default_confidences(calibration, can_fit=True), *given] if wanted is None else list(wanted)
    names = list(dict.fromkeys(names))
    halves = halve_pool(calibration.entries, seed=settings.seed)
    first, second = (calibration.subset({entry.question.id for entry in half}) for half in halves)
    own = fit_confidences(first, names, target=settings.fusion_target, known=scorers)
    first_half = weigh_pool(first, names, [*scorers, *own], fitting=[scorer.name for scorer in own])
    second_half = weigh_pool(second, names, [*scorers, *own])
    return Calibrated(tuple(names), (*scorers, *own), first_half, second_half)
