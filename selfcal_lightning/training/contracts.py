"""What a data module over sampled responses offers to callbacks and to the module that is trained on it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast, runtime_checkable

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor
    from transformers import PreTrainedModel

    from selfcal_lightning.capability.metrics import CapabilityMetrics
    from selfcal_lightning.capability.probe import ProbeBasis
    from selfcal_lightning.data.store.shards import SampleIndex
    from selfcal_lightning.models.chat_format import ChatFormat, Prompt
    from selfcal_lightning.models.lora import LoraSettings
    from selfcal_lightning.training.metrics import CalibrationMetrics

GUIDE = "docs/development/adding_a_module.md"


def members_of(contract: type) -> list[str]:
    """Return the names of what a protocol asks for, its own and those of the protocols that it extends, sorted."""
    names = {name for base in _protocols(contract) for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return sorted(name for name in names if not name.startswith("_"))


def methods_of(contract: type) -> list[str]:
    """Return the names of the methods among them, sorted."""
    return sorted(
        name
        for name in members_of(contract)
        if any(isinstance(vars(base).get(name), (FunctionType, classmethod)) for base in _protocols(contract))
    )


def _protocols(contract: type) -> list[type]:
    return [base for base in contract.__mro__ if issubclass(base, Protocol) and base is not Protocol]  # type: ignore[arg-type]


def missing_members(value: object, contract: type) -> list[str]:
    """Return what ``value`` lacks of ``contract``, by name; no property of it is read."""
    offered = set(dir(value))  # networks list their parts there, too
    wanted = methods_of(contract) if isinstance(value, type) else members_of(contract)
    return [name for name in wanted if name not in offered]


def check_members(value: object, contract: type, *, who: str, kind: str) -> None:
    """Raise InputError, naming what is missing, unless ``value`` offers all that ``contract`` asks for.

    Example:
        >>> class Named(Protocol):
        ...     name: str
        >>> check_members(object(), Named, who="The log", kind="a module")
        Traceback (most recent call last):
        selfcal_lightning.core.errors.InputError: ...
    """
    missing = missing_members(value, contract)
    if not missing:
        return
    named = value.__name__ if isinstance(value, type) else type(value).__name__
    listed, them = " and ".join(f"`{name}`" for name in missing), "it" if len(missing) == 1 else "them"
    raise InputError(
        f"Expected {kind} with {listed} for {who}, but got {named}, which lacks {them}. "
        f"Declare what `{contract.__module__}.{contract.__qualname__}` asks for; {GUIDE} tells how."
    )


def class_path(kind: type) -> str:
    """Return the name by which a class is imported."""
    return f"{kind.__module__}.{kind.__qualname__}"


def import_class(path: str, *, option: str) -> type:
    """Return the class that a path names."""
    room, _, name = path.rpartition(".")
    try:
        # A package with a face gives its names when they are asked for; they are not among its variables before.
        found = getattr(importlib.import_module(room), name) if room else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"Expected `{option}` to be the path of a class, but got {path!r}: {error!r}.") from error
    if not isinstance(found, type):
        raise InputError(f"Expected `{option}` to be the path of a class, but got {path!r}.")
    return found


MODULE = "a module"
ExportKind = Literal["adapter", "model", "module"]


class ReadingModule(Protocol):
    """What ``SSCDataModule`` asks of the module that it makes batches for."""

    # Whether what is trained acts on the confidence query alone, so that rows of generation train nothing.
    activated: bool
    # Attention of the model that reads the rows; None where the module chooses one that can read packed rows.
    attn_implementation: str | None


class PoolModule(Protocol):
    """What ``CalibrationCurve`` reads: the validation pool, scored."""

    val_metrics: CalibrationMetrics  # metrics that ``validation_step`` updates


class CapabilityModule(Protocol):
    """What ``CapabilityCurve`` reads: the validation questions, with their predicted capability."""

    val_metrics: CapabilityMetrics  # metrics that ``validation_step`` updates


class BasedModule(Protocol):
    """A module over a base model, as ``SSCGeneration`` samples from it before training."""

    base_model: str  # folder or hub name of the base model
    revision: str | None  # branch, tag or commit of a hub model
    query: str  # text of the confidence query
    prompt: Prompt | None  # how questions are put to the model; None is their tasks' own way

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Raise InputError where the Trainer runs in a way that does not work; asked before long work, too."""


class CheckpointedModule(Protocol):
    """What ``TrainedCheckpoint`` keeps of a module, and holds a checkpoint against."""

    base_model: str  # folder or hub name of the base model
    identity: Mapping[str, Any]  # what ``base_model_identity`` says of it; empty before the model is loaded
    hparams: MutableMapping[str, Any]  # settings, as plain types, by ``save_hyperparameters``


