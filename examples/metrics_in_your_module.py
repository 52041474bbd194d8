"""Calibration metrics in your own LightningModule, for any confidence and any right-or-wrong label.

python examples/metrics_in_your_module.py
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from selfcal_lightning.metrics.streaming import BinnedCalibrationError, ConfidenceAUROC


class Classifier(lightning.LightningModule):
    """A logistic regression that logs how well its probabilities are calibrated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.ece, self.auroc = BinnedCalibrationError(num_bins=10), ConfidenceAUROC()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """Return the cross entropy."""
        x, y = batch
        return torch.nn.functional.binary_cross_entropy_with_logits(self.layer(x)[:, 0], y)

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        """Update the metrics; torchmetrics combines them over batches and processes."""
        x, y = batch
        confidence = self.layer(x)[:, 0].sigmoid()
        self.ece.update(confidence, y)
        self.auroc.update(confidence, y)
        self.log_dict({"val/ECE": self.ece, "val/AUROC": self.auroc})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.05)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(512, 4)
    y = (torch.rand(512) < (2 * x[:, 0]).sigmoid()).float()
    loader = DataLoader(TensorDataset(x, y), batch_size=64)
    trainer = lightning.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False)
    model = Classifier()
    trainer.fit(model, loader)
    print({name: round(float(value), 3) for name, value in trainer.validate(model, loader)[0].items()})
