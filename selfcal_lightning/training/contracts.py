"""What a data module over sampled responses offers to callbacks and to the module that is trained on it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, cast, runtime_checkable

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor
    from transformers import PreTrainedModel

    from selfcal_lightning.data.store.shards import SampleIndex
    from selfcal_lightning.models.chat_format import ChatFormat, Prompt
    from selfcal_lightning.models.lora import LoraSettings

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


ExportKind = Literal["adapter", "model", "module"]


class BasedModule(Protocol):
    """A module over a base model, as ``SSCGeneration`` samples from it before training."""

    base_model: str  # folder or hub name of the base model
    revision: str | None  # branch, tag or commit of a hub model
    query: str  # text of the confidence query
    prompt: Prompt | None  # how questions are put to the model; None is their tasks' own way

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Raise InputError where the Trainer runs in a way that does not work; asked before long work, too."""


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


def sampled_data(data: object, *, who: str) -> SampledData | None:
    """Return a data module as what an export reads of it; None where loaders were given without one."""
    if data is not None:
        check_members(data, SampledData, who=who, kind=DATA_MODULE)
    return cast("SampledData | None", data)


def question_data(data: object, *, who: str) -> QuestionData:
    """Return a data module as what sampling reads of it."""
    return _checked(data, QuestionData, who=who, holds="with questions", remedy="use SSCDataModule")


def scored_data(data: object, *, who: str) -> ScoredData:
    """Return a data module as what is written of the responses that it gave to be scored."""
    return _checked(data, ScoredData, who=who, holds="over a sample store", remedy="use SSCDataModule")


def _checked(data: object, contract: type[C], *, who: str, holds: str, remedy: str) -> C:
    """Return a data module that keeps a contract."""
    if data is None:
        raise InputError(f"Expected a data module {holds} for {who}, but got none: {remedy}.")
    check_members(data, contract, who=who, kind=DATA_MODULE)
    return cast("C", data)


def needed_data(data: Any, *, who: str, remedy: str) -> Any:
    """Return a data module; InputError where loaders were given without one."""
    if data is None:
        raise InputError(f"Expected a data module for {who}, but got none: {remedy}.")
    return data


def check_stated(settings: Mapping[str, tuple[str | None, str | None]]) -> None:
    """Raise InputError where a data module has another setting than the module states, naming the first."""
    for name, (value, found) in settings.items():
        if value != found:
            raise InputError(
                f"Expected `{name}` of the data module to be {value!r}, as the module states it, but got "
                f"{found!r}. Give both the same."
            )
