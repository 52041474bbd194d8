"""Predicted capability against the share of right samples, from one pass over the questions."""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.calibration import expected_calibration_error, reliability_bins
from selfcal_lightning.metrics.capability import skill, squared_error
from selfcal_lightning.metrics.discrimination import pearson, spearman
from selfcal_lightning.metrics.drawing import axes_to_draw_on, draw_reliability_of
from selfcal_lightning.metrics.streaming import ExactMetric, check_probabilities, check_vectors

NAMES = ("MSE", "RMSE", "MAE", "Skill", "Pearson", "Spearman", "ECE", "Questions")
KEYS = tuple(f"capability/{name}" for name in NAMES)


class CapabilityMetrics(ExactMetric):
    """How good predictions of capability are.

    The keys of ``compute``:

    - ``capability/MSE``, ``capability/RMSE``: squared error and its root; debiased, they do not depend on how many
      samples a question has, and the root of a squared error below 0 is 0;
    - ``capability/MAE``: mean absolute difference from the share of right samples, whose noise it includes;
    - ``capability/Skill``: share of the variance of capability that is explained; 0 for a constant, at most 1;
    - ``capability/Pearson``, ``capability/Spearman``: correlation with the share of right samples;
    - ``capability/ECE``: over bins of the prediction, against the mean share of right samples;
    - ``capability/Questions``: how many they are.

    As input to ``update``:
        predicted: Predicted capability of each question [B], in [0, 1].
        num_correct: Right samples of each question [B].
        num_samples: Samples of each question [B]; at least 2 where errors are debiased.

    As output of ``compute``: floats by key; NaN where a value is not defined.

    Args:
        num_bins: Bins of equal width of the calibration error.
        debiased: Whether the noise of the samples is taken out of MSE, RMSE and skill.
        kwargs: Passed to ``torchmetrics.Metric``.

    Example:
        >>> metric = CapabilityMetrics(debiased=False)
        >>> metric.update(torch.tensor([0.25, 0.75]), torch.tensor([0, 4]), torch.tensor([4, 4]))
        >>> values = metric.compute()
        >>> values["capability/MSE"], values["capability/Skill"], values["capability/Spearman"]
        (0.0625, 0.75, 1.0)
    """

    questions: list[Tensor]

    def __init__(self, num_bins: int = 10, *, debiased: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_bins = num_bins
        self.debiased = debiased
        self.add_rows("questions", width=3, dtype=torch.float64)

    def update(self, predicted: Tensor, num_correct: Tensor, num_samples: Tensor) -> None:
        check_vectors(predicted=predicted, num_correct=num_correct, num_samples=num_samples)
        check_probabilities(predicted, "predicted")
        columns = (predicted.detach().double(), num_correct.double(), num_samples.double())
        self.questions.append(torch.stack(columns, dim=1))

    def compute(self) -> dict[str, float]:
        rows = self.rows("questions").cpu().numpy()
        # Sorted, so that sums do not depend on how questions are split into processes and batches.
        predicted, correct, samples = rows[np.lexsort(rows.T)].T
        share = correct / samples
        error = squared_error(predicted, correct, samples, debiased=self.debiased)
        values = (
            error,
            None if error is None else max(error, 0.0) ** 0.5,
            np.abs(predicted - share).mean() if len(predicted) else None,
            skill(predicted, correct, samples, debiased=self.debiased),
            pearson(predicted, share),
            spearman(predicted, share),
            expected_calibration_error(predicted, share, num_bins=self.num_bins),
            len(predicted),
        )
        return {key: np.nan if value is None else float(value) for key, value in zip(KEYS, values, strict=True)}

    def questions_seen(self) -> tuple[Floats, Floats, Floats]:
        """Return the predicted capability, right samples and samples of the questions of all processes [Q] each."""
        with self.synced():
            predicted, correct, samples = self.rows("questions").cpu().numpy().T
        return predicted, correct, samples

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw the share of right samples over the predicted capability."""
        predicted, correct, samples = self.questions_seen()
        figure, axes = axes_to_draw_on(ax)
        bins = reliability_bins(predicted, correct / samples, num_bins=self.num_bins)
        draw_reliability_of(axes, bins, outcome="share of right samples")
        axes.set_xlabel("predicted capability")
        return figure, axes
