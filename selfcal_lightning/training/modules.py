"""Base classes of modules that are trained on top of a base model: checkpoints, exports, scores, learning rates."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.imports import class_path
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.training import checkpoints
from selfcal_lightning.training.model_parallel import begin_epoch_after_whole_one, data_module_of, trainer_of

ExportKind = Literal["adapter", "model", "module"]
IDENTITY_KEY, CLASS_KEY, RANDOM_KEY = "base_model_identity", "module_class", "random_states"


def trained_parameters(module: LightningModule) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def plain_settings(*records: Any) -> dict[str, Any]:
    """Return the fields of settings records as plain JSON types, as checkpoints need; a prompt only if there is one."""
    fields = {name: value for record in records for name, value in json.loads(json.dumps(asdict(record))).items()}
    return {name: value for name, value in fields.items() if (name, value) != ("prompt", None)}


class TrainedModule(LightningModule):
    """A module whose checkpoints and exports hold only what is trained, not the frozen base model.

    A checkpoint with another base model, other parameters or (to resume) other settings is refused.
    ``save_hyperparameters`` must get plain types, since checkpoints are read without running code. Training resumes
    with the random states of all processes. Validation and test reset and log ``val_metrics`` and ``test_metrics``,
    which stay filled after a pass for callbacks to read.

    Args:
        base_model: Folder or hub name of the base model.
        revision: Branch, tag or commit of a hub model.

    Attributes:
        identity: ``base_model_identity`` of the base model, set by ``configure_model``.
        exported_from: Folder of the export that training starts from.
        auxiliary: Settings of the auxiliary adapters by name.
        activated: Whether the adapter leaves the generator unchanged, so that response tokens train nothing.
        attn_implementation: Attention of the base model; None is the best for packed rows.
    """

    val_metrics: Metric
    test_metrics: Metric

    def __init__(self, base_model: str, *, revision: str | None = None) -> None:
        super().__init__()
        self.strict_loading = False  # the base weights are not in a checkpoint; `on_load_checkpoint` checks the rest
        self.base_model, self.revision = base_model, revision
        self.identity: dict[str, Any] = {}
        self.exported_from: Path | None = None
        self.auxiliary: Mapping[str, Any] = {}
        self.activated = False
        self.attn_implementation: str | None = None
        self._random_states: list[dict[str, Any]] | None = None

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Raise InputError if the Trainer's settings do not work. Cheap enough to call before long work."""

    @property
    def data_module(self) -> Any:
        trainer = trainer_of(self)
        return None if trainer is None else data_module_of(trainer)

    def _metrics(self, stage: str) -> tuple[Any, ...]:
        return (getattr(self, f"{stage}_metrics"),)

    def _log_metrics(self, stage: str) -> None:
        values = {name: value for metrics in self._metrics(stage) for name, value in metrics.compute().items()}
        # Every process computes the same values; `sync_dist` would weigh uneven processes wrongly (Lightning #21859).
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, sync_dist=False)

    def on_validation_epoch_start(self) -> None:
        for metrics in self._metrics("val"):
            metrics.reset()

    def on_validation_epoch_end(self) -> None:
        self._log_metrics("val")

    def on_test_epoch_start(self) -> None:
        for metrics in self._metrics("test"):
            metrics.reset()

    def on_test_epoch_end(self) -> None:
        self._log_metrics("test")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only the trained parameters, and record the base model and the class. A collective."""
        trained = trained_parameters(self)
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
        checkpoint[IDENTITY_KEY], checkpoint[CLASS_KEY] = dict(self.identity), class_path(type(self))
        if (trainer := trainer_of(self)) is not None:
            checkpoint[RANDOM_KEY] = checkpoints.gather_random_states(trainer.strategy.root_device)
            batches, accumulate = trainer.num_training_batches, trainer.accumulate_grad_batches
            checkpoints.end_with_whole_step(checkpoint, batches=batches, accumulate=accumulate)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another base model or other parameters, and to resume with other settings. Any class may load it."""
        trainer = trainer_of(self)
        checkpoints.check_base_model(
            checkpoint.get(IDENTITY_KEY), self.identity, self.base_model, kind=type(self).__name__
        )
        settings = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        checkpoints.check_trained(checkpoint["state_dict"], trained_parameters(self), settings=settings)
        resuming = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        checkpoints.check_hyper_parameters(settings, self.hparams, resuming=resuming)
        if resuming:
            if missing := [key for key in ("optimizer_states", "lr_schedulers", "loops") if key not in checkpoint]:
                raise InputError(
                    f"`ckpt_path` is a checkpoint without {missing[0]!r}: it was written with `save_weights_only=True` "
                    "and cannot be resumed."
                )
            self._random_states = checkpoint.get(RANDOM_KEY)

    def on_train_start(self) -> None:
        """Restore the random states of the checkpoint, unless the number of processes has changed."""
        trainer, states = self.trainer, self._random_states
        if states is not None and len(states) == trainer.world_size:
            checkpoints.restore_random_states(states[trainer.global_rank], trainer.strategy.root_device)
        self._random_states = None
        begin_epoch_after_whole_one(trainer)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load without reporting the frozen base weights as missing."""
        keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        trained = trained_parameters(self)
        return type(keys)([name for name in keys.missing_keys if name in trained], keys.unexpected_keys)

    @property
    def export_kind(self) -> ExportKind:
        """What is exported: a LoRA "adapter", the whole "model", or the "module"'s own files."""
        return "module"

    def describe(self) -> dict[str, Any]:
        """Return the manifest of an export, as plain JSON types."""
        return {"base_model": dict(self.identity), "hyper_parameters": dict(self.hparams)}

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the trained weights and all that is needed to use them; ``state`` holds them unsharded under FSDP2."""
        raise NotImplementedError

    def load_export(self, folder: Path) -> None:
        """Take the weights from a folder written by ``save_export`` once the model is configured."""
        self.exported_from = folder

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint on the CPU with its model loaded, ready to export."""
        place: dict[str, Any] = {} if base_model is None else {"base_model": base_model, "revision": None}
        return cls.load_from_checkpoint(path, map_location="cpu", **place)


