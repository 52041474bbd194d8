"""Questions of one's own: a local file in the format of ``question_rows``, for each answer type."""

from __future__ import annotations

from typing import Literal

from selfcal_lightning.data.tasks.answer_types import Answers, FreeTextAnswers, ShortTextAnswers
from selfcal_lightning.data.tasks.base import VerifierForm
from selfcal_lightning.data.tasks.dataset import Item
from selfcal_lightning.data.tasks.rows import Row

# How free texts are compared with the reference; `selfcal verify` asks a model instead.
VERIFY_MODES: dict[type, str] = {FreeTextAnswers: "contains", ShortTextAnswers: "exact"}


class LocalQuestions:
    """Questions of a local file; the gold answer may be a list of aliases where the answers are short texts.

    Multiple choice is asked with the options written out in ``question`` and the letter as ``answer``.
    """

    source = None
    question_rows: Literal[True] = True
    columns = ("question", "answer")
    id_column = "id"

    def __init__(self, name: str, answers: Answers, *, verifier: VerifierForm | None = None) -> None:
        self.name = name
        self.answers = answers
        self.verifier = verifier
        self.verify_mode = VERIFY_MODES.get(type(answers))

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and its answer."""
        return Item(row["question"], row["answer"])
