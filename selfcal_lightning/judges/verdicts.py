"""What a model said of answers, kept in the store with who it was: an answer is not judged twice.

Layout, below the store's folder: ``verdicts/<name>/verdicts.json``, a record with a format and a seal. A verdict
belongs to a question as it is worded and to the text that was graded, so that it stands for further samples too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.judges.forms import Grade
from selfcal_lightning.store.annotations import NAME
from selfcal_lightning.store.origins import origin_differences
from selfcal_lightning.store.records import read_record, write_record

FOLDER, FILE = "verdicts", "verdicts.json"
Key = tuple[str, str, str]  # id of a question, digest of its content, the text that was graded


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a name: who judged, and one for each text; None where the reply could not be read."""

    origin: Mapping[str, Any]
    grades: Mapping[Key, Grade | None]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Verdicts:
        """Return the verdicts that :meth:`as_json` gave."""
        grades = {(name, digest, text): grade for name, digest, text, grade in content["grades"]}
        return cls(content["origin"], grades)

    def as_json(self) -> dict[str, Any]:
        """Return the verdicts as plain JSON types."""
        return {"origin": dict(self.origin), "grades": [[*key, grade] for key, grade in self.grades.items()]}


class KeptVerdicts:
    """The verdicts of one name beside the rows of a store. Opening it reads and writes nothing.

    Args:
        store_path: Folder of the sample store.
        name: Name of the verdicts.
    """

    def __init__(self, store_path: str | Path, name: str) -> None:
        if not NAME.fullmatch(name):
            raise InputError(f"Expected `name` to be letters, digits, dots, dashes or underscores, but got {name!r}.")
        self.name = name
        self._file = Path(store_path) / FOLDER / name / FILE

    @property
    def record(self) -> Verdicts | None:
        """What is there; None where nothing is."""
        return read_record(self._file, Verdicts.from_json) if self._file.exists() else None

    def check_origin(self, origin: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Raise InputError where the name exists with verdicts of another judge, unless these may be replaced."""
        record = self.record
        if record is None or overwrite:
            return
        if differences := origin_differences(record.origin, origin):
            raise InputError(
                f"Expected the verdicts {self.name!r} in {self._file.parent} to be of the same judge, but got "
                f"{'; '.join(differences)}. Set `overwrite` to replace them, or choose another `name`."
            )

    def known(self, origin: Mapping[str, Any]) -> dict[Key, Grade | None]:
        """Return the verdicts of this judge; none where they are of another."""
        record = self.record
        return {} if record is None or origin_differences(record.origin, origin) else dict(record.grades)

    def write(self, grades: Mapping[Key, Grade | None], *, origin: Mapping[str, Any]) -> None:
        """Write the verdicts of a judge in the place of what is there."""
        plain = json.loads(json.dumps(dict(origin)))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_record(self._file, Verdicts(plain, grades).as_json())
