"""Word problems whose answer is a number: GSM8K, SVAMP and BIG-Bench Hard's object counting."""

from __future__ import annotations

from selfcal_lightning.tasks.answers.types import NumberAnswers
from selfcal_lightning.tasks.dataset import Item, UnusableRowError
from selfcal_lightning.tasks.rows import PARQUET_CONVERSION, HubSource, Row


class GSM8K:
    r"""Grade-school mathematics (arXiv 2110.14168); the gold answer stands after "####" in the solution.

    Example:
        >>> GSM8K().read_row({"question": "1+1?", "answer": "1+1=2\n#### 2"}, "")
        Item(body='1+1?', gold='2')
    """

    name = "gsm8k"
    answers = NumberAnswers()
    source = HubSource("openai/gsm8k", {"train": "train", "test": "test"}, config="main")
    columns = ("question", "answer")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and the text after the last "####"."""
        _, mark, gold = row["answer"].rpartition("####")
        if not mark:
            raise UnusableRowError("no #### in the solution")
        return Item(row["question"], gold.strip())


class SVAMP:
    """One-step problems with varied wording (arXiv 2103.07191), a body and a question."""

    name = "svamp"
    answers = NumberAnswers()
    source = HubSource("ChilleD/SVAMP", {"train": "train", "test": "test"})
    columns = ("Body", "Question", "Answer")
    id_column = "ID"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return body and question with the comma between them that some bodies lack."""
        body, question = row["Body"].strip(), row["Question"].strip()
        joint = " " if body.endswith((".", ",", "?", "!", ";")) else ", "
        return Item(f"{body}{joint}{question}", row["Answer"])


class ObjectCounting:
    """How many objects of a kind a list names (BIG-Bench Hard, arXiv 2210.09261)."""

    name = "object_counting"
    answers = NumberAnswers()
    source = HubSource("lukaemon/bbh", {"test": "test"}, data_dir="object_counting", revision=PARQUET_CONVERSION)
    columns = ("input", "target")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and its count; 0 is a count like any other."""
        return Item(row["input"], row["target"])
