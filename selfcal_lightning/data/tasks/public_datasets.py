"""Public data sets on the hub, as rows of a table: mathematics, multiple choice and short facts."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from selfcal_lightning.data.tasks.answer_types import ExpressionAnswers, LetterAnswers, NumberAnswers, ShortTextAnswers
from selfcal_lightning.data.tasks.dataset import DatasetSpec, Item, UnusableRowError, write_options
from selfcal_lightning.data.tasks.extraction import LETTERS
from selfcal_lightning.data.tasks.rows import PARQUET_CONVERSION, HubRows, HubSource, JoinedSource, Row
from selfcal_lightning.records import question_hash

_ALL = {"train": "train", "validation": "validation", "test": "test"}
_LABELLED = {"train": "train", "validation": "validation"}
_TRAIN_TEST = {"train": "train", "test": "test"}
_LAST_YEAR = 2023  # later years of AIME are tested on


def _gsm8k(row: Row, question_id: str) -> Item:
    _, mark, gold = row["answer"].rpartition("####")
    if not mark:
        raise UnusableRowError("no #### in the solution")
    return Item(row["question"], gold.strip())


def _svamp(row: Row, question_id: str) -> Item:
    """Join body and question, with the comma between them that some bodies lack."""
    body, question = row["Body"].strip(), row["Question"].strip()
    joint = " " if body.endswith((".", ",", "?", "!", ";")) else ", "
    return Item(f"{body}{joint}{question}", row["Answer"])


def _labelled(question: str) -> Callable[[Row, str], Item]:
    return lambda row, _: read_labelled_choices(row[question], row["choices"], row["answerKey"])


def read_labelled_choices(question: str, choices: Any, key: Any) -> Item:
    """Return a question with its options relettered from A, in their order, and the new letter of ``key``.

    ``choices`` have their own labels (A-E or 1-5): ``{"label": [...], "text": [...]}``, or a list of
    ``{"label", "text"}``.
    """
    if isinstance(choices, dict):
        labels, texts = list(choices["label"]), list(choices["text"])
    else:
        labels, texts = [choice["label"] for choice in choices], [choice["text"] for choice in choices]
    if key not in labels or len(labels) > len(LETTERS):
        raise UnusableRowError("no valid label")
    return Item(write_options(question, texts), LETTERS[labels.index(key)])


def _sciq(row: Row, question_id: str) -> Item:
    options = sorted(row[column] for column in ("correct_answer", "distractor1", "distractor2", "distractor3"))
    return Item(write_options(row["question"], options), LETTERS[options.index(row["correct_answer"])])


def _winogrande(row: Row, question_id: str) -> Item:
    question = f"What belongs in place of the underscore?\n{row['sentence']}"
    return Item(write_options(question, [row["option1"], row["option2"]]), row["answer"])


def split_math_qa_options(text: str) -> list[str]:
    """Return the options of MathQA's string; commas inside an option stay, as only ``, b )`` and so on part options."""
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


def _aqua_rat(row: Row, question_id: str) -> Item:
    """Drop the letters that the options bring, as in ``A)21``."""
    options = [re.sub(r"^\s*\(?[A-E]\s*\)\s*", "", option) for option in row["options"]]
    return Item(write_options(row["question"], options), row["correct"])


def _passage(question: str, options: str, label: str) -> Callable[[Row, str], Item]:
    def read(row: Row, _: str) -> Item:
        return _by_index(f"{row['context'].strip()}\n{row[question].strip()}", row[options], row[label], most=4)

    return read


def _by_index(question: str, options: Sequence[str], label: Any, *, most: int) -> Item:
    """Return a question whose label is the index of the right option, from 0."""
    index = int(label) if str(label).strip().isdecimal() else -1
    if not 0 <= index < len(options) <= most:
        raise UnusableRowError("no valid label")
    return Item(write_options(question, options), LETTERS[index])


_GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _read_gpqa(row: Row, question_id: str) -> Item:
    """Shuffle the options by a hash of the id."""
    order = [0, 1, 2, 3]
    random.Random(question_hash(question_id)).shuffle(order)
    options = [row[_GPQA_COLUMNS[1 + position]] for position in order]
    return Item(write_options(row["Question"], options), LETTERS[order.index(0)])


def _gpqa(subset: str, *, without: str | None = None) -> tuple[HubRows, ...]:
    def source(name: str) -> HubSource:
        return HubSource("Idavidrein/gpqa", {"all": "train"}, config=f"gpqa_{name}")

    return (HubRows(source(subset), "all", without=HubRows(source(without), "all") if without else None),)


