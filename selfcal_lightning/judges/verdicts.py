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

from selfcal_lightning.judges.forms import Grade
from selfcal_lightning.store.question_annotations import NamedRecord
from selfcal_lightning.store.records import write_record

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


class KeptVerdicts(NamedRecord[Verdicts]):
    """The verdicts of one name beside the rows of a store. Opening it reads and writes nothing.

    Args:
        store_path: Folder of the sample store.
        name: Name of the verdicts.
    """

    def __init__(self, store_path: str | Path, name: str) -> None:
        super().__init__(
            Path(store_path) / FOLDER, name, FILE, Verdicts.from_json, held_to="verdicts to be of the same judge"
        )

    def known(self, origin: Mapping[str, Any]) -> dict[Key, Grade | None]:
        """Return the verdicts of this judge; none where they are of another."""
        record = self.of_origin(origin)
        return {} if record is None else dict(record.grades)

    def write(self, grades: Mapping[Key, Grade | None], *, origin: Mapping[str, Any]) -> None:
        """Write the verdicts of a judge in the place of what is there."""
        plain = json.loads(json.dumps(dict(origin)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_record(self.path, Verdicts(plain, grades).as_json())
