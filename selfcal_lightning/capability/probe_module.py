"""Probes of prompt states trained by gradient steps; ``fit-probe`` fits them in closed form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.capability.probe import CapabilityProbe, ProbeBasis, ProbeHead, load_probe
from selfcal_lightning.capability.probe_heads import Activation, Link, LossName, head_outputs, linked, probe_loss
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.models.folders import base_model_identity
from selfcal_lightning.training.model_parallel import trainer_of
from selfcal_lightning.training.modules import TrainedModule, needed_data
from selfcal_lightning.training.schedule import cosine_with_warmup, linear_with_warmup
from selfcal_lightning.training.settings import check_literals, check_not_negative, check_positive

if TYPE_CHECKING:
    from lightning.pytorch.utilities.types import OptimizerLRScheduler


class ProbeBatch(NamedTuple):
    """B questions with their features and what their responses show.

    Attributes:
        features: Standardised features, float32 [B, D].
        target: The training target, float32 [B], in [0, 1].
        num_correct: Right ones among the responses, float32 [B]; nan where one is not verified.
        num_samples: Responses, int64 [B].
    """

    features: Tensor
    target: Tensor
    num_correct: Tensor
    num_samples: Tensor


_ARRAYS = ("centre", "scale")


def plain_basis(basis: ProbeBasis) -> dict[str, Any]:
    """Return the description of a probe's input as tensors and plain types, for a checkpoint."""
    plain = {**vars(basis), "fitted_on": basis.fitted_on.as_json()}
    return {**plain, **{name: torch.as_tensor(np.array(plain[name])) for name in _ARRAYS}}


def basis_of(content: Mapping[str, Any]) -> ProbeBasis:
    """Read what :func:`plain_basis` wrote."""
    arrays = {name: content[name].cpu().numpy() for name in _ARRAYS}
    return ProbeBasis(**{**content, **arrays, "fitted_on": FittedOn.from_json(content["fitted_on"])})


def check_same_basis(stored: ProbeBasis, current: ProbeBasis) -> None:
    """Raise InputError where a checkpoint was trained on other features, questions or targets."""
    differing = [
        f"`{name}` was {before!r} and is {now!r}"
        for name in ("pooling", "target", "draws", "origin", "sampling")
        if (before := vars(stored)[name]) != (now := vars(current)[name])
    ]
    if stored.fitted_on != current.fitted_on:
        differing.append(f"{stored.fitted_on.num_questions:,} questions were others")
    elif any(not np.array_equal(vars(stored)[name], vars(current)[name]) for name in _ARRAYS):
        differing.append("hidden states were others")
    if differing:
        raise InputError(
            f"The checkpoint was trained on others: {'; '.join(differing)}. Restore `data.init_args`, or start a new "
            "run without `ckpt_path`."
        )


def check_trainer(trainer: Trainer) -> None:
    """Raise InputError for Trainer settings that the training of a probe does not support."""
    found = {
        "one process": trainer.world_size == 1 or f"{trainer.world_size} processes",
        "`trainer.precision` 32-true or 64-true": trainer.precision in ("32-true", "64-true") or trainer.precision,
        "`trainer.accumulate_grad_batches` 1": trainer.accumulate_grad_batches == 1 or trainer.accumulate_grad_batches,
    }
    for wanted, value in found.items():
        if value is not True:
            raise InputError(f"Expected {wanted} where a probe is trained, in seconds, but got {value}.")


HeadName = Literal["linear", "mlp", "classifier"]
ProbeOptimizer = Literal["adamw", "sgd", "lbfgs"]
Schedule = Literal["cosine", "linear", "constant"]


def chosen_loss(head: HeadName, loss: LossName | None) -> LossName:
    """Return the loss; None takes the usual one of the head."""
    if loss is None:
        return "cross_entropy" if head == "classifier" else "bce"
    if (head == "classifier") != (loss == "cross_entropy"):
        raise InputError(
            f"The head classifier takes the loss cross_entropy, others do not: got {loss!r} with {head!r}."
        )
    return loss


def chosen_link(loss: LossName, link: Literal["sigmoid", "clip"] | None) -> Link:
    """Return how outputs become shares."""
    if loss == "cross_entropy":
        if link is not None:
            raise InputError(f"Expected no `link` with the head classifier, but got {link!r}.")
        return "classes"
    if link not in (None, "sigmoid", "clip"):
        raise unknown_name("link", link, ("sigmoid", "clip"))
    if link == "clip" and loss != "mse":
        raise InputError(f"Expected the link 'clip' with the loss 'mse' only, but got {loss!r}, which takes log-odds.")
    return link or "sigmoid"


