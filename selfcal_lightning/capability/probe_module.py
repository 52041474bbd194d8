"""Probes of prompt states trained by gradient descent; ``fit-probe`` fits linear ones in closed form."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.capability.probe import CapabilityProbe, Link, ProbeBasis, ProbeHead, load_probe
from selfcal_lightning.capability.probe_heads import LossName, head_outputs, linked, probe_loss
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.core.errors import InputError, check_at_least, check_literals
from selfcal_lightning.models.folders import base_model_identity
from selfcal_lightning.training.model_parallel import trainer_of
from selfcal_lightning.training.modules import TrainedModule, needed_data, with_cosine
from selfcal_lightning.training.settings import check_not_negative, check_positive


class ProbeBatch(NamedTuple):
    features: Tensor  # standardised, float32 [B, D]
    target: Tensor  # in [0, 1], float32 [B]
    num_correct: Tensor  # float32 [B]; nan where a response is not verified
    num_samples: Tensor  # int64 [B]


_ARRAYS = ("centre", "scale")


def check_same_basis(stored: ProbeBasis, current: ProbeBasis) -> None:
    """Raise InputError if a checkpoint was trained on other features, questions or targets."""
    differing = [
        f"`{name}` was {before!r} and is {now!r}"
        for name in ("pooling", "target", "draws", "origin", "sampling")
        if (before := vars(stored)[name]) != (now := vars(current)[name])
    ]
    if stored.fitted_on != current.fitted_on:
        differing.append(f"{stored.fitted_on.num_questions:,} questions were others")
    elif any(not np.array_equal(vars(stored)[name], vars(current)[name]) for name in _ARRAYS):
        differing.append("hidden states were others")
    if found := "; ".join(differing):
        raise InputError(f"The checkpoint was trained on other data: {found}. Restore them, or drop `ckpt_path`.")


HeadName = Literal["linear", "mlp", "classifier"]
ProbeOptimizer = Literal["adamw", "sgd", "lbfgs"]
Schedule = Literal["cosine", "constant"]


@dataclass(frozen=True)
class ProbeSettings:
    """The probe, its loss, and how it is trained; ``LinearProbeModule`` documents the fields."""

    head: HeadName = "linear"
    hidden_size: int = 32
    num_classes: int = 11
    loss: LossName | None = None
    optimizer: ProbeOptimizer = "adamw"
    lr: float = 3e-3
    momentum: float = 0.9
    weight_decay: float = 1e-2
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, hidden_size=self.hidden_size)
        check_at_least(2, num_classes=self.num_classes)
        check_at_least(0, warmup_steps=self.warmup_steps, seed=self.seed)
        check_positive(lr=self.lr)
        check_not_negative(weight_decay=self.weight_decay)
        is_classifier = self.head == "classifier"
        if self.loss is None:
            object.__setattr__(self, "loss", "cross_entropy" if is_classifier else "bce")
        if is_classifier != (self.loss == "cross_entropy"):
            raise InputError(f"`loss` cross_entropy goes with `head` classifier, but got {self.loss} and {self.head}.")
        if not 0.0 <= self.momentum < 1.0:
            raise InputError(f"Expected `momentum` to lie in [0, 1), but got {self.momentum}.")
        if self.optimizer == "lbfgs" and self.schedule != "constant":
            raise InputError(f"`optimizer` lbfgs needs `schedule` constant, but got {self.schedule}.")

    @property
    def link(self) -> Link:
        return "classes" if self.head == "classifier" else "sigmoid"


BASIS_KEY = "probe_basis"


class LinearProbeModule(TrainedModule):
    """A linear layer, a small network or a classifier over hidden states of prompts, trained to predict capability.

    ``ProbeDataModule`` reads the states. The export is a probe folder like that of ``selfcal fit-probe``, whose closed
    form is the better choice for a linear probe.

    Args:
        base_model: Folder or hub name of the model whose states are read; "bundled" is the small one in the package.
        revision: Branch, tag or commit of a hub model.
        head: "linear", "mlp" with one hidden layer (ReLU), or "classifier", whose classes stand for shares.
        hidden_size: Width of the hidden layer of "mlp".
        num_classes: Classes of "classifier", for the shares 0, 1/(K - 1), ..., 1.
        loss: "bce" against soft targets, "mse" of a sigmoid, "ranknet" (the order of pairs, whose values are no chances
            until they are mapped), or "cross_entropy". None is "cross_entropy" for "classifier", else "bce".
        optimizer: "adamw", "sgd" with momentum, or "lbfgs" with a line search, for batches of all questions.
        lr: Peak learning rate; 1 for "lbfgs".
        momentum: Momentum of "sgd".
        weight_decay: Weight decay; "lbfgs" adds half of it times the squared weights to the loss.
        schedule: "cosine" to zero over the optimiser steps, or "constant".
        warmup_steps: Optimiser steps of linear warm-up.
        seed: Seeds the initial weights.
    """

    val_metrics: CapabilityMetrics
    test_metrics: CapabilityMetrics

    def __init__(
        self,
        base_model: str,
        *,
        revision: str | None = None,
        head: HeadName = "linear",
        hidden_size: int = 32,
        num_classes: int = 11,
        loss: LossName | None = None,
        optimizer: ProbeOptimizer = "adamw",
        lr: float = 3e-3,
        momentum: float = 0.9,
        weight_decay: float = 1e-2,
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(base_model, revision=revision)
        self.settings = ProbeSettings(
            head, hidden_size, num_classes, loss, optimizer, lr, momentum, weight_decay, schedule, warmup_steps, seed
        )
        self.save_hyperparameters()
        self.basis: ProbeBasis | None = None
        self.layers: nn.ModuleList | None = None
        self.val_metrics, self.test_metrics = CapabilityMetrics(), CapabilityMetrics()

    def check_support(self, trainer: Trainer | None = None) -> None:
        if (trainer := trainer or trainer_of(self)) is None:
            return
        size, precision, batches = trainer.world_size, trainer.precision, trainer.accumulate_grad_batches
        for is_met, wanted, value in (
            (size == 1, "one process", f"{size} processes"),
            (precision in ("32-true", "64-true"), "`trainer.precision` 32-true or 64-true", precision),
            (batches == 1, "`trainer.accumulate_grad_batches` 1", batches),
        ):
            if not is_met:
                raise InputError(f"Expected {wanted} to train a probe, but got {value}.")

    def configure_model(self) -> None:
        """Build the layers once their width is known, from an export or the data."""
        if not self.identity:
            self.check_support()
            self.identity = base_model_identity(self.base_model, revision=self.revision)
        if self.layers is not None:
            return
        if self.exported_from is not None:
            self._take(load_probe(self.exported_from))
            return
        if trainer_of(self) is None:
            return
        basis = needed_data(self.data_module, who=type(self).__name__, remedy="use ProbeDataModule").basis
        if basis is not None and self.trainer.state.fn == TrainerFn.FITTING:  # elsewhere a trained probe is needed
            self._build(basis)

    def _build(self, basis: ProbeBasis) -> None:
        """Build linear layers, with Xavier weights that depend on the seed alone and zero biases."""
        own = self.settings
        hidden = [own.hidden_size] if own.head == "mlp" else []
        outputs = own.num_classes if own.head == "classifier" else 1
        self.basis = basis
        layers = [nn.Linear(width, out) for width, out in pairwise([len(basis.centre), *hidden, outputs])]
        generator = torch.Generator().manual_seed(own.seed)
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)

    def _take(self, probe: CapabilityProbe) -> None:
        self._build(ProbeBasis(**{each.name: getattr(probe, each.name) for each in fields(ProbeBasis)}))
        shapes = [tuple(layer.weight.shape) for layer in self._layers]
        if shapes != [weight.shape for weight in probe.head.weights] or self.settings.link != probe.head.link:
            found = f"{probe.head.describe()} in {self.exported_from}. Set `head` and `loss` as trained"
            raise InputError(f"Expected layers {shapes} with {self.settings.link}, but got {found}.")
        with torch.no_grad():
            for layer, weight, bias in zip(self._layers, probe.head.weights, probe.head.biases, strict=True):
                layer.weight.copy_(torch.as_tensor(weight))
                layer.bias.copy_(torch.as_tensor(bias))

    @property
    def _layers(self) -> list[nn.Linear]:
        if self.layers is None:
            raise InputError("Expected a trained probe: give `--ckpt_path FILE.ckpt` of `selfcal fit`, or train one.")
        return [cast("nn.Linear", layer) for layer in self.layers]

    # ---- training

    def forward(self, features: Tensor) -> Tensor:
        """Return the predicted capability [B] of standardised features [B, D]."""
        return linked(self._outputs(features), self.settings.link)

    def _outputs(self, features: Tensor) -> Tensor:
        return head_outputs(features, [one.weight for one in self._layers], [one.bias for one in self._layers])

    def training_step(self, batch: ProbeBatch, batch_idx: int) -> Tensor:
        loss = probe_loss(self._outputs(batch.features), batch.target, self.settings.loss)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch.target))
        if self.settings.optimizer == "lbfgs":
            squares = torch.stack([layer.weight.square().sum() for layer in self._layers])
            loss = loss + 0.5 * self.settings.weight_decay * squares.sum()
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        own, warmup = self.settings, self.settings.warmup_steps
        weights, biases = [one.weight for one in self._layers], [one.bias for one in self._layers]
        groups = [{"params": weights, "weight_decay": own.weight_decay}, {"params": biases, "weight_decay": 0.0}]
        optimizer: Optimizer = torch.optim.AdamW(groups, lr=own.lr)
        if own.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=own.lr, momentum=own.momentum)
        elif own.optimizer == "lbfgs":  # the decay is part of the loss
            parameters = [*weights, *biases]
            optimizer = torch.optim.LBFGS(parameters, lr=own.lr, max_iter=20, line_search_fn="strong_wolfe")
        if own.schedule == "cosine":
            return with_cosine(optimizer, self.trainer, warmup_steps=warmup)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (warmup + 1), 1.0))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- validation

    def validation_step(self, batch: ProbeBatch, batch_idx: int) -> None:
        outputs = self._outputs(batch.features)
        predicted = linked(outputs, self.settings.link)
        size = len(batch.target)
        self.log("val/loss", probe_loss(outputs, batch.target, self.settings.loss), batch_size=size)
        self.log("val/target/MSE", (predicted - batch.target).square().mean(), batch_size=size)
        update(self.val_metrics, predicted, batch)

    def test_step(self, batch: ProbeBatch, batch_idx: int) -> None:
        update(self.test_metrics, self(batch.features), batch)

    def _log_metrics(self, stage: str) -> None:
        if len(self._metrics(stage)[0].rows("questions")):  # some verdicts are known
            super()._log_metrics(stage)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if (basis := self.basis) is not None:  # as tensors and plain types
            arrays = {name: torch.as_tensor(np.array(getattr(basis, name))) for name in _ARRAYS}
            checkpoint[BASIS_KEY] = {**vars(basis), "fitted_on": basis.fitted_on.as_json(), **arrays}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the layers; refuse to resume a training on other features, questions or targets."""
        if (plain := checkpoint.get(BASIS_KEY)) is not None:
            arrays = {name: plain[name].cpu().numpy() for name in _ARRAYS}
            stored = ProbeBasis(**{**plain, **arrays, "fitted_on": FittedOn.from_json(plain["fitted_on"])})
            current = self.basis or getattr(self.data_module, "basis", None)
            if current is not None:
                check_same_basis(stored, current)
            if self.basis is None:
                self._build(stored)
        super().on_load_checkpoint(checkpoint)

    # ---- exports

    @property
    def probe(self) -> CapabilityProbe:
        layers = [(one.weight.detach().cpu().numpy(), one.bias.detach().cpu().numpy()) for one in self._layers]
        weights, biases = zip(*layers, strict=True)
        return CapabilityProbe(**vars(self.basis), head=ProbeHead(weights, biases, self.settings.link))

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        self.probe.save(folder)


def update(metrics: CapabilityMetrics, predicted: Tensor, batch: ProbeBatch) -> None:
    """Add the questions with two or more responses, all verified, whose noise is known."""
    known = ~torch.isnan(batch.num_correct) & (batch.num_samples > 1)
    if bool(known.any()):
        metrics.update(predicted[known], batch.num_correct[known], batch.num_samples[known])
