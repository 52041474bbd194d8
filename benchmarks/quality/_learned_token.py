"""GrACE's read-out for the study of targets: the chance of a learned token in the place of Yes and No.

The token's vector v stands beside the rows of the output layer W, and the confidence in a response is its chance after
the query, in the softmax over both: ``exp(h v) / (exp(h v) + sum exp(h W))``, with h the last hidden state.
It is read by no engine and exported by no verb: it is here to be measured.

Reference: GrACE (arXiv 2509.09438). There, the targets are accuracies and the generator is tuned along.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from selfcal_lightning.models.activated import Contexts, ask
from selfcal_lightning.models.outputs import HiddenOutputs, log_normaliser
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule, calibration_part


class LearnedTokenModule(SelfCalibrationModule):
    """An activated adapter whose confidence is read at a learned token; it starts as the mean of those of Yes."""

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new:
            weight = self.model.get_output_embeddings().weight
            self.token = nn.Parameter(weight[list(self.chat.query.yes_ids)].detach().float().mean(0))

    def chance(self, batch: SSCBatch, contexts: Contexts | None = None) -> Tensor:
        """Return the chance of the token after every row's query, [B]."""
        outputs = ask(self.model, self._contexts(batch) if contexts is None else contexts, self.chat.query)
        if not isinstance(outputs, HiddenOutputs):
            raise TypeError(f"Expected a model that ends with its output layer, but got {type(outputs).__name__}.")
        others = log_normaliser(outputs.queries, outputs.weight, outputs.bias)
        return torch.sigmoid(outputs.queries.float() @ self.token - others)

    def _losses(self, batch: SSCBatch, contexts: Contexts | None = None) -> tuple[Tensor, Tensor, Tensor]:
        confidence = self.chance(batch, contexts)
        calibration = calibration_part(batch, confidence, self.losses)
        return calibration, torch.zeros_like(calibration), confidence
