"""How strategies are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from selfcal_lightning.confidence.fitting.fusion import FusionTarget
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.strategies.plans import PLANS, check_labels, check_thresholds
from selfcal_lightning.strategies.thresholds.grids import THRESHOLDS
from selfcal_lightning.strategies.vectorised.orders import NUM_RESHUFFLES, SEED


@dataclass(frozen=True)
class StrategySettings:
    """How strategies are evaluated; every field is an option of ``selfcal evaluate``.

    Attributes:
        strategies: Labels of strategies; self-consistency is always among them.
        confidences: What to weigh by; None takes the pool's probabilities and, with calibration questions, scaled
            scores and the fusion.
        max_samples: Budget of a question; None takes what every question has.
        budgets: Mean numbers of samples at which accuracy is stated; None takes 1, 2, 4, 8 ... up to the budget.
        targets: Samples of self-consistency whose accuracy the others are to reach; None takes 4, 8 and 16 where the
            budget allows, or the budget itself.
        thresholds: Grid of the strategies whose parameter is a threshold.
        fusion_target: What the fusion is fitted to.
        num_reshuffles: Orders of the pool; 0 takes the recorded one.
        num_resamples: Bootstrap resamples of the questions.
        cost_tokens: What generating and training cost, in generated tokens; None leaves the break-even out.
        seed: Of orders, halves and resamples.
    """

    strategies: Sequence[str] = tuple(PLANS)
    confidences: Sequence[str] | None = None
    max_samples: int | None = None
    budgets: Sequence[int] | None = None
    targets: Sequence[int] | None = None
    thresholds: Sequence[float] = THRESHOLDS
    fusion_target: FusionTarget = "label"
    num_reshuffles: int = NUM_RESHUFFLES
    num_resamples: int = 1000
    cost_tokens: float | None = None
    seed: int = SEED

    def __post_init__(self) -> None:
        check_labels(self.strategies)
        check_thresholds(self.thresholds)
        for name in ("num_reshuffles", "num_resamples"):
            if getattr(self, name) < 0:
                raise InputError(f"Expected `{name}` to be at least 0, but got {getattr(self, name)}.")
        if self.max_samples is not None and self.max_samples < 1:
            raise InputError(f"Expected `max_samples` to be None or at least 1, but got {self.max_samples}.")
        _check_counts(budgets=self.budgets, targets=self.targets)
        if self.confidences is not None and len(set(self.confidences)) < len(self.confidences):
            raise InputError(f"Expected `confidences` to be different ones, but got {list(self.confidences)}.")


def _check_counts(**counts: Sequence[int] | None) -> None:
    """Raise ValueError unless every list is None or holds whole numbers from 1; keywords are the options' names."""
    for name, values in counts.items():
        if values is not None and (not values or not all(isinstance(v, int) and v >= 1 for v in values)):
            raise InputError(
                f"Expected `{name}` to be null or numbers of samples from 1, at least one, but got {list(values)}."
            )


def settings_json(settings: StrategySettings) -> dict[str, Any]:
    """Return the settings as plain JSON types."""
    return {name: list(value) if isinstance(value, tuple | list) else value for name, value in vars(settings).items()}
