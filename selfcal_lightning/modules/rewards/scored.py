"""What a reward model says of recorded responses: its outputs, and the verbs validate, test and predict."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from selfcal_lightning.functional.quantiles import StepScores, folded_outputs, monotone_quantiles
from selfcal_lightning.metrics.collection import CalibrationMetrics
from selfcal_lightning.models.model_outputs import read_hidden
from selfcal_lightning.modules.calibrated_model import CalibratedModel
from selfcal_lightning.modules.rewards.batch import RewardBatch
from selfcal_lightning.modules.rewards.scores import PlaceMetrics
from selfcal_lightning.modules.scored import ScoredRows


class ScoredRewardModel(CalibratedModel):
    """A model with outputs on its last hidden states; logs ``val/...`` and ``test/...``.

    Attributes:
        head: The outputs; None until the model is loaded.
        val_metrics: Metrics of the ends of the responses of the validation pool; they keep their points until the next
            pass.
        test_metrics: Likewise of the test pool.
        val_places: Metrics of all places of the validation pool.
        test_places: Likewise of the test pool.
    """

    head: nn.Module | None
    val_metrics: CalibrationMetrics
    test_metrics: CalibrationMetrics
    val_places: PlaceMetrics
    test_places: PlaceMetrics

    def raw_outputs(self, batch: RewardBatch) -> Tensor:
        """Return the three outputs at every place, float32 [M, 3]."""
        hidden = read_hidden(
            self.model,
            batch.input_ids,
            batch.attention_mask,
            positions=batch.place,
            trees=batch.trees,
            position_ids=batch.position_ids,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            return self._outputs_of(hidden.float())

    def _outputs_of(self, hidden: Tensor) -> Tensor:
        return folded_outputs(cast("nn.Module", self.head)(hidden))

    def on_validation_epoch_start(self) -> None:
        """Forget the last pass; not at the end of it, so that callbacks can still read its points."""
        self.val_metrics.reset()
        self.val_places.reset()

    def validation_step(self, batch: RewardBatch, batch_idx: int) -> None:
        """Score a batch of the fixed pool of the policy's samples."""
        self._score(batch, self.val_metrics, self.val_places)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/...``; the metrics synchronise themselves."""
        self._log_scores("val", self.val_metrics, self.val_places)

    def on_test_epoch_start(self) -> None:
        """Forget the last pass."""
        self.test_metrics.reset()
        self.test_places.reset()

    def test_step(self, batch: RewardBatch, batch_idx: int) -> None:
        """Score a batch of the test pool."""
        self._score(batch, self.test_metrics, self.test_places)

    def on_test_epoch_end(self) -> None:
        """Log ``test/...``."""
        self._log_scores("test", self.test_metrics, self.test_places)

    def predict_step(self, batch: RewardBatch, batch_idx: int) -> ScoredRows:
        """Return the score of every response at its end; nan where it has no step."""
        mean = batch.at_ends(self.scores(batch).mean) if batch.batch_size else batch.target
        return ScoredRows(batch.row, batch.question_index, mean, mean, 1.0 - mean)

    def scores(self, batch: RewardBatch) -> StepScores:
        """Return the chance of a right answer and its quantiles at every place, [M] each."""
        return monotone_quantiles(self.raw_outputs(batch))

    def _score(self, batch: RewardBatch, metrics: CalibrationMetrics, places: PlaceMetrics) -> None:
        if batch.batch_size == 0:  # a process with fewer questions than the others
            return
        scores = self.scores(batch)
        places.update(batch, scores)
        confidence = batch.at_ends(scores.mean)
        metrics.update(
            confidence=confidence,
            correct=batch.correct,
            target=batch.target,
            question_index=batch.question_index,
            task=batch.task,
            yes_no_mass=torch.ones_like(confidence),
        )

    def _log_scores(self, stage: str, metrics: CalibrationMetrics, places: PlaceMetrics) -> None:
        # Every process computes the same values; `sync_dist` would weigh uneven processes wrongly (Lightning #21859).
        values = {**metrics.compute(), **places.compute()}
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, sync_dist=False)
