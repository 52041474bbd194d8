"""Capabilities of questions as JSON lines, one question a line: for plans, and for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.json_files import line_error, read_json_lines
from selfcal_lightning.runtime.overwriting import check_replaceable

CAPABILITY = "capability"
FITTED_ON = "fitted_on"  # in the origin of a probe's values: digests of the questions that it must not be judged by
TAUGHT = "taught"  # in the origin of P(True) of an adapter: what it was taught about questions
FIELDS = ("id", "task", "question", CAPABILITY, "scored_by")


@dataclass(frozen=True, slots=True)
class QuestionScore:
    """The capability of a question.

    Attributes:
        id: The question.
        task: Its task.
        text: What it says.
        capability: The chance that the model answers it correctly, in [0, 1]; None where the model could not be asked.
        scored_by: Digest of what computed it (:func:`origin_digest`); None where nobody knows.
    """

    id: str
    task: str
    text: str
    capability: float | None
    scored_by: str | None = None


def write_scores(path: str | Path, scores: Sequence[QuestionScore]) -> None:
    """Write capabilities, one line a question."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    rows = [
        dict(zip(FIELDS, (one.id, one.task, one.text, one.capability, one.scored_by), strict=True)) for one in scores
    ]
    write_json_lines(Path(path), rows)


def read_scores(path: str | Path) -> list[QuestionScore]:
    """Read what :func:`write_scores` wrote.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A line is not as described, an id occurs twice, or there is no question with a capability.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"Expected `scores` to be a file, but there is none at {path}. Make it by `selfcal score-questions "
            "--output`."
        )
    found: dict[str, QuestionScore] = {}
    for number, line in read_json_lines(file):
        value = line.get(CAPABILITY)
        if not isinstance(line.get("id"), str) or not (value is None or _is_share(value)):
            raise line_error(file, number, f"`id` and `{CAPABILITY}`, a number in [0, 1] or null", repr(line))
        if line["id"] in found:
            raise line_error(file, number, "`id` to be unique", f"{line['id']!r} again")
        found[line["id"]] = QuestionScore(
            line["id"], str(line.get("task")), str(line.get("question")), value, line.get("scored_by")
        )
    if all(score.capability is None for score in found.values()):
        raise InputError(f"Expected {path} to hold the capability of a question, but got none for {len(found):,}.")
    return list(found.values())


def check_scores_target(path: str | Path, *, option: str = "output") -> None:
    """Raise InputError unless capabilities may be written to ``path``: it is new, or holds earlier ones."""

    def is_own(file: Path) -> bool:
        try:
            first = next((line for _, line in read_json_lines(file)), None)
        except InputError:
            return False
        return first is not None and set(FIELDS) <= first.keys()

    check_replaceable(path, is_own, option=option, kind="earlier scores of questions")


def origin_digest(origin: Mapping[str, Any]) -> str:
    """Return a digest of what computed values of questions, whichever questions it was fitted on."""
    plain = {name: value for name, value in origin.items() if name != FITTED_ON}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0
