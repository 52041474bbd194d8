"""Users' own questions: a local file in one format (``rows.read_question_file``), for each answer type."""

from __future__ import annotations

from selfcal_lightning.data.tasks.answer_types import Answers, FreeTextAnswers, ShortTextAnswers
from selfcal_lightning.data.tasks.base import VerifierForm
from selfcal_lightning.data.tasks.dataset import DatasetSpec

# How free texts are compared with the reference; `selfcal verify` asks a model instead.
VERIFY_MODES: dict[type, str] = {FreeTextAnswers: "contains", ShortTextAnswers: "exact"}


class LocalQuestions(DatasetSpec):
    """Questions of a local file; short texts may have a list of aliases as their answer."""

    question_rows = True

    def __init__(self, name: str, answers: Answers, *, verifier: VerifierForm | None = None) -> None:
        super().__init__(name, answers, None, ("question", "answer"), id_column="id", verifier=verifier)
        self.verify_mode = VERIFY_MODES.get(type(answers))
