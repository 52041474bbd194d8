"""Multiple choice about a passage: ReClor and LogiQA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from selfcal_lightning.tasks.answers.types import LetterAnswers
from selfcal_lightning.tasks.dataset import Item, UnusableRowError, write_options
from selfcal_lightning.tasks.rows import PARQUET_CONVERSION, HubSource, Row

_LETTERS = "ABCD"


def read_passage(passage: str, question: str, options: Sequence[str], label: Any) -> Item:
    """Return passage, question and lettered options with the gold letter of ``label``, an index from 0.

    Example:
        >>> read_passage("All cats purr.", "Who purrs?", ["dogs", "cats"], 1).gold
        'B'
    """
    index = int(label) if str(label).strip().isdecimal() else -1
    if not 0 <= index < len(options) <= len(_LETTERS):
        raise UnusableRowError("no valid label")
    return Item(write_options(f"{passage.strip()}\n{question.strip()}", options), _LETTERS[index])


class ReClor:
    """Logical reasoning from admission tests (arXiv 2002.04326)."""

    name = "reclor"
    answers = LetterAnswers(_LETTERS)
    source = HubSource("tasksource/reclor", {"train": "train", "validation": "validation"})
    columns = ("context", "question", "answers", "label")
    id_column = "id_string"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return context, question and options with the label."""
        return read_passage(row["context"], row["question"], row["answers"], row["label"])


class LogiQA:
    """Logical reasoning from civil servants' examinations (arXiv 2007.08124)."""

    name = "logiqa"
    answers = LetterAnswers(_LETTERS)
    source = HubSource(
        "lucasmccabe/logiqa",
        {"train": "train", "validation": "validation", "test": "test"},
        data_dir="default",
        revision=PARQUET_CONVERSION,
    )
    columns = ("context", "query", "options", "correct_option")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return context, query and options with the index of the right one."""
        return read_passage(row["context"], row["query"], row["options"], row["correct_option"])
