"""Multiple choice without a passage: science, common sense, and mathematics with options."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from selfcal_lightning.data.tasks.answer_types import ExpressionAnswers, LetterAnswers, NumberAnswers, ShortTextAnswers
from selfcal_lightning.data.tasks.base import VerifierForm
from selfcal_lightning.data.tasks.dataset import Item, UnusableRowError, write_options
from selfcal_lightning.data.tasks.extraction import LETTERS
from selfcal_lightning.data.tasks.rows import PARQUET_CONVERSION, HubRows, HubSource, JoinedSource, OtherRows, Row
from selfcal_lightning.records import question_hash


class GSM8K:
    r"""Grade-school mathematics (arXiv 2110.14168); the gold answer stands after "####" in the solution."""

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


ALL_SPLITS = {"train": "train", "validation": "validation", "test": "test"}
LABELLED_SPLITS = {"train": "train", "validation": "validation"}


def read_labelled_choices(question: str, choices: Any, key: Any) -> Item:
    """Return a question with its options relettered from A, in their order, and the new letter of ``key``.

    ``choices`` have labels of their own (A-E or 1-5): ``{"label": [...], "text": [...]}``, or a list of
    ``{"label", "text"}``.

    Example:
        >>> read_labelled_choices("Which is hot?", {"label": ["1", "2"], "text": ["ice", "fire"]}, "2").gold
        'B'
    """
    if isinstance(choices, dict):
        labels, texts = list(choices["label"]), list(choices["text"])
    else:
        labels, texts = [choice["label"] for choice in choices], [choice["text"] for choice in choices]
    if key not in labels or len(labels) > len(LETTERS):
        raise UnusableRowError("no valid label")
    return Item(write_options(question, texts), LETTERS[labels.index(key)])


class CommonsenseQA:
    """Common sense with five options (arXiv 1811.00937)."""

    name = "commonsense_qa"
    answers = LetterAnswers()
    source = HubSource("tau/commonsense_qa", LABELLED_SPLITS)
    columns = ("question", "choices", "answerKey")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question with its options and the key."""
        return read_labelled_choices(row["question"], row["choices"], row["answerKey"])


class ARC:
    """School science (arXiv 1803.05457); some items are labelled 1-4 in the source."""

    answers = LetterAnswers(digits=True)
    columns = ("question", "choices", "answerKey")
    id_column = "id"

    def __init__(self, level: str) -> None:
        self.name = f"arc_{level}"
        self.source = HubSource("allenai/ai2_arc", ALL_SPLITS, config=f"ARC-{level.capitalize()}")

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question with its options lettered from A, and the key as such a letter."""
        return read_labelled_choices(row["question"], row["choices"], row["answerKey"])


class OpenBookQA:
    """Elementary science facts applied (arXiv 1809.02789)."""

    name = "openbookqa"
    answers = LetterAnswers()
    source = HubSource("allenai/openbookqa", ALL_SPLITS, config="main")
    columns = ("question_stem", "choices", "answerKey")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the stem with its options and the key."""
        return read_labelled_choices(row["question_stem"], row["choices"], row["answerKey"])


class SciQ:
    """Crowdsourced science exams (arXiv 1707.06209); the options stand in alphabetical order."""

    name = "sciq"
    answers = LetterAnswers()
    source = HubSource("allenai/sciq", ALL_SPLITS)
    columns = ("question", "correct_answer", "distractor1", "distractor2", "distractor3")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question with its sorted options and the letter of the right one."""
        options = sorted(row[column] for column in self.columns[1:])
        return Item(write_options(row["question"], options), LETTERS[options.index(row["correct_answer"])])


class WinoGrande:
    """Which of two names fills the blank (arXiv 1907.10641)."""

    name = "winogrande"
    answers = LetterAnswers("AB", digits=True)
    source = HubSource("allenai/winogrande", LABELLED_SPLITS, config="winogrande_xl")
    columns = ("sentence", "option1", "option2", "answer")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the sentence with its two options and the key, 1 or 2."""
        question = f"What belongs in place of the underscore?\n{row['sentence']}"
        return Item(write_options(question, [row["option1"], row["option2"]]), row["answer"])


