"""A test set made ready for strategies: one budget for all sides, and the confidences on every sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from selfcal_lightning.confidence.fitting.weighed_pool import WeighedPool, weigh_pool
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.calibration_split import Calibrated
from selfcal_lightning.evaluation.strategies.curves import check_pool
from selfcal_lightning.evaluation.strategies.settings import StrategySettings
from selfcal_lightning.pools.recorded import RecordedPool


@dataclass(frozen=True)
class EvaluatedTest:
    """The samples of a test set as strategies see them.

    Attributes:
        name: Of the test set.
        width: Samples of each question that are used.
        pools: The samples with their confidences, by side; all sides have the same questions in the same order.
    """

    name: str
    width: int
    pools: Mapping[str, WeighedPool]

    @property
    def num_questions(self) -> int:
        """Questions."""
        return len(next(iter(self.pools.values())).pool.entries)


def prepare_test(
    name: str, pools: Mapping[str, RecordedPool], calibrated: Mapping[str, Calibrated], settings: StrategySettings
) -> EvaluatedTest:
    """Check a test set and put the confidences on its samples.

    Args:
        name: Of the test set.
        pools: By side, see ``evaluation_inputs.check_inputs``; the first side's self-consistency is what the others are
            held against.
        calibrated: What came of each side's calibration questions.
        settings: How strategies are evaluated.

    Raises:
        MissingConfidenceError: A confidence asked for is absent; names the estimator to run.
        ValueError: A scorer was fitted on one of these questions, or a pool cannot be evaluated as asked.
    """
    width = _width(name, pools, calibrated, settings)
    check_budgets(width, budgets=settings.budgets, targets=settings.targets)
    weighed = {side: weigh_pool(pool, calibrated[side].names, calibrated[side].scorers) for side, pool in pools.items()}
    return EvaluatedTest(name, width, weighed)


def _width(
    test: str, pools: Mapping[str, RecordedPool], calibrated: Mapping[str, Calibrated], settings: StrategySettings
) -> int:
    """Return the budget that every question of every pool can pay, those of calibration too."""
    named = [(f"test set {test!r} ({side})", pool) for side, pool in pools.items()]
    named += [
        (f"the calibration split ({side})", half.pool)
        for side, found in calibrated.items()
        for half in (found.first_half, found.second_half)
        if half is not None
    ]
    return min(check_pool(pool, name, max_samples=settings.max_samples) for name, pool in named)


def check_budgets(width: int, **asked: Sequence[int] | None) -> None:
    """Raise ValueError where more samples are asked for than every question has; keywords are the options' names."""
    for name, values in asked.items():
        if values and max(values) > width:
            raise InputError(
                f"Expected `{name}` to be at most {width}, the samples that every question has, but got {max(values)}."
            )
