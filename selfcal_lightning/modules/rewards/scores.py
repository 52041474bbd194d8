"""What is logged of a reward model on a pool of responses: at every place, and at the ends of the responses."""

from __future__ import annotations

import torch

from selfcal_lightning.functional.quantiles import StepScores
from selfcal_lightning.metrics.steps import PREFIXES, QuantileMetrics, StepMetrics
from selfcal_lightning.modules.rewards.batch import RewardBatch


class PlaceMetrics(torch.nn.Module):
    """Brier, ECE, bias, pinball and coverage at every place of which a rate is known, by position and overall.

    Args:
        levels: Levels of the lower and the upper quantile.
    """

    def __init__(self, levels: tuple[float, float]) -> None:
        super().__init__()
        self.means, self.quantiles = StepMetrics(), QuantileMetrics(levels)

    def reset(self) -> None:
        """Forget the last pass."""
        self.means.reset()
        self.quantiles.reset()

    def update(self, batch: RewardBatch, scores: StepScores) -> None:
        """Add the places of a batch, [M]."""
        known = ~batch.place_rate.isnan()
        rate, kind = batch.place_rate[known], batch.place_kind[known]
        self.means.update(scores.mean[known], rate, batch.place_rollouts[known], kind)
        self.quantiles.update(scores.low[known], scores.high[known], rate, kind)

    def compute(self) -> dict[str, float]:
        """Return the numbers by key; see ``StepMetrics`` and ``QuantileMetrics``. Empty where no rate is known."""
        values = {**self.means.compute(), **self.quantiles.compute()}
        return values if values[PREFIXES] else {}
