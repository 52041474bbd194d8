"""Scores of prefixes of responses against the success rates of rollouts from them, by position and overall.

Positions are those of ``data.steps.POSITIONS``. Only a few float64 sums for each are kept and exchanged.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.steps import POSITIONS
from selfcal_lightning.metrics.arrays import uniform_edges
from selfcal_lightning.metrics.calibration import ReliabilityBins
from selfcal_lightning.metrics.streaming import ExactMetric, check_probabilities, check_vectors
from selfcal_lightning.training.losses import pinball_loss

STEP_BRIER, STEP_BRIER_EXCESS, STEP_BIAS, STEP_ECE = "steps/Brier", "steps/BrierExcess", "steps/Bias", "steps/ECE"
STEP_PINBALL, STEP_BELOW, STEP_ABOVE = "steps/Pinball", "steps/BelowLow", "steps/AboveHigh"
PREFIXES = "count/Prefixes"
_ROUNDING = 1e-9  # counts a rate at the tolerance as inside, in spite of floats


class _PositionMetric(ExactMetric):
    sums: Tensor

    def __init__(self, num_columns: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        zeros = torch.zeros(len(POSITIONS), num_columns, dtype=torch.float64)
        self.add_state("sums", default=zeros, dist_reduce_fx="sum")

    def add(self, position: Tensor, columns: Sequence[Tensor]) -> None:
        """Add columns [B] to the sums of their positions [B]."""
        if not ((position >= 0) & (position < len(POSITIONS))).all():
            raise InputError(f"Expected `position` to lie in [0, {len(POSITIONS)}), but got {position.tolist()[:5]}.")
        # index_add, not bincount: it has a deterministic form on GPUs.
        self.sums += torch.zeros_like(self.sums).index_add_(0, position.long(), torch.stack(list(columns), dim=1))

    def compute(self) -> dict[str, float]:
        """Return the numbers over all prefixes of all processes, overall and by position."""
        values = self.values(self.sums.sum(0))
        for name, sums in zip(POSITIONS, self.sums, strict=True):
            if sums[0] > 0:
                values.update({f"{name}/{key}": value for key, value in self.values(sums).items()})
        return values

    @abstractmethod
    def values(self, sums: Tensor) -> dict[str, float]:
        """Return the numbers of one row of sums [C]; the first sum is the number of prefixes."""


class StepMetrics(_PositionMetric):
    """How well the score of a prefix agrees with the success rate of its rollouts.

    The keys of ``compute``:

    - ``steps/Brier``: mean squared difference; ``steps/BrierExcess``: less the noise of the rollouts, over the prefixes
      with at least two;
    - ``steps/Bias``: mean difference, above 0 where the model is too confident;
    - ``steps/ECE``: calibration error over bins of equal width;
    - ``count/Prefixes``;

    and the same for each position that was seen, as in ``first/steps/Brier``.

    As input to ``update``:
        score: Predicted chance of each prefix [B], in [0, 1].
        rate: Share of its rollouts that succeeded [B], in [0, 1].
        num_rollouts: Number of rollouts [B]; 1 for a whole response.
        position: Index of its position in ``POSITIONS`` [B].

    As output of ``compute``: floats by key; NaN where a value is not defined.

    Args:
        num_bins: Bins of the calibration error.
        kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metric = StepMetrics()
        >>> score, rate = torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.0])
        >>> metric.update(score, rate, torch.tensor([5, 1]), torch.tensor([1, 4]))
        >>> values = metric.compute()
        >>> values["steps/Brier"], values["first/steps/Brier"], values["end/steps/Bias"], values["steps/BrierExcess"]
        (0.5, 0.0, 1.0, -0.0625)
    """

    higher_is_better = False

    def __init__(self, num_bins: int = 10, **kwargs: Any) -> None:
        edges = uniform_edges(num_bins)
        super().__init__(num_columns=5 + 3 * num_bins, **kwargs)
        self.edges = edges

    def update(self, score: Tensor, rate: Tensor, num_rollouts: Tensor, position: Tensor) -> None:
        check_vectors(score=score, rate=rate, num_rollouts=num_rollouts, position=position)
        check_probabilities(score, "score")
        check_probabilities(rate, "rate")
        score, rate, size = score.detach().double(), rate.detach().double(), num_rollouts.double()
        if not (size >= 1).all():
            raise InputError(f"Expected `num_rollouts` to be at least 1, but got {size.min().item():g}.")
        error, ones = (score - rate) ** 2, torch.ones_like(score)
        is_repeated = size >= 2
        excess = torch.where(is_repeated, error - rate * (1.0 - rate) / (size - 1.0).clamp(min=1.0), 0.0)
        bins = torch.bucketize(score.contiguous(), torch.as_tensor(self.edges[1:-1], device=score.device), right=True)
        one_hot = torch.nn.functional.one_hot(bins, len(self.edges) - 1).double()
        binned = torch.cat([one_hot, one_hot * score[:, None], one_hot * rate[:, None]], dim=1)
        self.add(position, [ones, error, score - rate, is_repeated.double(), excess, *binned.unbind(1)])

    def values(self, sums: Tensor) -> dict[str, float]:
        count, error, bias, repeated, excess = sums[:5].tolist()
        ece = ReliabilityBins.from_sums(self.edges, *(part.cpu().numpy() for part in sums[5:].chunk(3))).expected_error
        return {
            STEP_BRIER: _ratio(error, count),
            STEP_BRIER_EXCESS: _ratio(excess, repeated),
            STEP_BIAS: _ratio(bias, count),
            STEP_ECE: float("nan") if ece is None else ece,
            PREFIXES: count,
        }


class QuantileMetrics(_PositionMetric):
    """How well two predicted quantiles enclose the success rate of the rollouts of a prefix.

    The keys of ``compute``:

    - ``steps/Pinball``: mean pinball loss of both quantiles;
    - ``steps/BelowLow``: share of rates below the lower one by more than the tolerance, nominally at most its level;
    - ``steps/AboveHigh``: share of rates above the upper one, nominally at most 1 minus its level;
    - ``count/Prefixes``;

    and the same for each position that was seen, as in ``first/steps/Pinball``.

    As input to ``update``:
        low: Lower quantile of each prefix [B], in [0, 1].
        high: Upper quantile of each prefix [B], in [0, 1].
        rate: Share of its rollouts that succeeded [B], in [0, 1].
        position: Index of its position in ``POSITIONS`` [B].

    As output of ``compute``: floats by key; NaN before any prefix.

    Args:
        levels: Levels of the two quantiles, increasing, within (0, 1).
        tolerance: A rate this far beyond a quantile still counts as inside.
        kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metric = QuantileMetrics()
        >>> metric.update(torch.tensor([0.25]), torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1]))
        >>> values = metric.compute()  # pinball .9 * .25 and .1 * .5
        >>> round(values["steps/Pinball"], 4), values["steps/BelowLow"], values["first/steps/AboveHigh"]
        (0.1375, 1.0, 0.0)
    """

    higher_is_better = False

    def __init__(self, levels: tuple[float, float] = (0.1, 0.9), *, tolerance: float = 0.05, **kwargs: Any) -> None:
        super().__init__(num_columns=4, **kwargs)
        if not 0.0 < levels[0] < levels[1] < 1.0:
            raise InputError(f"Expected `levels` to rise within (0, 1), but got {levels}.")
        if not tolerance >= 0.0:
            raise InputError(f"Expected `tolerance` to be at least 0, but got {tolerance}.")
        self.levels = levels
        self.tolerance = tolerance

    def update(self, low: Tensor, high: Tensor, rate: Tensor, position: Tensor) -> None:
        check_vectors(low=low, high=high, rate=rate, position=position)
        for name, values in (("low", low), ("high", high), ("rate", rate)):
            check_probabilities(values, name)
        low, high, rate = (column.detach().double() for column in (low, high, rate))
        losses = pinball_loss(torch.stack([low, high], dim=1), rate, self.levels).mean(1)
        beyond = [(low - rate > self.tolerance + _ROUNDING), (rate - high > self.tolerance + _ROUNDING)]
        self.add(position, [torch.ones_like(rate), losses, *(outside.double() for outside in beyond)])

    def values(self, sums: Tensor) -> dict[str, float]:
        count, pinball, below, above = sums.tolist()
        shares = {STEP_PINBALL: pinball, STEP_BELOW: below, STEP_ABOVE: above}
        return {key: _ratio(value, count) for key, value in shares.items()} | {PREFIXES: count}


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")