@dataclass(frozen=True)
class ProbeSettings:
    """The probe, its loss, and how it is trained; ``LinearProbeModule`` documents the fields."""

    head: HeadName = "linear"
    hidden_size: int = 32
    num_layers: int = 1
    dropout: float = 0.0
    activation: Activation = "relu"
    num_classes: int = 11
    loss: LossName = "bce"
    link: Link = "sigmoid"
    temperature: float = 1.0
    tie_weight: float = 0.0
    optimizer: ProbeOptimizer = "adamw"
    lr: float = 3e-3
    momentum: float = 0.9
    weight_decay: float = 1e-2
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, hidden_size=self.hidden_size, num_layers=self.num_layers)
        check_at_least(2, num_classes=self.num_classes)
        check_at_least(0, warmup_steps=self.warmup_steps, seed=self.seed)
        check_positive(lr=self.lr, temperature=self.temperature)
        check_not_negative(weight_decay=self.weight_decay, tie_weight=self.tie_weight)
        for name, value in {"dropout": self.dropout, "momentum": self.momentum}.items():
            if not 0.0 <= value < 1.0:
                raise InputError(f"Expected `{name}` to lie in [0, 1), but got {value}.")
        if self.optimizer == "lbfgs" and (self.schedule != "constant" or self.dropout):
            raise InputError(
                "The optimizer lbfgs needs `schedule` constant and no `dropout`, since its line search is over one "
                f"function, but got {self.schedule!r} and {self.dropout}."
            )


def build_layers(sizes: Sequence[int], *, seed: int) -> nn.ModuleList:
    """Return linear layers between sizes, Xavier's weights drawn with the seed alone, no bias at first."""
    layers = [nn.Linear(width, out) for width, out in pairwise(sizes)]
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
    return nn.ModuleList(layers)


def build_probe_optimizer(settings: ProbeSettings, layers: Sequence[nn.Linear]) -> Optimizer:
    """Return the optimiser; weights decay and biases do not. With "lbfgs" the decay is part of the loss."""
    weights, biases = [one.weight for one in layers], [one.bias for one in layers]
    if settings.optimizer == "lbfgs":
        return torch.optim.LBFGS([*weights, *biases], lr=settings.lr, max_iter=20, line_search_fn="strong_wolfe")
    groups = [{"params": weights, "weight_decay": settings.weight_decay}, {"params": biases, "weight_decay": 0.0}]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    return torch.optim.AdamW(groups, lr=settings.lr)


BASIS_KEY = "probe_basis"


