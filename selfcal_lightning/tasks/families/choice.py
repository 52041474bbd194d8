"""Multiple choice without a passage: science, common sense, and mathematics with options."""

from __future__ import annotations

import random
import re
from typing import Any

from selfcal_lightning.records import question_hash
from selfcal_lightning.tasks.answers.extraction import LETTERS
from selfcal_lightning.tasks.answers.types import LetterAnswers
from selfcal_lightning.tasks.dataset import Item, UnusableRowError, write_options
from selfcal_lightning.tasks.rows import PARQUET_CONVERSION, HubRows, HubSource, JoinedSource, OtherRows, Row

ALL_SPLITS = {"train": "train", "validation": "validation", "test": "test"}
LABELLED_SPLITS = {"train": "train", "validation": "validation"}


def read_labelled_choices(question: str, choices: Any, key: Any) -> Item:
    """Return a question with its options lettered anew from A, in their order, and the letter that ``key`` becomes.

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
    """School science (arXiv 1803.05457); some items are labelled 1-4 in the source.

    Args:
        level: "easy" or "challenge".
    """

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
