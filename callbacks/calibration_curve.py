"""Reliability diagram, ROC and distribution of confidence, before training and after every validation."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from matplotlib.figure import Figure

from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.reports.calibration_figures import (
    confidence_distribution,
    reliability_diagram,
    roc_figure,
)
from selfcal_lightning.evaluation.reports.figure_files import save_figure
from selfcal_lightning.metrics.collection import CalibrationPoints
from selfcal_lightning.models.evaluation_mode import evaluation_mode
from selfcal_lightning.training.contracts import check_members
from selfcal_lightning.training.lightning_internals import build_validation_loaders
from selfcal_lightning.training.trained_modules import PoolModule

ALL = "all"
Labelled = dict[str, tuple[np.ndarray, np.ndarray]]


class CalibrationCurve(Callback):
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

    def __init__(self, *, before: bool = True, num_bins: int = 10, save_images: bool = True) -> None:
        if num_bins < 1:
            raise InputError(f"Expected `num_bins` to be a positive integer, but got {num_bins}.")
        self.before, self.num_bins, self.save_images = before, num_bins, save_images
        self._before: Labelled = {}
        self._drawn_at: int | None = None
        self._folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: PoolModule, stage: str) -> None:
        """Ask for the log folder while all processes are here: they agree on it by a broadcast."""
        check_members(pl_module, PoolModule, who=type(self).__name__, kind="a module")
        self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "figures"

    def state_dict(self) -> dict[str, Any]:
        """Return the responses scored before training, so that a resumed run compares with the same start."""
        return {task: [torch.tensor(column) for column in columns] for task, columns in self._before.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the start of the run that is resumed."""
        self._before = {task: tuple(column.numpy() for column in columns) for task, columns in state_dict.items()}

    def on_train_start(self, trainer: Trainer, pl_module: PoolModule) -> None:
        """Score and draw the pool with the weights that training starts from; a resumed run has done so."""
        if not self.before or trainer.global_step > 0 or not trainer.enable_validation:
            return
        points = score_pool(trainer, pl_module)
        if points is None:
            rank_zero_info("CalibrationCurve: there are no validation questions, so nothing is drawn.")
            return
        self._before = labelled(points)
        self._log(trainer, pl_module.val_metrics.compute())
        self._draw(trainer, "before")
        pl_module.val_metrics.reset()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: PoolModule) -> None:
        """Draw the pool that was just scored."""
        if trainer.sanity_checking:
            return
        self._drawn_at = trainer.global_step
        points = pl_module.val_metrics.points()
        self._draw(trainer, "val", points)

    def on_train_end(self, trainer: Trainer, pl_module: PoolModule) -> None:
        """Score and draw the pool once more where no validation has seen the last weights."""
        if self._drawn_at == trainer.global_step or not trainer.enable_validation:
            return
        points = score_pool(trainer, pl_module)
        if points is None:
            return
        self._log(trainer, pl_module.val_metrics.compute())
        self._draw(trainer, "val", points)
        pl_module.val_metrics.reset()

    def _log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Write the metrics of a pass that Lightning knows nothing of, on the first process."""
        scalars = {f"val/{name}": float(value) for name, value in values.items() if value == value}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(scalars, step=trainer.global_step)

    def _draw(self, trainer: Trainer, stage: str, points: CalibrationPoints | None = None) -> None:
        """Write the figures, on the first process."""
        if not trainer.is_global_zero:
            return
        pools = self._before if points is None else labelled(points)
        if not pools:
            rank_zero_info("CalibrationCurve: no response of the validation pool has a label, so nothing is drawn.")
        for task, (confidence, correct) in pools.items():
            earlier = None if points is None else self._before.get(task)
            for name, figure in self._figures(task, confidence, correct, earlier).items():
                self._write(trainer, f"{stage}/{task}/{name}", figure)

    def _figures(
        self,
        task: str,
        confidence: np.ndarray,
        correct: np.ndarray,
        before: tuple[np.ndarray, np.ndarray] | None,
    ) -> dict[str, Figure]:
        now = {"before" if before is None else "after": (confidence, correct)}
        return {
            "reliability": reliability_diagram(confidence, correct, before=before, num_bins=self.num_bins, title=task),
            "roc": roc_figure(now if before is None else {"before": before, **now}, title=task),
            "distribution": confidence_distribution(confidence, correct, title=task),
        }

    def _write(self, trainer: Trainer, name: str, figure: Figure) -> None:
        if self.save_images:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, self._folder / f"{name.replace('/', '-')}.png", dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(f"calibration_curve/{name}", figure, trainer.global_step)


def labelled(points: CalibrationPoints) -> Labelled:
    """Return confidences and labels by task, and of all tasks where there are several; unknown ones left out."""
    known = points.select(~np.isnan(points.correct) & ~np.isnan(points.confidence))
    tasks = np.unique(known.task).tolist()
    pools = {task: known.select(known.task == task) for task in tasks}
    if len(tasks) > 1:
        pools[ALL] = known
    return {task: (pool.confidence, pool.correct) for task, pool in pools.items()}


def score_pool(trainer: Trainer, module: Any) -> CalibrationPoints | None:
    """Run the validation data through the module, outside of Lightning's loop, and return all processes' points.

    None where the data module has no validation questions, and so no loader of them.
    Lightning cannot validate before the first training step other than by its sanity check, whose results it drops.
    """
    if trainer.val_dataloaders is None:
        build_validation_loaders(trainer)
    loaders = trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, list) else [loaders]
    if not loaders:
        return None
    module.val_metrics.reset()
    with evaluation_mode(module), torch.no_grad():
        for loader, limit in zip(loaders, trainer.num_val_batches, strict=True):
            for index, batch in enumerate(islice(loader, None if limit == float("inf") else int(limit))):
                trainer.strategy.validation_step(trainer.strategy.batch_to_device(batch, module.device), index)
    return module.val_metrics.points()
