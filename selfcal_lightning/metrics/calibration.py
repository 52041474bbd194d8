"""Calibration error from sums over bins: memory does not grow with the number of responses."""

from __future__ import annotations

from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import uniform_edges
from selfcal_lightning.functional.calibration import ReliabilityBins
from selfcal_lightning.metrics.base import ExactMetric, check_probabilities, check_vectors
from selfcal_lightning.metrics.drawing import axes_to_draw_on, draw_reliability_of


class BinnedCalibrationError(ExactMetric):
    """Expected or maximum calibration error over bins of equal width, the last one closed at 1.0.

    torchmetrics' own gives 1.0 a bin of its own. Three float64 sums per bin are all that is kept and exchanged, so the
    value over several processes is that of one process, also when a process saw nothing.

    As input to ``update``:
        confidence: Confidences [B] in [0, 1], of any floating dtype.
        correct: Labels [B], 0 or 1.

    As output of ``compute``: the error in [0, 1] as a float64 scalar; NaN before any response.

    Args:
        num_bins: Number of bins.
        norm: "l1" for the expected error, "max" for the maximum.
        kwargs: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = BinnedCalibrationError()
        >>> metric.update(torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.2500, dtype=torch.float64)

    Reference:
        Guo et al., On Calibration of Modern Neural Networks, 2017, equations 3 and 5.
    """

    higher_is_better = False
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    count: Tensor
    confidence_sum: Tensor
    correct_sum: Tensor

    def __init__(self, num_bins: int = 10, *, norm: Literal["l1", "max"] = "l1", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if norm not in ("l1", "max"):
            raise InputError(f'Expected `norm` to be "l1" or "max", but got {norm!r}.')
        self.edges = uniform_edges(num_bins)
        self.norm = norm
        for name in ("count", "confidence_sum", "correct_sum"):
            self.add_state(name, default=torch.zeros(num_bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        """Add responses to the sums of their bins."""
        check_vectors(confidence=confidence, correct=correct)
        check_probabilities(confidence, "confidence")
        check_probabilities(correct, "correct")
        confidence, correct = confidence.detach().double(), correct.detach().double()
        inner_edges = torch.as_tensor(self.edges[1:-1], dtype=torch.float64, device=confidence.device)
        index = torch.bucketize(confidence, inner_edges, right=True)
        columns = torch.stack([torch.ones_like(confidence), confidence, correct], dim=1)
        # index_add, not bincount: it has a deterministic form on GPUs.
        sums = columns.new_zeros(len(self.count), 3).index_add_(0, index, columns)
        self.count += sums[:, 0]
        self.confidence_sum += sums[:, 1]
        self.correct_sum += sums[:, 2]

    def compute(self) -> Tensor:
        """Return the calibration error over all responses of all processes."""
        bins = self._local_bins()
        error = bins.expected_error if self.norm == "l1" else bins.maximum_error
        return torch.tensor(float("nan") if error is None else error, dtype=torch.float64, device=self.device)

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw accuracy over confidence."""
        figure, axes = axes_to_draw_on(ax)
        draw_reliability_of(axes, self.bins())
        return figure, axes

    def bins(self) -> ReliabilityBins:
        """Return what a reliability diagram shows, over all processes; every process has to call it."""
        with self.synced():
            return self._local_bins()

    def _local_bins(self) -> ReliabilityBins:
        sums = (state.cpu().numpy() for state in (self.count, self.confidence_sum, self.correct_sum))
        return ReliabilityBins.from_sums(self.edges, *sums)