def check_defines(module: object, base: type[TrainedModule], *methods: str, who: str) -> None:
    kind = type(module)
    if not isinstance(module, base):
        raise InputError(f"{who} needs a {base.__name__}, but got {kind.__name__}.")
    for name in methods:
        if getattr(kind, name) is getattr(base, name):
            raise InputError(f"{kind.__name__} must define `{name}` for {who}.")


def needed_data(data: Any, *, who: str, remedy: str) -> Any:
    if data is None:
        raise InputError(f"{who} needs a data module: {remedy}.")
    return data


def check_stated(settings: Mapping[str, tuple[str | None, str | None]]) -> None:
    for name, (value, found) in settings.items():
        if value != found:
            raise InputError(f"`{name}` is {value!r} in the module, but {found!r} in the data module.")


class ScoringModule(TrainedModule):
    """A module that predicts the probability that a response is right: ``predict_step`` returns ``ScoredRows``.

    Args:
        base_model: Folder or hub name of the base model.
        revision: Branch, tag or commit of a hub model.
        query: The confidence query that responses are sampled with.
        prompt: How questions are put to the model; None is their tasks' own way.
    """

    def __init__(
        self, base_model: str, *, revision: str | None = None, query: str = DEFAULT_QUERY, prompt: Prompt | None = None
    ) -> None:
        super().__init__(base_model, revision=revision)
        self.query, self.prompt = query, prompt

    def confidence_origin(self) -> dict[str, Any]:
        """Return what its confidences depend on apart from the trained weights, as plain JSON types."""
        raise NotImplementedError


def with_cosine(optimizer: Optimizer, trainer: Trainer, *, warmup_steps: int) -> OptimizerLRSchedulerConfig:
    """Return the optimiser with a linear warm-up to ``lr`` and half a cosine to zero over all optimiser steps."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 1:
        raise InputError(f"Set `trainer.max_epochs` or `trainer.max_steps`: the cosine cannot span {total} steps.")
    if warmup_steps >= total:
        rank_zero_warn(
            f"`warmup_steps` {warmup_steps:,} is not below the {int(total):,} optimiser steps: `lr` is never reached."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min((step - warmup_steps) / max(int(total) - warmup_steps, 1), 1.0)
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
