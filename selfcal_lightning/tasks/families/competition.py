"""Competition mathematics: MATH, whose answers are expressions, and AIME, whose answers are whole numbers."""

from __future__ import annotations

from selfcal_lightning.tasks.answers.types import ExpressionAnswers, NumberAnswers
from selfcal_lightning.tasks.base import JudgeForm
from selfcal_lightning.tasks.dataset import Item, UnusableRowError
from selfcal_lightning.tasks.rows import HubRows, HubSource, JoinedSource, Row

_AIME_25 = HubSource("math-ai/aime25", {"test": "test"})
_LAST_YEAR = 2023


class Math500:
    """500 problems of the MATH test set (arXiv 2103.03874, 2305.20050)."""

    name = "math500"
    answers = ExpressionAnswers()
    judge: JudgeForm = "mathematics"
    source = HubSource("HuggingFaceH4/MATH-500", {"test": "test"})
    columns = ("problem", "answer")
    id_column = "unique_id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem and its answer."""
        return Item(row["problem"], row["answer"])


class Math:
    """The problems of MATH (arXiv 2103.03874) outside MATH-500, as the study of capability splits them."""

    name = "math"
    answers = ExpressionAnswers()
    judge: JudgeForm = "mathematics"
    source = JoinedSource(
        {
            "train": (HubRows(HubSource("appier-ai-research/MATH-train-11498", {"train": "train"}), "train"),),
            "validation": (
                HubRows(HubSource("appier-ai-research/MATH-valid-500", {"validation": "validation"}), "validation"),
            ),
        }
    )
    columns = ("problem", "answer")
    id_column = "unique_id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem and its answer."""
        return Item(row["problem"], row["answer"])


class AIME25:
    """The 30 problems of AIME 2025."""

    name = "aime25"
    answers = NumberAnswers()
    source = _AIME_25
    columns = ("problem", "answer")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem and its answer, a number from 0 to 999."""
        return Item(row["problem"], row["answer"])


class AIME:
    """The 90 problems of AIME 2024, 2025 and 2026."""

    name = "aime"
    answers = NumberAnswers()
    source = JoinedSource(
        {
            "test": (
                HubRows(HubSource("HuggingFaceH4/aime_2024", {"test": "train"}), "test", mark="2024-"),
                HubRows(_AIME_25, "test", mark="2025-"),
                HubRows(
                    HubSource("MathArena/aime_2026", {"test": "train"}), "test", mark="2026-",
                    renamed={"id": "problem_idx"},
                ),
            )
        }
    )  # fmt: skip
    columns = ("problem", "answer")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem and its answer, a number from 0 to 999."""
        return Item(row["problem"], row["answer"])


class AIMETrain:
    """The problems of AIME from 1983 to 2023; those of later years are tested on."""

    name = "aime_train"
    answers = NumberAnswers()
    source = HubSource("gneubig/aime-1983-2024", {"train": "train"})
    columns = ("Question", "Answer", "Year")
    id_column = "ID"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem and its answer, a number from 0 to 999."""
        if int(row["Year"]) > _LAST_YEAR:
            raise UnusableRowError(f"a year after {_LAST_YEAR}, which is tested on")
        return Item(row["Question"], row["Answer"])