class Exportable(Protocol):
    """A module whose trained part becomes a folder, and is taken from there again."""

    base_model: str  # folder or hub name of the base model
    # What is written: a LoRA "adapter", the whole "model", or trained weights of the "module" in its own files.
    export_kind: ExportKind
    exported_from: Path | None  # folder that the weights are taken from; None where they begin anew

    def describe(self) -> dict[str, Any]:
        """Return what identifies the trained module, JSON-able: ``base_model`` and ``hyper_parameters`` at least."""

    def save_export(self, folder: Path, *, state: Mapping[str, Tensor] | None = None) -> None:
        """Write the trained weights, and what they need to be used, into an empty folder."""

    def load_export(self, folder: Path) -> None:
        """Take the weights from a folder that :meth:`save_export` filled; asked before the model is loaded."""

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint, to be exported: its model loaded, on the CPU."""


@runtime_checkable
class SideBySide(Protocol):
    """An exportable module that trains several adapters, each of which is exported for itself."""

    beside: Mapping[str, Any]  # settings of the adapters beside the first one, by name

    def describe_beside(self, name: str) -> dict[str, Any]:
        """Return what ``describe`` would return had the adapter been trained alone."""

    def save_beside(self, name: str, folder: Path) -> None:
        """Write the adapter, and what it needs to be used, into an empty folder."""


class Mergeable(Exportable, Protocol):
    """A module whose trained part can become part of its base model."""

    revision: str | None  # branch, tag or commit of a hub model

    def merged(self) -> PreTrainedModel:
        """Return the whole model with what was trained merged into it."""


class RoundModule(Exportable, BasedModule, Protocol):
    """A module that trains the generator by an adapter: later rounds of ``SSCGeneration`` are sampled with it."""

    lora: LoraSettings | None  # the adapter; None trains all weights
    activated: bool  # whether the adapter leaves the generator as it is
    quantization: str | None  # how the frozen weights are quantised
    torch_dtype: str  # of the frozen weights
    model: Any  # the model with its adapter; None before it is loaded
    chat: ChatFormat | None  # renders prompts and the confidence query; None before the model is loaded
    hparams: MutableMapping[str, Any]  # settings, as plain types


class ScoringModule(Exportable, Protocol):
    """A module whose ``predict_step`` returns rows and their confidences, as ``ConfidenceWriter`` stores them."""

    revision: str | None  # branch, tag or commit of a hub model

    def confidence_origin(self) -> dict[str, Any]:
        """Return what its confidences depend on beside the trained weights, JSON-able."""


def reading_module(module: object, *, who: str) -> ReadingModule:
    """Return a module as what a data module reads of it."""
    check_members(module, ReadingModule, who=who, kind=MODULE)
    return cast("ReadingModule", module)


def linked_arguments(data_module: type, module: type, parameters: Mapping[type, frozenset[str]]) -> tuple[str, ...]:
    """Return the arguments that a data module takes over from the module on the command line.

    A class names what it takes over in ``linked_arguments``; one that names nothing takes nothing. What the module
    does not take itself is no link.
    """
    named = vars_of(data_module).get("linked_arguments", ())
    return tuple(name for name in named if name in parameters[module] and name in parameters[data_module])


def vars_of(kind: type) -> dict[str, Any]:
    """Return the attributes of a class, those of its parents included."""
    return {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}


# Protocols are handed over as the contracts that they are, and never made instances of.
# mypy: disable-error-code="type-abstract"

DATA_MODULE = "a data module"
C = TypeVar("C")


class Source(Protocol):
    """Where questions come from."""

    task: str  # name of their task
    limit: int | None  # most questions that it gives; None where it gives all


class SampledData(Protocol):
    """What an export says of the data that a module was trained on."""

    @property
    def store_dir(self) -> str | None:
        """Folder of the sample store; None where there is none."""

    # Sources of the questions by split; an empty list where the store alone knows them.
    sources: Mapping[Any, Sequence[Source]]

    def training_settings(self) -> dict[str, Any]:
        """Return what the rows of training and their targets depend on, JSON-able; nothing of the store is read.

        ``questions`` holds what identifies the questions, which an export hashes.
        """


class StoredData(Protocol):
    """Where the responses lie, how many there are, and which of them are scored."""

    store_dir: str  # folder of the sample store
    num_samples: int  # responses to a question
    predict_split: str  # split that the verb ``predict`` scores


class QuestionData(StoredData, SampledData, Protocol):
    """What ``SSCGeneration`` reads: which questions are asked, how often, and where their responses go."""

    # Epochs after which the training questions are sampled again; None where they never are.
    regenerate_every_n_epochs: int | None
    p_true: str  # confidence that targets are made of: "normalised" or "raw"
    drop_none: bool  # whether unreadable responses stay out of targets

    def questions(self, split: Any) -> list[Question]:
        """Return the questions of a split."""

    def known_questions(self, verb: str) -> Mapping[Any, Sequence[Question]] | None:
        """Return the questions that a verb reads, by split; None where the hub would have to be asked."""

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""


class ScoredData(StoredData, Protocol):
    """What ``ConfidenceWriter`` reads: which responses were scored."""

    max_length: int  # longest sequence in tokens; a confidence may depend on what was cut
    # Which response stands behind a batch's ``row``; None before the loader was asked for.
    predict_index: SampleIndex | None


class RowData(Protocol):
    """What ``SelfCalibrationModule`` asks of the data module that makes its batches."""

    packing: str  # how rows share a prompt; "off" where they never do
    eta: float  # threshold of the generation loss


class StepData(Protocol):
    """What ``QuantileRewardModule`` asks of the data module that makes its batches."""

    format: str | None  # format of the public reward model that rows are written for; None where they are the policy's
    steps: str  # where steps end
    target: str  # what is learnt


class PolicyData(Protocol):
    """What ``TestTimeTrainingModule`` asks of the data module that makes its batches."""

    reward: str  # what the policy gradient learns from
    learnt_target: str | None  # what P(True) learns

    def round_adapter(self, epoch: int) -> dict[str, Tensor] | None:
        """Return the adapter that the round of ``epoch`` was sampled with; None where it was the base model."""

    def teaches(self, epoch: int) -> bool:
        """Return whether the round of ``epoch`` has something to teach."""

    def is_fresh(self, epoch: int) -> bool:
        """Return whether ``epoch`` is the first one that is trained on its round."""


class AnchorData(StoredData, Protocol):
    """What ``AdaptationGuard`` reads: the rounds of a store, and the responses of round 0 as batches."""

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""

    def anchor_batches(self, *, questions: int, samples: int) -> Iterator[Any]:
        """Yield the first responses of round 0 to the first questions, all of whose tokens are asked for."""


class ProbeData(Protocol):
    """What ``LinearProbeModule`` asks of the data module that reads its features."""

    basis: ProbeBasis | None  # what the features and targets of training are; None where no training is set up


def sampled_data(data: object, *, who: str) -> SampledData | None:
    """Return a data module as what an export reads of it; None where loaders were given without one."""
    return _checked_or_none(data, SampledData, who=who)


def question_data(data: object, *, who: str) -> QuestionData:
    """Return a data module as what sampling reads of it."""
    return _checked(data, QuestionData, who=who, holds="with questions", remedy="use SSCDataModule")


def scored_data(data: object, *, who: str) -> ScoredData:
    """Return a data module as what is written of the responses that it gave to be scored."""
    return _checked(data, ScoredData, who=who, holds="over a sample store", remedy="use SSCDataModule")


def row_data(data: object, *, who: str) -> RowData | None:
    """Return a data module as what a module reads of it; None where loaders were given without one."""
    return _checked_or_none(data, RowData, who=who)


def check_step_data(data: object, stated: Mapping[str, str | None], *, who: str) -> None:
    """Hold a data module against the steps, the target and the format that a reward model states, by their names."""
    checked = _checked_or_none(data, StepData, who=who)
    if checked is not None:
        _check_stated(stated, {"steps": checked.steps, "target": checked.target, "format": checked.format})


def policy_data(data: object, *, reward: str, target: str | None, who: str) -> PolicyData:
    """Return a data module as what test-time training reads of it, held against what the module states."""
    checked = _checked(data, PolicyData, who=who, holds="with rewards", remedy="use RolloutDataModule")
    _check_stated({"reward": reward, "target": target}, {"reward": checked.reward, "target": checked.learnt_target})
    return checked


def anchor_data(data: object, *, who: str) -> AnchorData:
    """Return a data module as what is read of its rounds."""
    return _checked(data, AnchorData, who=who, holds="with rounds", remedy="use RolloutDataModule")


def probe_data(data: object, *, who: str) -> ProbeData:
    """Return a data module as what a probe reads of it."""
    return _checked(data, ProbeData, who=who, holds="with features", remedy="use ProbeDataModule")


def _checked(data: object, contract: type[C], *, who: str, holds: str, remedy: str) -> C:
    """Return a data module that keeps a contract."""
    checked = _checked_or_none(data, contract, who=who)
    if checked is None:
        raise InputError(f"Expected a data module {holds} for {who}, but got none: {remedy}.")
    return checked


def _checked_or_none(data: object, contract: type[C], *, who: str) -> C | None:
    """Return a data module that keeps a contract; None where there is none."""
    if data is None:
        return None
    check_members(data, contract, who=who, kind=DATA_MODULE)
    return cast("C", data)


def _check_stated(stated: Mapping[str, str | None], found: Mapping[str, str | None]) -> None:
    """Raise InputError where a data module has another setting than the module states, naming the first."""
    for name, value in stated.items():
        if value != found[name]:
            raise InputError(
                f"Expected `{name}` of the data module to be {value!r}, as the module states it, but got "
                f"{found[name]!r}. Give both the same."
            )
