"""How well a calibrated model states its confidence in recorded responses: the verbs validate, test and predict."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.calibrated_model import CalibratedModel
from selfcal_lightning.training.metrics import CalibrationMetrics
from selfcal_lightning.training.model_parallel import join_forward


class ScoredRows(NamedTuple):
    """Confidences of a batch and where they belong: ``row`` in the pool's table and ``question_index``, int64 [B]."""

    row: Tensor
    question_index: Tensor
    p_true: Tensor
    yes_mass: Tensor
    no_mass: Tensor


class ScoredModel(CalibratedModel):
    """A calibrated model that is scored on fixed pools of the base model's samples."""

    val_metrics: CalibrationMetrics
    test_metrics: CalibrationMetrics

    def on_validation_epoch_start(self) -> None:
        """Forget the last pass; not at the end of it, so that callbacks can still read its points."""
        self.val_metrics.reset()

    def validation_step(self, batch: SSCBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch of the fixed pool of base-model samples with the current weights."""
        self._update_metrics(self.val_metrics, batch)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/...``; the metrics synchronise themselves."""
        self._log_metrics("val", self.val_metrics)

    def on_test_epoch_start(self) -> None:
        """Forget the last pass."""
        self.test_metrics.reset()

    def test_step(self, batch: SSCBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch of the test pool."""
        self._update_metrics(self.test_metrics, batch)

    def on_test_epoch_end(self) -> None:
        """Log ``test/...``."""
        self._log_metrics("test", self.test_metrics)

    def predict_step(self, batch: SSCBatch, batch_idx: int, dataloader_idx: int = 0) -> ScoredRows:
        """Return the confidence of every row."""
        if batch.batch_size == 0:  # a process with fewer questions than the others
            join_forward(self.model, self.device, passes=2 if self.activated else 1)
            nothing = torch.empty(0, device=self.device)
            return ScoredRows(batch.row, batch.question_index, nothing, nothing, nothing)
        return ScoredRows(batch.row, batch.question_index, *self.confidence(batch))

    def _update_metrics(self, metrics: CalibrationMetrics, batch: SSCBatch) -> None:
        if batch.batch_size == 0:  # a process with fewer questions than the others
            join_forward(self.model, self.device, passes=2 if self.activated else 1)
            return
        confidence = self.confidence(batch)
        metrics.update(
            confidence=confidence.p_true,
            correct=batch.correct,
            target=batch.target,
            question_index=batch.question_index,
            task=batch.task,
            yes_no_mass=confidence.yes_mass + confidence.no_mass,
        )

    def _log_metrics(self, stage: str, metrics: CalibrationMetrics) -> None:
        # Every process computes the same values; `sync_dist` would weigh uneven processes wrongly (Lightning #21859).
        self.log_dict({f"{stage}/{name}": value for name, value in metrics.compute().items()}, sync_dist=False)
