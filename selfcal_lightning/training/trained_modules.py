"""What a LightningModule offers to data modules, callbacks, checkpoints, exports and the command line."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast, runtime_checkable

from selfcal_lightning.training.contracts import check_members

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor
    from transformers import PreTrainedModel

    from selfcal_lightning.metrics.capability import CapabilityMetrics
    from selfcal_lightning.metrics.collection import CalibrationMetrics
    from selfcal_lightning.models.lora import LoraSettings
    from selfcal_lightning.prompts.chat_format import ChatFormat
    from selfcal_lightning.prompts.given import Prompt

MODULE = "a module"
ExportKind = Literal["adapter", "model", "module"]


class ReadingModule(Protocol):
    """What ``SSCDataModule`` asks of the module that it makes batches for."""

    @property
    def activated(self) -> bool:
        """Whether what is trained acts on the confidence query alone, so that rows of generation train nothing."""
        ...

    @property
    def attn_implementation(self) -> str | None:
        """Attention of the model that reads the rows; None where the module chooses one that can read packed rows."""
        ...


class PoolModule(Protocol):
    """What ``CalibrationCurve`` reads: the validation pool, scored."""

    @property
    def val_metrics(self) -> CalibrationMetrics:
        """Metrics that ``validation_step`` updates."""
        ...


class CapabilityModule(Protocol):
    """What ``CapabilityCurve`` reads: the validation questions, with their predicted capability."""

    @property
    def val_metrics(self) -> CapabilityMetrics:
        """Metrics that ``validation_step`` updates."""
        ...


class BasedModule(Protocol):
    """A module over a base model, as ``SSCGeneration`` samples from it before training."""

    @property
    def base_model(self) -> str:
        """Folder or hub name of the base model."""
        ...

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a hub model."""
        ...

    @property
    def query(self) -> str:
        """Text of the confidence query."""
        ...

    @property
    def prompt(self) -> Prompt | None:
        """How questions are put to the model; None is their tasks' own way."""
        ...

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Raise InputError where the Trainer runs in a way that does not work; asked before long work, too."""
        ...


class CheckpointedModule(Protocol):
    """What ``TrainedCheckpoint`` keeps of a module, and holds a checkpoint against."""

    @property
    def base_model(self) -> str:
        """Folder or hub name of the base model."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """What ``base_model_identity`` says of it; empty before the model is loaded."""
        ...

    @property
    def hparams(self) -> MutableMapping[str, Any]:
        """Settings, as plain types, by ``save_hyperparameters``."""
        ...


class Exportable(Protocol):
    """A module whose trained part becomes a folder, and is taken from there again."""

    @property
    def base_model(self) -> str:
        """Folder or hub name of the base model."""
        ...

    @property
    def export_kind(self) -> ExportKind:
        """What is written: a LoRA "adapter", the whole "model", or trained weights of the "module" in its own files."""
        ...

    @property
    def exported_from(self) -> Path | None:
        """Folder that the weights are taken from; None where they begin anew."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return what identifies the trained module, JSON-able: ``base_model`` and ``hyper_parameters`` at least."""
        ...

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the trained weights, and what they need to be used, into an empty folder.

        Args:
            folder: Where to.
            state: The trained parameters by their names in the module, in full, where its own are cut over processes.
        """
        ...

    def load_export(self, folder: Path) -> None:
        """Take the weights from a folder that :meth:`save_export` filled; asked before the model is loaded.

        Raises:
            InputError: They are of another base model, or of other settings; at the latest when the model is loaded.
        """
        ...

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint, to be exported: its model loaded, on the CPU.

        Args:
            path: The file.
            base_model: Folder or hub name of the base model, where it is not where the checkpoint says.
            dtype: Of the frozen weights.
        """
        ...


@runtime_checkable
class SideBySide(Protocol):
    """An exportable module that trains several adapters, each of which is exported for itself."""

    @property
    def beside(self) -> Mapping[str, Any]:
        """Settings of the adapters beside the first one, by name."""
        ...

    def describe_beside(self, name: str) -> dict[str, Any]:
        """Return what ``describe`` would return had the adapter been trained alone."""
        ...

    def save_beside(self, name: str, folder: Path) -> None:
        """Write the adapter, and what it needs to be used, into an empty folder."""
        ...


class Mergeable(Exportable, Protocol):
    """A module whose trained part can become part of its base model."""

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a hub model."""
        ...

    def merged(self) -> PreTrainedModel:
        """Return the whole model with what was trained merged into it."""
        ...


class RoundModule(Exportable, BasedModule, Protocol):
    """A module that trains the generator by an adapter: later rounds of ``SSCGeneration`` are sampled with it."""

    @property
    def lora(self) -> LoraSettings | None:
        """The adapter; None trains all weights."""
        ...

    @property
    def activated(self) -> bool:
        """Whether the adapter leaves the generator as it is."""
        ...

    @property
    def quantization(self) -> str | None:
        """How the frozen weights are quantised."""
        ...

    @property
    def torch_dtype(self) -> str:
        """Of the frozen weights."""
        ...

    @property
    def model(self) -> Any:
        """The model with its adapter; None before it is loaded."""
        ...

    @property
    def chat(self) -> ChatFormat | None:
        """Renders prompts and the confidence query; None before the model is loaded."""
        ...

    @property
    def hparams(self) -> MutableMapping[str, Any]:
        """Settings, as plain types."""
        ...


class ScoringModule(Exportable, Protocol):
    """A module whose ``predict_step`` returns rows and their confidences, as ``ConfidenceWriter`` stores them."""

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a hub model."""
        ...

    def confidence_origin(self) -> dict[str, Any]:
        """Return what its confidences depend on beside the trained weights, JSON-able."""
        ...


def reading_module(module: object, *, who: str) -> ReadingModule:
    """Return a module as what a data module reads of it.

    Raises:
        InputError: It lacks members of ``ReadingModule``.
    """
    check_members(module, ReadingModule, who=who, kind=MODULE)
    return cast("ReadingModule", module)


def linked_arguments(data_module: type, module: type, parameters: Mapping[type, frozenset[str]]) -> tuple[str, ...]:
    """Return the arguments that a data module takes over from the module on the command line.

    A class names what it takes over in ``linked_arguments``; one that names nothing takes nothing. What the module
    does not take itself is no link.

    Args:
        data_module: Class of the data module.
        module: Class of the module.
        parameters: Names of the arguments of both.
    """
    named = vars_of(data_module).get("linked_arguments", ())
    return tuple(name for name in named if name in parameters[module] and name in parameters[data_module])


def vars_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class, those of its parents included."""
    return {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
