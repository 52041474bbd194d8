"""What a data module over sampled responses offers to callbacks and to the module that is trained on it."""

# Protocols are handed over as the contracts that they are, and never made instances of.
# mypy: disable-error-code="type-abstract"

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from selfcal_lightning.errors import InputError
from selfcal_lightning.records import Question
from selfcal_lightning.training.contracts import check_members

if TYPE_CHECKING:
    from torch import Tensor

    from selfcal_lightning.capability.probe import ProbeBasis
    from selfcal_lightning.store.index import SampleIndex

DATA_MODULE = "a data module"
C = TypeVar("C")


class Source(Protocol):
    """Where questions come from."""

    @property
    def task(self) -> str:
        """Name of their task."""
        ...

    @property
    def limit(self) -> int | None:
        """Most questions that it gives; None where it gives all."""
        ...


class SampledData(Protocol):
    """What an export says of the data that a module was trained on."""

    @property
    def store_dir(self) -> str | None:
        """Folder of the sample store; None where there is none."""
        ...

    @property
    def sources(self) -> Mapping[Any, Sequence[Source]]:
        """Sources of the questions by split; an empty list where the store alone knows them."""
        ...

    def training_settings(self) -> dict[str, Any]:
        """Return what the rows of training and their targets depend on, JSON-able; nothing of the store is read.

        ``questions`` holds what identifies the questions, which an export hashes.
        """
        ...


class StoredData(Protocol):
    """Where the responses lie, how many there are, and which of them are scored."""

    @property
    def store_dir(self) -> str:
        """Folder of the sample store."""
        ...

    @property
    def num_samples(self) -> int:
        """Responses to a question."""
        ...

    @property
    def predict_split(self) -> str:
        """Split that the verb ``predict`` scores."""
        ...


class QuestionData(StoredData, SampledData, Protocol):
    """What ``SSCGeneration`` reads: which questions are asked, how often, and where their responses go."""

    @property
    def regenerate_every_n_epochs(self) -> int | None:
        """Epochs after which the training questions are sampled again; None where they never are."""
        ...

    @property
    def p_true(self) -> str:
        """Confidence that targets are made of: "normalised" or "raw"."""
        ...

    @property
    def drop_none(self) -> bool:
        """Whether unreadable responses stay out of targets."""
        ...

    def questions(self, split: Any) -> list[Question]:
        """Return the questions of a split."""
        ...

    def known_questions(self, verb: str) -> Mapping[Any, Sequence[Question]] | None:
        """Return the questions that a verb reads, by split; None where the hub would have to be asked."""
        ...

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""
        ...


class ScoredData(StoredData, Protocol):
    """What ``ConfidenceWriter`` reads: which responses were scored."""

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens; a confidence may depend on what was cut."""
        ...

    @property
    def predict_index(self) -> SampleIndex | None:
        """Which response stands behind a batch's ``row``; None before the loader was asked for."""
        ...


class RowData(Protocol):
    """What ``SelfCalibrationModule`` asks of the data module that makes its batches."""

    @property
    def packing(self) -> str:
        """How rows share a prompt; "off" where they never do."""
        ...

    @property
    def eta(self) -> float:
        """Threshold of the generation loss."""
        ...


class StepData(Protocol):
    """What ``QuantileRewardModule`` asks of the data module that makes its batches."""

    @property
    def format(self) -> str | None:
        """Format of the public reward model that rows are written for; None where they are the policy's."""
        ...

    @property
    def steps(self) -> str:
        """Where steps end."""
        ...

    @property
    def target(self) -> str:
        """What is learnt."""
        ...


class PolicyData(Protocol):
    """What ``TestTimeTrainingModule`` asks of the data module that makes its batches."""

    @property
    def reward(self) -> str:
        """What the policy gradient learns from."""
        ...

    @property
    def learnt_target(self) -> str | None:
        """What P(True) learns."""
        ...

    def round_adapter(self, epoch: int) -> dict[str, Tensor] | None:
        """Return the adapter that the round of ``epoch`` was sampled with; None where it was the base model."""
        ...

    def teaches(self, epoch: int) -> bool:
        """Return whether the round of ``epoch`` has something to teach."""
        ...

    def is_fresh(self, epoch: int) -> bool:
        """Return whether ``epoch`` is the first one that is trained on its round."""
        ...


