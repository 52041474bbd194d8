"""Reliability diagram, ROC and distribution of confidence, before training and after every validation."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from selfcal_lightning.callbacks.pool_curve import Columns, PoolCurve, Pools
from selfcal_lightning.evaluation.reports.calibration_figures import (
    confidence_distribution,
    reliability_diagram,
    roc_figure,
)
from selfcal_lightning.metrics.collection import CalibrationMetrics, CalibrationPoints
from selfcal_lightning.training.trained_modules import PoolModule

ALL = "all"


class CalibrationCurve(PoolCurve):
    """Draws the validation pool: per task, and over all of them where there are several.

    Tags of the figures in TensorBoard:

    - ``calibration_curve/before/<task>/<figure>``: the weights that training starts from, at step 0;
    - ``calibration_curve/val/<task>/<figure>``: after every validation, the one before drawn in for comparison. Where
      training ends without a validation of its last step, one more pass is made.

    The metrics of a pass that Lightning does not make itself stand with those that it logs, under ``val/``, so that
    before and after share their charts.

    The pool holds samples of the base model: these are not the calibrated model's own responses.

    Args:
        before: Whether to score the pool before training (one pass over the validation data).
        num_bins: Bins of the reliability diagram.
        save_images: Whether to write the figures into ``figures/`` of the log folder too, as
            ``<stage>-<task>-<figure>.png``.
    """

    tag, contract, metrics_class = "calibration_curve", PoolModule, CalibrationMetrics

    def __init__(self, *, before: bool = True, num_bins: int = 10, save_images: bool = True) -> None:
        super().__init__(before=before, num_bins=num_bins, save_images=save_images)

    def pools(self, metrics: CalibrationMetrics) -> Pools:
        """Return confidences and labels by task."""
        return dict(labelled(metrics.points()))

    def figures(self, pool: str, columns: Columns, before: Columns | None) -> dict[str, Figure]:
        """Return the figures of a task."""
        confidence, correct = columns
        earlier = None if before is None else (before[0], before[1])
        now = {"before" if earlier is None else "after": (confidence, correct)}
        return {
            "reliability": reliability_diagram(confidence, correct, before=earlier, num_bins=self.num_bins, title=pool),
            "roc": roc_figure(now if earlier is None else {"before": earlier, **now}, title=pool),
            "distribution": confidence_distribution(confidence, correct, title=pool),
        }


def labelled(points: CalibrationPoints) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return confidences and labels by task, and of all tasks where there are several; unknown ones left out."""
    known = points.select(~np.isnan(points.correct) & ~np.isnan(points.confidence))
    tasks = np.unique(known.task).tolist()
    pools = {task: known.select(known.task == task) for task in tasks}
    if len(tasks) > 1:
        pools[ALL] = known
    return {task: (pool.confidence, pool.correct) for task, pool in pools.items()}
