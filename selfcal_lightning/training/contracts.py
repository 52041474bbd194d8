"""What callbacks read of a data module over sampled responses; importing classes by path."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question


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


class SampledData(Protocol):
    """What an export records about the training data."""

    sources: Mapping[Any, Sequence[Any]]  # of questions, by split; an empty list where the store alone knows them

    @property
    def store_dir(self) -> str | None:
        """Folder of the sample store; None where there is none."""

    def training_settings(self) -> dict[str, Any]:
        """Return what the training rows and their targets depend on, as plain JSON types; the store is not read.

        ``questions`` holds what identifies the questions, which an export hashes.
        """


class QuestionData(Protocol):
    """What ``SSCGeneration`` reads: which questions are asked, how often, and where their responses go."""

    store_dir: str
    num_samples: int  # responses to a question
    predict_split: str  # split that the verb ``predict`` scores
    sources: Mapping[Any, Sequence[Any]]
    regenerate_every_n_epochs: int | None  # epochs after which the training questions are sampled again
    p_true: str  # confidence that targets are made of: "normalised" or "raw"
    drop_none: bool  # whether unreadable responses stay out of targets

    def training_settings(self) -> dict[str, Any]:
        """As in ``SampledData``."""

    def questions(self, split: Any) -> list[Question]:
        """Return the questions of a split."""

    def known_questions(self, verb: str) -> Mapping[Any, Sequence[Question]] | None:
        """Return the questions that a verb reads, by split; None if only the hub could tell."""

    def round_of(self, epoch: int) -> int:
        """Return the newest generation round that ``epoch`` trains on."""


def needed_data(data: Any, *, who: str, remedy: str) -> Any:
    """Return the data module; raise InputError if loaders were given without one."""
    if data is None:
        raise InputError(f"Expected a data module for {who}, but got none: {remedy}.")
    return data


def check_stated(settings: Mapping[str, tuple[str | None, str | None]]) -> None:
    """Raise InputError for the first setting in which data module and module differ."""
    for name, (value, found) in settings.items():
        if value != found:
            raise InputError(f"Expected `{name}` of the data module to be the module's, {value!r}, but got {found!r}.")
