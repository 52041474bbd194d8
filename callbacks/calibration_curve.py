"""Figures of the validation pool before training and after every validation: what such callbacks share."""

from abc import ABC, abstractmethod
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from matplotlib.figure import Figure
from torchmetrics import Metric

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.capability.reports import capability_scatter
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.progress import say
from selfcal_lightning.evaluation.figures import confidence_distribution, reliability_diagram, roc_figure, save_figure
from selfcal_lightning.evaluation.metrics import change_of
from selfcal_lightning.metrics import calibration, discrimination
from selfcal_lightning.models.causal_lm import evaluation_mode
from selfcal_lightning.training.metrics import CalibrationMetrics
from selfcal_lightning.training.model_parallel import build_validation_loaders

Columns = tuple[np.ndarray, np.ndarray]  # confidences and outcomes
Pools = dict[str, Columns]


class PoolCurve(Callback, ABC):
    """Scores the validation pool with the weights that training starts from, and draws it then and later."""

    tag: ClassVar[str]  # first part of the figures' names in the loggers
    metrics_class: ClassVar[type[Metric]]  # of the module's `val_metrics`

    def __init__(self, *, before: bool = True, num_bins: int = 10, save_images: bool = True) -> None:
        check_at_least(1, num_bins=num_bins)
        self.before, self.num_bins, self.save_images = before, num_bins, save_images
        self._before: Pools = {}
        self._latest: Pools = {}
        self._drawn_at: int | None = None
        self._folder: Path | None = None

    @abstractmethod
    def pools(self, metrics: Any) -> Pools:
        """Return what is drawn of the pool's metrics, over all processes, by the name of its parts."""

    @abstractmethod
    def figures(self, pool: str, columns: Columns, before: Columns | None) -> dict[str, Figure]:
        """Return the figures of a part by name; ``before`` is the same part before training, None where unknown."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Ask for the log folder while all processes are here: they agree on it by a broadcast."""
        metrics = getattr(pl_module, "val_metrics", None)
        if not isinstance(metrics, self.metrics_class):
            raise InputError(
                f"{type(self).__name__} needs a module whose `val_metrics` are {self.metrics_class.__name__}, but got "
                f"{type(metrics).__name__} of {type(pl_module).__name__}."
            )
        self._folder = Path(trainer.log_dir or trainer.default_root_dir) / "figures"

    def state_dict(self) -> dict[str, Any]:
        """Return the pool scored before training, so that a resumed run compares with the same start."""
        return {pool: [torch.tensor(column) for column in columns] for pool, columns in self._before.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before = {pool: (one.numpy(), other.numpy()) for pool, (one, other) in state_dict.items()}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Score and draw the pool with the weights that training starts from; a resumed run has done so."""
        if not self.before or trainer.global_step > 0 or not trainer.enable_validation:
            return
        if (scored := self._score(trainer, pl_module)) is None:
            rank_zero_info(f"{type(self).__name__}: there are no validation questions, so nothing is drawn.")
            return
        self._before = scored
        self._draw(trainer, "before", scored, {})

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:
            return
        self._drawn_at = trainer.global_step
        self._draw(trainer, "val", self.pools(pl_module.val_metrics), self._before)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Score and draw the pool once more where no validation has seen the last weights."""
        if self._drawn_at == trainer.global_step or not trainer.enable_validation:
            return
        if (scored := self._score(trainer, pl_module)) is not None:
            self._draw(trainer, "val", scored, self._before)

    def _score(self, trainer: Trainer, module: Any) -> Pools | None:
        """Score the pool in a pass that Lightning does not know of, and log its metrics; None without a pool."""
        # Lightning validates before the first training step only in its sanity check, whose results it drops.
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
        values, pools = module.val_metrics.compute(), self.pools(module.val_metrics)
        module.val_metrics.reset()
        scalars = {f"val/{name}": float(value) for name, value in values.items() if value == value}
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(scalars, step=trainer.global_step)
        return pools

    def _draw(self, trainer: Trainer, stage: str, pools: Pools, before: Pools) -> None:
        self._latest = pools
        if not trainer.is_global_zero:
            return
        if not pools:
            rank_zero_info(f"{type(self).__name__}: no validation response has a label, so nothing is drawn.")
        for pool, columns in pools.items():
            for name, figure in self.figures(pool, columns, before.get(pool)).items():
                self._write(trainer, f"{stage}/{pool}/{name}", figure)

    def _write(self, trainer: Trainer, name: str, figure: Figure) -> None:
        if self.save_images:
            folder = cast("Path", self._folder)  # set in `setup`
            folder.mkdir(parents=True, exist_ok=True)
            save_figure(figure, folder / f"{name.replace('/', '-')}.png", dpi=110)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure(f"{self.tag}/{name}", figure, trainer.global_step)
            elif isinstance(logger, WandbLogger):
                logger.log_image(f"{self.tag}/{name}", [figure], step=trainer.global_step)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_figure(logger.run_id, figure, f"{self.tag}/{name}-{trainer.global_step}.png")


class CalibrationCurve(PoolCurve):
    """Draws the validation pool: per task, and over all of them where there are several.

    Tags of the figures in TensorBoard:

    - ``calibration_curve/before/<task>/<figure>``: the weights that training starts from, at step 0;
    - ``calibration_curve/val/<task>/<figure>``: after every validation, compared with the one before. Where training
      ends without a validation of its last step, one more pass is made.

    The metrics of these passes are logged under ``val/`` too, so that before and after share their charts. The pool
    holds samples of the base model, not the calibrated model's own responses.

    Args:
        before: Also scores the pool before training, in one pass over the validation data.
        num_bins: Bins of the reliability diagram.
        save_images: Also writes the figures into ``figures/`` of the log folder, as ``<stage>-<task>-<figure>.png``.
    """

    tag, metrics_class = "calibration_curve", CalibrationMetrics

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and trainer.enable_validation and self._before:
            for pool, columns in self._latest.items():
                if pool in self._before:
                    say(outcome(pool, self._before[pool], columns))

    def pools(self, metrics: CalibrationMetrics) -> Pools:
        """Return confidences and labels by task, and of all tasks where there are several; unknown ones left out."""
        points = metrics.points()
        known = points.select(~np.isnan(points.correct) & ~np.isnan(points.confidence))
        tasks = np.unique(known.task).tolist()
        pools = {task: known.select(known.task == task) for task in tasks} | ({"all": known} if len(tasks) > 1 else {})
        return {task: (pool.confidence, pool.correct) for task, pool in pools.items()}

    def figures(self, pool: str, columns: Columns, before: Columns | None) -> dict[str, Figure]:
        curves = {"confidence": columns} if before is None else {"before": before, "after": columns}
        return {
            "reliability": reliability_diagram(*columns, before=before, num_bins=self.num_bins, title=pool),
            "roc": roc_figure(curves, title=pool),
            "distribution": confidence_distribution(*columns, title=pool),
        }


class CapabilityCurve(PoolCurve):
    """Draws the validation questions of a probe whose responses are verified.

    Tags of the figures in TensorBoard are ``capability_curve/before/validation/<figure>``, at step 0, and
    ``capability_curve/val/validation/<figure>`` after every validation, compared with the one before. Figures are
    "reliability", the share of right responses over bins of the predicted capability, and "scatter", every question.

    Args:
        before: Also scores the questions before training.
        num_bins: Bins of the reliability diagram.
        save_images: Also writes the figures into ``figures/`` of the log folder.
    """

    tag, metrics_class = "capability_curve", CapabilityMetrics

    def pools(self, metrics: CapabilityMetrics) -> Pools:
        """Return predictions and shares of right responses; nothing where none is verified."""
        predicted, correct, samples = metrics.questions_seen()
        return {"validation": (predicted, correct / samples)} if len(predicted) else {}

    def figures(self, pool: str, columns: Columns, before: Columns | None) -> dict[str, Figure]:
        return {
            "reliability": reliability_diagram(*columns, before=before, num_bins=self.num_bins, title=pool),
            "scatter": capability_scatter(*columns, title=pool),
        }


FEW_RESPONSES = 100
SAME = 0.01


def outcome(pool: str, before: Columns, after: Columns) -> str:
    """Return what training did to a validation pool, in words and numbers.

    Example:
        >>> right, sure = np.array([1.0, 0.0] * 100), np.full(200, 0.9)
        >>> outcome("all", (sure, right), (np.where(right, 0.9, 0.1), right))
        'Validation, all: better calibration (ECE .400 -> .100), better ranking (AUROC .500 -> 1.000).'
    """
    errors = [calibration.reliability_bins(*columns).expected_error for columns in (before, after)]
    ranks = [discrimination.auroc(*columns) for columns in (before, after)]
    parts = [
        change_of("calibration", *errors, gain=_gain(*reversed(errors))),
        change_of("ranking", *ranks, gain=_gain(*ranks)),
    ]
    few = len(after[0]) < FEW_RESPONSES
    caution = f" {len(after[0])} responses are too few to tell; give more questions." if few else ""
    return f"Validation, {pool}: {', '.join(filter(None, parts))}.{caution}"


def _gain(worse: float | None, better: float | None) -> bool | None:
    """Return whether the second number is larger; None where they hardly differ."""
    if worse is None or better is None or abs(better - worse) < SAME:
        return None
    return better > worse