class MathQA:
    """Mathematics with five options in one string, like ``a ) 38 , b ) 1,000 , c ) 30 ...`` (arXiv 1905.13319)."""

    name = "math_qa"
    answers = LetterAnswers()
    source = HubSource("allenai/math_qa", ALL_SPLITS, data_dir="default", revision=PARQUET_CONVERSION)
    columns = ("Problem", "options", "correct")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the problem with its options and the key."""
        return Item(write_options(row["Problem"], split_math_qa_options(row["options"])), row["correct"])


def split_math_qa_options(text: str) -> list[str]:
    """Return the options of MathQA's string; commas inside an option stay, as only ``, b )`` and so on part options.

    Example:
        >>> split_math_qa_options("a ) rs . 1,000 , b ) 2 , 500 , c ) none")
        ['rs . 1,000', '2 , 500', 'none']
    """
    text = text.strip(" []'\"")
    options = []
    for letter in LETTERS:
        start = re.match(rf"\s*{letter}\s*\)\s*", text, re.IGNORECASE)
        if start is None:
            break
        text = text[start.end() :]
        following = re.search(rf"[\s'\",]*,[\s'\"]*{chr(ord(letter) + 1)}\s*\)", text, re.IGNORECASE)
        options.append((text if following is None else text[: following.start()]).strip(" '\""))
        text = "" if following is None else text[following.start() :].lstrip(" ,'\"")
    return options


class AquaRat:
    """Algebra with rationales (arXiv 1705.04146); options come as ``A)21``."""

    name = "aqua_rat"
    answers = LetterAnswers()
    source = HubSource("deepmind/aqua_rat", ALL_SPLITS, config="raw")
    columns = ("question", "options", "correct")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question with its options, their own letters dropped, and the key."""
        options = [re.sub(r"^\s*\(?[A-E]\s*\)\s*", "", option) for option in row["options"]]
        return Item(write_options(row["question"], options), row["correct"])


class MMLU:
    """57 subjects, from school to professions, with four options (arXiv 2009.03300)."""

    name = "mmlu"
    answers = LetterAnswers("ABCD")
    source = HubSource("cais/mmlu", {"validation": "validation", "test": "test"}, config="all")
    columns = ("question", "choices", "answer")
    id_column = None

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question with its options and the letter of the right one, an index from 0 in the source."""
        place = str(row["answer"]).strip()
        if not place.isdecimal() or int(place) >= len(row["choices"]):
            raise UnusableRowError("no valid label")
        return Item(write_options(row["question"], row["choices"]), LETTERS[int(place)])


def _gpqa(subset: str) -> HubSource:
    return HubSource("Idavidrein/gpqa", {"all": "train"}, config=f"gpqa_{subset}")


class GPQA:
    """Graduate science (arXiv 2311.12022); gated on the hub, options in an order of ours.

    The split "test" is the diamond subset; "train" is the main set without it, and "validation" the extended set
    without the main one.
    """

    name = "gpqa"
    answers = LetterAnswers("ABCD")
    source = JoinedSource(
        {
            "test": (HubRows(_gpqa("diamond"), "all"),),
            "train": (HubRows(_gpqa("main"), "all", without=OtherRows(_gpqa("diamond"), "all", "Record ID")),),
            "validation": (HubRows(_gpqa("extended"), "all", without=OtherRows(_gpqa("main"), "all", "Record ID")),),
            "main": (HubRows(_gpqa("main"), "all"),),
            "extended": (HubRows(_gpqa("extended"), "all"),),
        }
    )
    columns = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    id_column = "Record ID"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question with its options shuffled by a hash of the id, and the letter of the right one."""
        order = [0, 1, 2, 3]
        random.Random(question_hash(question_id)).shuffle(order)
        options = [row[self.columns[1 + position]] for position in order]
        return Item(write_options(row["Question"], options), LETTERS[order.index(0)])


_AIME_25 = HubSource("math-ai/aime25", {"test": "test"})
_LAST_YEAR = 2023


class Math500:
    """500 problems of the MATH test set (arXiv 2103.03874, 2305.20050)."""

    name = "math500"
    answers = ExpressionAnswers()
    verifier: VerifierForm = "mathematics"
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
    verifier: VerifierForm = "mathematics"
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


_VERIFIED = HubSource("google/simpleqa-verified", {"test": "eval"})


class TriviaQA:
    """Trivia with all names that an answer goes by (arXiv 1705.03551), without documents; one row a question counts."""

    name = "triviaqa"
    answers = ShortTextAnswers()
    verifier: VerifierForm = "facts"
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
    verifier: VerifierForm = "facts"
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
    verifier: VerifierForm = "facts"
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
