"""Base classes of modules that are trained over a base model: their checkpoints, exports, and scores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torchmetrics import Metric

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.training.checkpoints import check_base_model, check_hyper_parameters, check_trained
from selfcal_lightning.training.contracts import class_path
from selfcal_lightning.training.model_parallel import trainer_of
from selfcal_lightning.training.resume import ResumeState

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from selfcal_lightning.models.chat_format import Prompt

ExportKind = Literal["adapter", "model", "module"]
IDENTITY_KEY, CLASS_KEY = "base_model_identity", "module_class"


def trained_parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def plain_settings(*records: Any) -> dict[str, Any]:
    """Return the fields of settings records as JSON has them: a checkpoint with other types is not read.

    A prompt stands there only where there is one.
    """
    fields = {name: value for record in records for name, value in json.loads(json.dumps(asdict(record))).items()}
    return {name: value for name, value in fields.items() if (name, value) != ("prompt", None)}


class TrainedModule(LightningModule):
    """A module whose trained part is kept in checkpoints and exported; the frozen base model is in neither.

    A checkpoint is refused where it is of another base model, other parameters or, to resume, other settings;
    ``save_hyperparameters`` must be given plain types, since a checkpoint is read without running code. Training
    resumes with the random states of all processes. Validation and test reset and log ``val_metrics`` and
    ``test_metrics``; they stay filled after a pass, so that callbacks can still read their points.

    Args:
        base_model: Folder or hub name of the base model.
        revision: Branch, tag or commit of a hub model.

    Attributes:
        identity: What identifies the base model (``base_model_identity``); ``configure_model`` sets it.
        exported_from: Folder of the export that the weights are taken from; None where training starts anew.
        beside: Settings of adapters that are trained beside the first one, by name.
        activated: Whether the generator stays as it is, so that its own tokens train nothing.
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
        self.beside: Mapping[str, Any] = {}
        self.activated = False
        self.attn_implementation: str | None = None
        self._resume = ResumeState()

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Raise InputError where the Trainer runs in a way that does not work; asked before long work, too."""

    @property
    def data_module(self) -> Any:
        """The data module; None where loaders were given without one."""
        trainer: Any = trainer_of(self)
        return None if trainer is None else trainer.datamodule

    # ---- validation and test

    def _metrics(self, stage: str) -> tuple[Any, ...]:
        return (getattr(self, f"{stage}_metrics"),)

    def _log_metrics(self, stage: str) -> None:
        values = {name: value for metrics in self._metrics(stage) for name, value in metrics.compute().items()}
        # Every process computes the same values; `sync_dist` would weigh uneven processes wrongly (Lightning #21859).
        self.log_dict({f"{stage}/{name}": value for name, value in values.items()}, sync_dist=False)

    def on_validation_epoch_start(self) -> None:
        """Forget the last pass."""
        for metrics in self._metrics("val"):
            metrics.reset()

    def on_validation_epoch_end(self) -> None:
        """Log ``val/...``."""
        self._log_metrics("val")

    def on_test_epoch_start(self) -> None:
        """Forget the last pass."""
        for metrics in self._metrics("test"):
            metrics.reset()

    def on_test_epoch_end(self) -> None:
        """Log ``test/...``."""
        self._log_metrics("test")

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trained parameters only, and note the base model and the class. A collective."""
        trained = trained_parameters(self)
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
        checkpoint[IDENTITY_KEY], checkpoint[CLASS_KEY] = dict(self.identity), class_path(type(self))
        self._resume.save(checkpoint, trainer_of(self))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another base model or of other parameters, and to go on under other settings.

        The class is not compared: its name may have changed, and what it trains tells more.
        """
        trainer = trainer_of(self)
        check_base_model(checkpoint.get(IDENTITY_KEY), self.identity, self.base_model, kind=type(self).__name__)
        settings = checkpoint.get(self.CHECKPOINT_HYPER_PARAMS_KEY, {})
        check_trained(checkpoint["state_dict"], trained_parameters(self), settings=settings)
        resuming = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        check_hyper_parameters(settings, self.hparams, resuming=resuming)
        self._resume.load(checkpoint, trainer)

    def on_train_start(self) -> None:
        """Go on exactly where a checkpoint left off."""
        self._resume.start(self.trainer)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load, and do not report the frozen base weights as missing: they come from ``base_model``."""
        keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        trained = trained_parameters(self)
        return type(keys)([name for name in keys.missing_keys if name in trained], keys.unexpected_keys)

    # ---- exports

    @property
    def export_kind(self) -> ExportKind:
        """What is exported: a LoRA "adapter", the whole "model", or files of the "module"'s own."""
        return "module"

    def describe(self) -> dict[str, Any]:
        """Return what identifies the trained module, JSON-able: the manifest of an export."""
        return {"base_model": dict(self.identity), "hyper_parameters": dict(self.hparams)}

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the trained weights, and what they need to be used, into an empty folder.

        Args:
            folder: The folder.
            state: All trained weights, where they are cut over processes (FSDP2).
        """
        raise NotImplementedError

    def load_export(self, folder: Path) -> None:
        """Take the weights from a folder that ``save_export`` filled, as soon as the model is configured."""
        self.exported_from = folder

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint, to be exported: its model loaded, on the CPU."""
        place: dict[str, Any] = {} if base_model is None else {"base_model": base_model, "revision": None}
        return cls.load_from_checkpoint(path, map_location="cpu", **place)


def check_defines(module: object, base: type[TrainedModule], *methods: str, who: str) -> None:
    """Raise InputError, before training, unless ``module`` is a ``base`` that defines what the base leaves open."""
    kind = type(module)
    if not isinstance(module, base):
        raise InputError(f"Expected a {base.__name__} for {who}, but got {kind.__name__}.")
    for name in methods:
        if getattr(kind, name) is getattr(base, name):
            raise InputError(f"{kind.__name__} must define `{name}` for {who}.")


class ScoringModule(TrainedModule):
    """A module that says how probable it is that a response is right: ``predict_step`` returns ``ScoredRows``.

    Args:
        base_model: Folder or hub name of the base model.
        revision: Branch, tag or commit of a hub model.
        query: The confidence query, with which responses are sampled.
        prompt: How questions are put to the model; None is their tasks' own way.
    """

    def __init__(
        self, base_model: str, *, revision: str | None = None, query: str = DEFAULT_QUERY, prompt: Prompt | None = None
    ) -> None:
        super().__init__(base_model, revision=revision)
        self.query, self.prompt = query, prompt

    def confidence_origin(self) -> dict[str, Any]:
        """Return what its confidences depend on beside the trained weights, JSON-able."""
        raise NotImplementedError
