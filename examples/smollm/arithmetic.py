"""The task ``arithmetic`` as a plug-in: sums, products and common divisors, answered in free sentences.

selfcal generate --plugins examples/smollm/arithmetic.py --task arithmetic --model MODEL --store_dir samples

The answer of a response is its last number, as in lm-evaluation-harness's flexible extraction. The questions were made
by reasoning-gym; see ``data/arithmetic/README.md``.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.data.tasks.base import AnswerType
from selfcal_lightning.data.tasks.dataset import DatasetTask, Item, bare_question
from selfcal_lightning.data.tasks.registry import register_task
from selfcal_lightning.data.tasks.rows import FileSource, Row

DATA = Path(__file__).resolve().parent / "data" / "arithmetic"
SPLITS = ("train", "validation", "test", "confirmation")
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,15}(?:\.\d{1,15})?")


class LastNumber:
    """The last number of a response, without thousands separators and trailing zeros.

    Example:
        >>> LastNumber().extract("The LCM of 12 and 1,000 is 3,000.0 in all.")
        '3000'
    """

    answer_type: AnswerType = "number"
    hint = "a number"

    def canonical(self, gold: Any) -> str | None:
        """Return the number of a reference answer."""
        return self.extract(str(gold))

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the last number."""
        found = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
        return f"{float(found[-1]):.10g}" if found else None

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the numbers are the same."""
        return answer == reference

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers as they are."""
        return list(answers)


class Arithmetic:
    """Questions made by reasoning-gym."""

    name = "arithmetic"
    answers = LastNumber()
    source = FileSource({split: str(DATA / f"{split}.jsonl") for split in SPLITS})
    columns = ("question", "answer")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and the number asked for."""
        return Item(row["question"], row["answer"])


register_task(DatasetTask(Arithmetic(), prompt=bare_question))
