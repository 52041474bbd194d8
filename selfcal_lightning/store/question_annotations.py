"""Values about questions beside the store's rows: predicted capability, keyed by the question and what it says.

A file ``question_annotations/<name>/question_values.json`` holds all values of a name with what computed them; it is a
record with a format and a seal, replaced in one step. A value belongs to a question *of one content*: where a question
has changed under its id, it has none until it is scored anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from selfcal_lightning.errors import InputError
from selfcal_lightning.store.annotations import NAME
from selfcal_lightning.store.origins import origin_differences
from selfcal_lightning.store.records import read_record, write_record

FOLDER, FILE = "question_annotations", "question_values.json"
Key = tuple[str, str]  # id of a question, digest of its content


class HasOrigin(Protocol):
    """A record that says what made it."""

    @property
    def origin(self) -> Mapping[str, Any]:
        """What made it."""
        ...


Kept = TypeVar("Kept", bound=HasOrigin)


class NamedRecord(Generic[Kept]):
    """One named record beside the rows of a store, with its origin. Opening it reads and writes nothing.

    Args:
        folder: Where the records of its kind lie.
        name: Its name.
        file: Name of the file.
        read: Returns the record of its content.
        held_to: What is said of one of another origin, "the values NAME in FOLDER to ...".
    """

    def __init__(
        self, folder: Path, name: str, file: str, read: Callable[[Mapping[str, Any]], Kept], *, held_to: str
    ) -> None:
        if not NAME.fullmatch(name):
            raise InputError(f"Expected `name` to be letters, digits, dots, dashes or underscores, but got {name!r}.")
        self.name = name
        self.path = folder / name / file
        self._read, self._held_to = read, held_to

    @property
    def record(self) -> Kept | None:
        """What is there; None where nothing is."""
        return read_record(self.path, self._read) if self.path.exists() else None

    def of_origin(self, origin: Mapping[str, Any]) -> Kept | None:
        """Return what is there if it is of this origin."""
        record = self.record
        return None if record is None or origin_differences(record.origin, origin) else record

    def check_origin(self, origin: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Raise InputError where the name exists with another origin, unless what is there may be replaced."""
        record = self.record
        if record is None or overwrite:
            return
        if differences := origin_differences(record.origin, origin):
            kind, how = self._held_to.split(" ", 1)
            raise InputError(
                f"Expected the {kind} {self.name!r} in {self.path.parent} {how}, but got {'; '.join(differences)}. Set "
                "`overwrite` to replace them, or choose another `name`."
            )


@dataclass(frozen=True)
class QuestionValues:
    """The values of a name: what computed them, and one for each question; None where nobody could tell."""

    origin: Mapping[str, Any]
    values: Mapping[Key, float | None]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> QuestionValues:
        """Return the values that :meth:`as_json` gave."""
        return cls(content["origin"], {(name, digest): value for name, digest, value in content["values"]})

    def as_json(self) -> dict[str, Any]:
        """Return the values as plain JSON types."""
        return {"origin": dict(self.origin), "values": [[*key, value] for key, value in self.values.items()]}


class QuestionAnnotation(NamedRecord[QuestionValues]):
    """One named value of the questions of a store. Opening it reads and writes nothing.

    Args:
        store_path: Folder of the sample store.
        name: Name of the value.
    """

    def __init__(self, store_path: str | Path, name: str) -> None:
        folder = Path(store_path) / FOLDER
        super().__init__(
            folder, name, FILE, QuestionValues.from_json, held_to="values to have been computed in the same way"
        )

    def known(self, origin: Mapping[str, Any]) -> dict[Key, float | None]:
        """Return the values of this origin; none where they are of another."""
        record = self.of_origin(origin)
        return {} if record is None else dict(record.values)

    def write(self, values: Mapping[Key, float | None], *, origin: Mapping[str, Any], overwrite: bool = False) -> None:
        """Add values; those of this origin that are there stay, unless a new one has their key.

        Raises:
            InputError: The name exists with another origin, or a value is infinite or nan.
        """
        self.check_origin(origin, overwrite=overwrite)
        if strange := [key for key, value in values.items() if value is not None and not math.isfinite(value)]:
            raise InputError(f"Expected values to be finite or None, but got another for {strange[0][0]!r}.")
        plain = json.loads(json.dumps(dict(origin)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self.path, QuestionValues(plain, {**self.known(plain), **values}).as_json())


def question_annotation_names(store_path: str | Path) -> list[str]:
    """Return the names of the values that the questions of a store have."""
    return sorted(file.parent.name for file in (Path(store_path) / FOLDER).glob(f"*/{FILE}"))


def question_values(store_path: str | Path, name: str, keys: Sequence[Key]) -> list[float | None]:
    """Return the values of questions, in their order; None for one that has none.

    Raises:
        InputError: There is no such name.
    """
    record = QuestionAnnotation(store_path, name).record
    if record is None:
        known = question_annotation_names(store_path)
        raise InputError(
            f"Expected {name!r} to be a value of the questions in {store_path}, but got {known or 'none at all'}. "
            "`selfcal score-questions` writes them."
        )
    return [record.values.get(key) for key in keys]