def _hub_rows(hub_id: str, split: str, **options: Any) -> HubRows:
    return HubRows(HubSource(hub_id, {split: split}), split, **options)


def _aime_train(row: Row, question_id: str) -> Item:
    if int(row["Year"]) > _LAST_YEAR:
        raise UnusableRowError(f"a year after {_LAST_YEAR}, which is tested on")
    return Item(row["Question"], row["Answer"])


def _triviaqa(row: Row, question_id: str) -> Item:
    """Take all names of the answer, the one that the source prefers first."""
    answer = row["answer"]
    if not answer.get("value"):
        raise UnusableRowError("no answer")
    return Item(row["question"], list(dict.fromkeys([answer["value"], *(answer.get("aliases") or ())])))


_NUMBERS, _LETTERS, _FOUR_LETTERS = NumberAnswers(), LetterAnswers(), LetterAnswers("ABCD")
_EXPRESSIONS, _TEXTS = ExpressionAnswers(), ShortTextAnswers()
_AIME_25 = HubSource("math-ai/aime25", {"test": "test"})
_SIMPLEQA_VERIFIED = HubSource("google/simpleqa-verified", {"test": "eval"})

PUBLIC_DATASETS = (
    # Grade-school mathematics (arXiv 2110.14168); the gold answer stands after "####" in the solution.
    DatasetSpec(
        "gsm8k", _NUMBERS, HubSource("openai/gsm8k", _TRAIN_TEST, config="main"), ("question", "answer"), read=_gsm8k,
    ),
    # One-step problems with varied wording (arXiv 2103.07191), a body and a question.
    DatasetSpec(
        "svamp", _NUMBERS, HubSource("ChilleD/SVAMP", _TRAIN_TEST), ("Body", "Question", "Answer"), "ID", _svamp,
    ),
    # How many objects of a kind a list names (BIG-Bench Hard, arXiv 2210.09261).
    DatasetSpec(
        "object_counting", _NUMBERS,
        HubSource("lukaemon/bbh", {"test": "test"}, data_dir="object_counting", revision=PARQUET_CONVERSION),
        ("input", "target"),
    ),
    # Mathematics with five options in one string, like ``a ) 38 , b ) 1,000 , c ) 30 ...`` (arXiv 1905.13319).
    DatasetSpec(
        "math_qa", _LETTERS,
        HubSource("allenai/math_qa", _ALL, data_dir="default", revision=PARQUET_CONVERSION),
        ("Problem", "options", "correct"),
        read=lambda row, _: Item(write_options(row["Problem"], split_math_qa_options(row["options"])), row["correct"]),
    ),
    # Algebra with rationales (arXiv 1705.04146).
    DatasetSpec(
        "aqua_rat", _LETTERS, HubSource("deepmind/aqua_rat", _ALL, config="raw"), ("question", "options", "correct"),
        read=_aqua_rat,
    ),
    # Crowdsourced science exams (arXiv 1707.06209).
    DatasetSpec(
        "sciq", _LETTERS, HubSource("allenai/sciq", _ALL),
        ("question", "correct_answer", "distractor1", "distractor2", "distractor3"), read=_sciq,
    ),
    # Common sense with five options (arXiv 1811.00937).
    DatasetSpec(
        "commonsense_qa", _LETTERS, HubSource("tau/commonsense_qa", _LABELLED), ("question", "choices", "answerKey"),
        "id", _labelled("question"),
    ),
    # Elementary science facts applied (arXiv 1809.02789).
    DatasetSpec(
        "openbookqa", _LETTERS, HubSource("allenai/openbookqa", _ALL, config="main"),
        ("question_stem", "choices", "answerKey"), "id", _labelled("question_stem"),
    ),
    # School science (arXiv 1803.05457); some items are labelled 1-4.
    *(
        DatasetSpec(
            f"arc_{level.lower()}", LetterAnswers(digits=True),
            HubSource("allenai/ai2_arc", _ALL, config=f"ARC-{level}"), ("question", "choices", "answerKey"), "id",
            _labelled("question"),
        )
        for level in ("Easy", "Challenge")
    ),
    # Which of two names fills the blank (arXiv 1907.10641).
    DatasetSpec(
        "winogrande", LetterAnswers("AB", digits=True),
        HubSource("allenai/winogrande", _LABELLED, config="winogrande_xl"),
        ("sentence", "option1", "option2", "answer"), read=_winogrande,
    ),
    # Logical reasoning from admission tests (arXiv 2002.04326).
    DatasetSpec(
        "reclor", _FOUR_LETTERS, HubSource("tasksource/reclor", _LABELLED), ("context", "question", "answers", "label"),
        "id_string", _passage("question", "answers", "label"),
    ),
    # Logical reasoning from civil service examinations (arXiv 2007.08124).
    DatasetSpec(
        "logiqa", _FOUR_LETTERS,
        HubSource("lucasmccabe/logiqa", _ALL, data_dir="default", revision=PARQUET_CONVERSION),
        ("context", "query", "options", "correct_option"), read=_passage("query", "options", "correct_option"),
    ),
    # Graduate science (arXiv 2311.12022), gated on the hub. "test" is the diamond subset; "train" is the main set
    # without it, and "validation" the extended set without the main one.
    DatasetSpec(
        "gpqa", _FOUR_LETTERS,
        JoinedSource({
            "test": _gpqa("diamond"), "train": _gpqa("main", without="diamond"),
            "validation": _gpqa("extended", without="main"), "main": _gpqa("main"), "extended": _gpqa("extended"),
        }),
        _GPQA_COLUMNS, "Record ID", _read_gpqa,
    ),
    # 57 subjects, from school to professions, with four options (arXiv 2009.03300).
    DatasetSpec(
        "mmlu", _FOUR_LETTERS, HubSource("cais/mmlu", {"validation": "validation", "test": "test"}, config="all"),
        ("question", "choices", "answer"),
        read=lambda row, _: _by_index(row["question"], row["choices"], row["answer"], most=len(LETTERS)),
    ),
    # 500 problems of the MATH test set (arXiv 2103.03874, 2305.20050).
    DatasetSpec(
        "math500", _EXPRESSIONS, HubSource("HuggingFaceH4/MATH-500", {"test": "test"}), ("problem", "answer"),
        "unique_id", verifier="mathematics",
    ),
    # The problems of MATH (arXiv 2103.03874) outside MATH-500, as the study of capability splits them.
    DatasetSpec(
        "math", _EXPRESSIONS,
        JoinedSource({
            "train": (_hub_rows("appier-ai-research/MATH-train-11498", "train"),),
            "validation": (_hub_rows("appier-ai-research/MATH-valid-500", "validation"),),
        }),
        ("problem", "answer"), "unique_id", verifier="mathematics",
    ),
    # The 30 problems of AIME 2025; those of AIME 2024, 2025 and 2026; those from 1983 to 2023.
    DatasetSpec("aime25", _NUMBERS, _AIME_25, ("problem", "answer"), "id"),
    DatasetSpec(
        "aime", _NUMBERS,
        JoinedSource({"test": (
            HubRows(HubSource("HuggingFaceH4/aime_2024", {"test": "train"}), "test", mark="2024-"),
            HubRows(_AIME_25, "test", mark="2025-"),
            HubRows(
                HubSource("MathArena/aime_2026", {"test": "train"}), "test", mark="2026-", renamed={"id": "problem_idx"}
            ),
        )}),
        ("problem", "answer"), "id",
    ),
    DatasetSpec(
        "aime_train", _NUMBERS, HubSource("gneubig/aime-1983-2024", {"train": "train"}), ("Question", "Answer", "Year"),
        "ID", _aime_train,
    ),
    # Trivia with all names of an answer (arXiv 1705.03551), without documents; one row a question counts.
    DatasetSpec(
        "triviaqa", _TEXTS, HubSource("mandarjoshi/trivia_qa", _LABELLED, config="rc.nocontext"),
        ("question", "question_id", "answer"), "question_id", _triviaqa, verifier="facts", repeated_rows=True,
    ),
    # 1,000 questions of SimpleQA whose answers were checked again (arXiv 2509.07968); the others (arXiv 2411.04368).
    DatasetSpec(
        "simpleqa_verified", _TEXTS, _SIMPLEQA_VERIFIED, ("problem", "answer"), "original_index", verifier="facts",
    ),
    DatasetSpec(
        "simpleqa_train", _TEXTS,
        JoinedSource({"train": (_hub_rows(
            "llamastack/simpleqa", "train", number_column="original_index",
            without=HubRows(_SIMPLEQA_VERIFIED, "test"),
        ),)}),
        ("input_query", "expected_answer"), "original_index", verifier="facts",
    ),
)  # fmt: skip
