"""Questions about facts, answered in a few words: TriviaQA and SimpleQA."""

from __future__ import annotations

from typing import Literal

from selfcal_lightning.tasks.answers.types import ShortTextAnswers
from selfcal_lightning.tasks.base import JudgeForm
from selfcal_lightning.tasks.dataset import Item, UnusableRowError
from selfcal_lightning.tasks.rows import HubRows, HubSource, JoinedSource, OtherRows, Row

_VERIFIED = HubSource("google/simpleqa-verified", {"test": "eval"})


class TriviaQA:
    """Trivia with all names that an answer goes by (arXiv 1705.03551), without documents; one row a question counts."""

    name = "triviaqa"
    answers = ShortTextAnswers()
    judge: JudgeForm = "facts"
    source = HubSource("mandarjoshi/trivia_qa", {"train": "train", "validation": "validation"}, config="rc.nocontext")
    columns = ("question", "question_id", "answer")
    id_column = "question_id"
    repeated_rows: Literal[True] = True

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and the names of its answer, the one that the source prefers first."""
        answer = row["answer"]
        if not answer.get("value"):
            raise UnusableRowError("no answer")
        return Item(row["question"], list(dict.fromkeys([answer["value"], *(answer.get("aliases") or ())])))


class SimpleQAVerified:
    """1,000 questions of SimpleQA whose answers were checked again (arXiv 2509.07968)."""

    name = "simpleqa_verified"
    answers = ShortTextAnswers()
    judge: JudgeForm = "facts"
    source = _VERIFIED
    columns = ("problem", "answer")
    id_column = "original_index"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and its answer."""
        return Item(row["problem"], row["answer"])


class SimpleQATrain:
    """The questions of SimpleQA (arXiv 2411.04368) that are not among the verified ones, to train on."""

    name = "simpleqa_train"
    answers = ShortTextAnswers()
    judge: JudgeForm = "facts"
    source = JoinedSource(
        {
            "train": (
                HubRows(
                    HubSource("llamastack/simpleqa", {"train": "train"}), "train", number_column="original_index",
                    without=OtherRows(_VERIFIED, "test", "original_index"),
                ),
            )
        }
    )  # fmt: skip
    columns = ("input_query", "expected_answer")
    id_column = "original_index"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and its answer."""
        return Item(row["input_query"], row["expected_answer"])
