"""The two files of the reference system: rows for its trainer, and its results.

``selected.json`` is a list of ``{"question", "answer", "gpt_response"}``, ``results.json`` an object with ``results``,
a list of ``{"question", "answer", "max_confidence", "correct"}``, and ``accuracy``. In a run without references
``answer`` is the label, ``correct`` and ``accuracy`` are null; nothing is counted as right that nobody judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from selfcal_lightning.runtime.files import write_atomically
from selfcal_lightning.selection.joining import Example

SELECTED_FILE, RESULTS_FILE = "selected.json", "results.json"


def write_reference_files(folder: Path, chosen: Sequence[Example]) -> None:
    """Write both files to a folder that is there."""
    rows = [{"question": one.question.text, "answer": _answer(one), "gpt_response": one.sample.text} for one in chosen]
    results = [
        {
            "question": one.question.text,
            "answer": _answer(one),
            "max_confidence": one.row.pick_score,
            "correct": one.sample.correct,
        }
        for one in chosen
    ]
    judged = [one.sample.correct for one in chosen if one.sample.correct is not None]
    accuracy = sum(judged) / len(judged) if judged else None
    for name, content in ((SELECTED_FILE, rows), (RESULTS_FILE, {"results": results, "accuracy": accuracy})):
        write_atomically(folder / name, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def remove_reference_files(folder: Path) -> None:
    """Remove what an earlier selection in this folder left of these: they would be taken for its own."""
    for name in (SELECTED_FILE, RESULTS_FILE):
        (folder / name).unlink(missing_ok=True)


def _answer(one: Example) -> str | None:
    """Return the gold answer where it may be read, else the label."""
    return one.row.label.text if one.question.reference is None else one.question.reference