class LinearProbeModule(TrainedModule):
    """A linear layer, a small network or classes over hidden states of prompts, trained to predict capability.

    ``ProbeDataModule`` reads the states; the model itself is not here. What is exported is a probe folder as
    ``selfcal fit-probe`` writes it, and is used in the same way. A trained linear probe does what the closed form does
    in seconds; the other heads and losses are what that cannot do.

    Args:
        base_model: Folder or hub name of the model whose states are read; "bundled" is the small one in the package.
        revision: Branch, tag or commit of a hub model.
        head: "linear", "mlp" with hidden layers, or "classifier", whose classes stand for shares.
        hidden_size: Width of the hidden layers of "mlp".
        num_layers: Hidden layers of "mlp".
        dropout: Probability of dropping a hidden value of "mlp" in training.
        activation: Activation of the hidden layers of "mlp": "relu", "gelu", "silu" or "tanh".
        num_classes: Classes of "classifier", for the shares 0, 1/(K - 1), ..., 1.
        loss: "bce" against soft targets, "mse", "ranknet" (the order of pairs of a batch, which leaves values that are
            no chances until they are mapped), or of "classifier" "cross_entropy". None is "bce", and "cross_entropy" of
            "classifier".
        link: "sigmoid", or for "mse" also "clip": the output itself, cut to [0, 1]. None is "sigmoid".
        temperature: Difference in the values that "ranknet" counts as one.
        tie_weight: Weight of pairs with equal targets in "ranknet", which pulls them together.
        optimizer: "adamw", "sgd" with momentum, or "lbfgs" with a line search, for batches of all questions.
        lr: Peak learning rate; that of "lbfgs" is 1.
        momentum: Momentum of "sgd".
        weight_decay: Weight decay. "lbfgs" adds half of it times the squared weights to the loss.
        schedule: "cosine" or "linear" to zero over the optimiser steps, or "constant".
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
        num_layers: int = 1,
        dropout: float = 0.0,
        activation: Activation = "relu",
        num_classes: int = 11,
        loss: LossName | None = None,
        link: Literal["sigmoid", "clip"] | None = None,
        temperature: float = 1.0,
        tie_weight: float = 0.0,
        optimizer: ProbeOptimizer = "adamw",
        lr: float = 3e-3,
        momentum: float = 0.9,
        weight_decay: float = 1e-2,
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(base_model, revision=revision)
        chosen = chosen_loss(head, loss)
        self.settings = ProbeSettings(
            head, hidden_size, num_layers, dropout, activation, num_classes, chosen, chosen_link(chosen, link),
            temperature, tie_weight, optimizer, lr, momentum, weight_decay, schedule, warmup_steps, seed,
        )  # fmt: skip
        self.save_hyperparameters()
        self.basis: ProbeBasis | None = None
        self.layers: nn.ModuleList | None = None
        self.val_metrics, self.test_metrics = CapabilityMetrics(), CapabilityMetrics()

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Refuse several processes, accumulated batches and half precision, which this short training does not need."""
        if (trainer := trainer or trainer_of(self)) is not None:
            check_trainer(trainer)

    def configure_model(self) -> None:
        """Build the layers once their width is known: from an export, the data, or a checkpoint."""
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
        if basis is not None:
            self._build(basis)

    def _build(self, basis: ProbeBasis) -> None:
        own = self.settings
        hidden = [own.hidden_size] * own.num_layers if own.head == "mlp" else []
        outputs = own.num_classes if own.head == "classifier" else 1
        self.basis = basis
        self.layers = build_layers([len(basis.centre), *hidden, outputs], seed=own.seed)

    def _take(self, probe: CapabilityProbe) -> None:
        """Take over a probe, whose layers must be of these settings."""
        self._build(probe.basis)
        shapes = [tuple(layer.weight.shape) for layer in self._layers]
        found = [weight.shape for weight in probe.head.weights]
        if shapes != found or (self.settings.link, self.settings.activation) != (
            probe.head.link,
            probe.head.activation,
        ):
            raise InputError(
                f"Expected a probe of these settings, layers {shapes} with {self.settings.link}, but got "
                f"{probe.head.describe()} in {self.exported_from}. Set `head`, `loss` and `link` as trained."
            )
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
        layers = self._layers
        return head_outputs(
            features, [layer.weight for layer in layers], [layer.bias for layer in layers],
            activation=self.settings.activation, dropout=self.settings.dropout, training=self.training,
        )  # fmt: skip

    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        own = self.settings
        return probe_loss(
            outputs, target, own.loss, link=own.link, temperature=own.temperature, tie_weight=own.tie_weight
        )

    def training_step(self, batch: ProbeBatch, batch_idx: int) -> Tensor:
        """Return the loss of a batch, which is an optimiser step."""
        loss = self._loss(self._outputs(batch.features), batch.target)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch.target))
        if self.settings.optimizer == "lbfgs":
            squares = torch.stack([layer.weight.square().sum() for layer in self._layers])
            loss = loss + 0.5 * self.settings.weight_decay * squares.sum()
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimiser, with a schedule over its steps."""
        optimizer = build_probe_optimizer(self.settings, self._layers)
        if self.settings.schedule == "constant" and not self.settings.warmup_steps:
            return optimizer
        total, warmup = int(self.trainer.estimated_stepping_batches), self.settings.warmup_steps
        factors = {
            "cosine": lambda step: cosine_with_warmup(step, total=total, warmup=warmup),
            "linear": lambda step: linear_with_warmup(step, total=total, warmup=warmup),
            "constant": lambda step: min((step + 1) / (warmup + 1), 1.0),
        }
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors[self.settings.schedule])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    # ---- validation

    def validation_step(self, batch: ProbeBatch, batch_idx: int) -> None:
        """Evaluate the questions of the validation split on their targets, and on verdicts where these are known."""
        outputs = self._outputs(batch.features)
        predicted = linked(outputs, self.settings.link)
        size = len(batch.target)
        self.log("val/loss", self._loss(outputs, batch.target), batch_size=size)
        self.log("val/target/MSE", (predicted - batch.target).square().mean(), batch_size=size)
        update(self.val_metrics, predicted, batch)

    def test_step(self, batch: ProbeBatch, batch_idx: int) -> None:
        """Evaluate the questions of the test split."""
        update(self.test_metrics, self(batch.features), batch)

    def _log_metrics(self, stage: str) -> None:
        if len(self._metrics(stage)[0].rows("questions")):  # some verdicts are known
            super()._log_metrics(stage)

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the layers and what their input is."""
        super().on_save_checkpoint(checkpoint)
        if self.basis is not None:
            checkpoint[BASIS_KEY] = plain_basis(self.basis)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the layers; refuse to resume a training on other features, questions or targets."""
        if BASIS_KEY in checkpoint:
            stored = basis_of(checkpoint[BASIS_KEY])
            if self.basis is None:
                self._build(stored)
            else:
                check_same_basis(stored, self.basis)
        super().on_load_checkpoint(checkpoint)

    # ---- exports

    @property
    def probe(self) -> CapabilityProbe:
        """The probe as it is now."""
        layers = [(one.weight.detach().cpu().numpy(), one.bias.detach().cpu().numpy()) for one in self._layers]
        weights, biases = zip(*layers, strict=True)
        return cast("ProbeBasis", self.basis).with_head(
            ProbeHead(weights, biases, self.settings.link, self.settings.activation)
        )

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the files of a probe."""
        self.probe.save(folder)


def update(metrics: CapabilityMetrics, predicted: Tensor, batch: ProbeBatch) -> None:
    """Add the questions with two or more responses, all verified, so that their noise is known."""
    known = ~torch.isnan(batch.num_correct) & (batch.num_samples > 1)
    if bool(known.any()):
        metrics.update(predicted[known], batch.num_correct[known], batch.num_samples[known])