class AnchorData(StoredData, Protocol):
    """What ``AdaptationGuard`` reads: the rounds of a store, and the responses of round 0 as batches."""

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""
        ...

    def anchor_batches(self, *, questions: int, samples: int) -> Iterator[Any]:
        """Yield the first responses of round 0 to the first questions, all of whose tokens are asked for."""
        ...


class ProbeData(Protocol):
    """What ``LinearProbeModule`` asks of the data module that reads its features."""

    @property
    def basis(self) -> ProbeBasis | None:
        """What the features and targets of training are; None where no training is set up."""
        ...


def sampled_data(data: object, *, who: str) -> SampledData | None:
    """Return a data module as what an export reads of it; None where loaders were given without one.

    Raises:
        InputError: It lacks members of ``SampledData``.
    """
    return _checked_or_none(data, SampledData, who=who)


def question_data(data: object, *, who: str) -> QuestionData:
    """Return a data module as what sampling reads of it.

    Raises:
        InputError: There is none, or it lacks members of ``QuestionData``.
    """
    return _checked(data, QuestionData, who=who, holds="with questions", remedy="use SSCDataModule")


def scored_data(data: object, *, who: str) -> ScoredData:
    """Return a data module as what is written of the responses that it gave to be scored.

    Raises:
        InputError: There is none, or it lacks members of ``ScoredData``.
    """
    return _checked(data, ScoredData, who=who, holds="over a sample store", remedy="use SSCDataModule")


def row_data(data: object, *, who: str) -> RowData | None:
    """Return a data module as what a module reads of it; None where loaders were given without one.

    Raises:
        InputError: It lacks members of ``RowData``.
    """
    return _checked_or_none(data, RowData, who=who)


def check_step_data(data: object, stated: Mapping[str, str | None], *, who: str) -> None:
    """Hold a data module against the steps, the target and the format that a reward model states, by their names.

    Raises:
        InputError: It lacks members of ``StepData``, or has others.
    """
    checked = _checked_or_none(data, StepData, who=who)
    if checked is not None:
        _check_stated(stated, {"steps": checked.steps, "target": checked.target, "format": checked.format})


def policy_data(data: object, *, reward: str, target: str | None, who: str) -> PolicyData:
    """Return a data module as what test-time training reads of it, held against what the module states.

    Raises:
        InputError: There is none, it lacks members of ``PolicyData``, or has another reward or target.
    """
    checked = _checked(data, PolicyData, who=who, holds="with rewards", remedy="use RolloutDataModule")
    _check_stated({"reward": reward, "target": target}, {"reward": checked.reward, "target": checked.learnt_target})
    return checked


def anchor_data(data: object, *, who: str) -> AnchorData:
    """Return a data module as what is read of its rounds.

    Raises:
        InputError: There is none, or it lacks members of ``AnchorData``.
    """
    return _checked(data, AnchorData, who=who, holds="with rounds", remedy="use RolloutDataModule")


def probe_data(data: object, *, who: str) -> ProbeData:
    """Return a data module as what a probe reads of it.

    Raises:
        InputError: There is none, or it lacks members of ``ProbeData``.
    """
    return _checked(data, ProbeData, who=who, holds="with features", remedy="use ProbeDataModule")


def _checked(data: object, contract: type[C], *, who: str, holds: str, remedy: str) -> C:
    """Return a data module that keeps a contract.

    Args:
        data: The data module.
        contract: The protocol.
        who: Who needs it, for the message.
        holds: What is wanted of it, for the message where there is none.
        remedy: What to do then.

    Raises:
        InputError: There is none, or it lacks members.
    """
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
