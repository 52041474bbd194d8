"""Predicted capability against what the responses show, before training and after every validation."""

from __future__ import annotations

from matplotlib.figure import Figure

from selfcal_lightning.callbacks.pool_curve import Columns, PoolCurve, Pools
from selfcal_lightning.evaluation.capability.figures import capability_scatter
from selfcal_lightning.evaluation.reports.calibration_figures import reliability_diagram
from selfcal_lightning.metrics.capability import CapabilityMetrics
from selfcal_lightning.training.trained_modules import CapabilityModule

POOL = "validation"


class CapabilityCurve(PoolCurve):
    """Draws the validation questions of a probe whose responses are judged.

    Tags of the figures in TensorBoard are ``capability_curve/before/validation/<figure>``, at step 0, and
    ``capability_curve/val/validation/<figure>`` after every validation, the one before drawn in for comparison.
    Figures are "reliability", the share of right responses over bins of the predicted capability, and "scatter", each
    question by itself.

    Args:
        before: Whether to score the questions before training.
        num_bins: Bins of the reliability diagram.
        save_images: Whether to write the figures into ``figures/`` of the log folder too.
    """

    tag, contract, metrics_class = "capability_curve", CapabilityModule, CapabilityMetrics

    def __init__(self, *, before: bool = True, num_bins: int = 10, save_images: bool = True) -> None:
        super().__init__(before=before, num_bins=num_bins, save_images=save_images)

    def pools(self, metrics: CapabilityMetrics) -> Pools:
        """Return predictions and shares of right responses; nothing where none is judged."""
        predicted, correct, samples = metrics.questions_seen()
        return {POOL: (predicted, correct / samples)} if len(predicted) else {}

    def figures(self, pool: str, columns: Columns, before: Columns | None) -> dict[str, Figure]:
        """Return the figures."""
        predicted, share = columns
        earlier = None if before is None else (before[0], before[1])
        return {
            "reliability": reliability_diagram(predicted, share, before=earlier, num_bins=self.num_bins, title=pool),
            "scatter": capability_scatter(predicted, share, title=pool),
        }
