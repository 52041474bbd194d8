"""Competition mathematics whose answer is an expression: MATH-500."""

from __future__ import annotations

from selfcal_lightning.tasks.answers.types import ExpressionAnswers
from selfcal_lightning.tasks.dataset import Item
from selfcal_lightning.tasks.rows import HubSource, Row


class Math500:
    """500 problems of the MATH test set (arXiv 2103.03874, 2305.20050)."""

    name = "math500"
    answers = ExpressionAnswers()
    source = HubSource("HuggingFaceH4/MATH-500", {"test": "test"})
    columns = ("problem", "answer")
    id_column = "unique_id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem and its answer."""
        return Item(row["problem"], row["answer"])
