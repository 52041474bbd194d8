"""A plan: how many responses each question gets, in a file that names its questions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question

FORMAT, VERSION = "selfcal_lightning.plan", 1


@dataclass(frozen=True)
class SamplePlan:
    """How many responses each question gets."""

    samples: Mapping[str, int]
    details: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, count in self.samples.items():
            if type(count) is not int or count < 0:
                raise InputError(f"Expected `samples` of a plan to be counts, but got {count!r} for question {name!r}.")
        if not any(self.samples.values()):
            raise InputError(f"Expected a plan to give a question a response, but got none for {len(self.samples):,}.")

    @property
    def digest(self) -> str:
        """Identity of the plan: a hash of the numbers of all questions."""
        return hashlib.sha256(json.dumps(sorted(self.samples.items())).encode()).hexdigest()[:16]

    def chosen(self, questions: Sequence[Question]) -> list[Question]:
        ids = {question.id for question in questions}
        absent, unknown = sorted(ids - self.samples.keys()), sorted(self.samples.keys() - ids)
        if absent or unknown:
            missing = f"{len(absent):,} questions that it does not name, such as {absent[0]!r}" if absent else ""
            further = f"{len(unknown):,} that are not asked, such as {unknown[0]!r}" if unknown else ""
            found = " and ".join(filter(None, [missing, further]))
            way_out = "Use the `task`, `split`, `limit` and `offset` that the plan was made with."
            if ids.isdisjoint(self.samples):  # those of a file have names of its own
                way_out = (
                    "For a file of questions, score those of a store: run this without `plan`, with `num_samples` 1, "
                    "into another `store_dir`; score that one with `--output`, and `selfcal allocate` again."
                )
            raise InputError(f"Expected `plan` to name the questions of the run, but got {found}. {way_out}")
        return [question for question in questions if self.samples[question.id]]

    def save(self, path: str | Path) -> None:
        """Write the plan; a file that is there must be an earlier one."""
        check_plan_target(path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        record = {"format": FORMAT, "version": VERSION, "details": dict(self.details), "samples": dict(self.samples)}
        files.write_atomically(Path(path), files.to_json(record))


def check_plan_target(path: str | Path) -> None:
    files.check_replaceable(
        path, lambda file: (files.json_object_or_none(file) or {}).get("format") == FORMAT, option="output",
        kind="an earlier plan",
    )  # fmt: skip


def load_plan(path: str | Path) -> SamplePlan:
    if not Path(path).is_file():
        raise FileNotFoundError(f"Expected `plan` to be a file, but got {path}. `selfcal allocate` writes one.")
    record = files.read_json_object(path)
    found = record.get("format"), record.get("version")
    if found != (FORMAT, VERSION) or not isinstance(record.get("samples"), dict):
        raise InputError(f"Expected {path} to be a plan of version {VERSION}, but got {found[0]!r} of {found[1]!r}.")
    return SamplePlan(record["samples"], record.get("details", {}))
