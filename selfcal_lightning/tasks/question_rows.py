"""The one format of questions that a user brings, in a file or in Python: ``question``, ``answer``, ``id``, ``task``.

A row is ``{"question": text, "answer": text or number, "id": text, "task": name}``, of which only ``question`` must be
there; ``reference`` is another name for ``answer``. A file holds JSON lines or Parquet by its ending, else plain text
with one question a line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError, did_you_mean
from selfcal_lightning.runtime.json_files import line_error, read_json_lines
from selfcal_lightning.tasks.rows import JSON_ENDINGS, PARQUET_ENDING, load_file_rows

logger = logging.getLogger(__name__)

FIELDS = ("question", "answer", "id", "task")
ANSWER, SYNONYM = "answer", "reference"
# Fields of pools, whose lines are questions with responses.
OF_POOLS = ("responses", "split", "messages")


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A question as a user wrote it.

    Attributes:
        text: The question.
        answer: Its gold answer as it was written, a text, a number or a list of aliases; None where none is known.
        id: Its own id, or None.
        task: The task that it names, or None.
        origin: Where it stands, for messages, such as "questions.jsonl:3"; "" of a single question.
        number: Which row it is: the line of a file, or the place in a list, from 1.
    """

    text: str
    answer: object
    id: str | None
    task: str | None
    origin: str
    number: int

    @property
    def where(self) -> str:
        """What a message about it begins with."""
        return f"{self.origin}: " if self.origin else ""


def read_question_file(path: str | Path, *, option: str = "questions") -> list[QuestionRow]:
    """Return the questions of a file.

    Args:
        path: JSON lines (.jsonl, .ndjson, .json), Parquet (.parquet), or plain text with one question a line.
        option: What takes the path, for messages.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It holds no question, or a row is not as described, with file and line.
    """
    file = check_question_file(path, option=option)
    if file.suffix in JSON_ENDINGS:
        numbered: Iterable[tuple[int, Mapping[str, Any]]] = read_json_lines(file)
    elif file.suffix == PARQUET_ENDING:
        numbered = enumerate(load_file_rows(str(file), ["question"]), start=1)
    else:
        numbered = _text_lines(file)
    return _parse(numbered, origin=str(file), separator=":")


def check_question_file(path: str | Path, *, option: str = "questions") -> Path:
    """Return the path of a file that is there. Raises FileNotFoundError, and InputError for an empty name."""
    if not str(path).strip():
        raise InputError(f"Expected `{option}` to be a file of questions, but got an empty name.")
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"Expected `{option}` to be a file, but there is none at {path}.")
    return file


def parse_questions(rows: Iterable[Mapping[str, Any]], *, origin: str = "questions") -> list[QuestionRow]:
    """Return questions that are given as mappings with the fields of a file.

    Example:
        >>> rows = parse_questions([{"question": "What is 2+2?", "reference": 4}])
        >>> rows[0].answer, rows[0].origin
        (4, 'questions[1]')
    """
    return _parse(enumerate(rows, start=1), origin=origin, separator="[")


def parse_question(row: Mapping[str, Any], *, origin: str, number: int) -> QuestionRow:
    """Return a row that is as the format says.

    Raises:
        InputError: `question` is absent or holds no text, a field is misspelt, or one is of another type.
    """
    if not isinstance(row, Mapping):
        raise InputError(f"{origin}: Expected a question with its fields, but got {type(row).__name__}.")
    check_spelling(row, origin)
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{origin}: Expected `question` to hold text, but got {text!r}.")
    answer = given_answer(row, origin=origin)
    name, task = row.get("id"), row.get("task")
    if isinstance(name, bool) or not isinstance(name, str | int | None) or str(name).strip() == "":
        raise InputError(f"{origin}: Expected `id` to be text or a whole number, but got {name!r}.")
    if not isinstance(task, str | None):
        raise InputError(f"{origin}: Expected `task` to be the name of a task, but got {task!r}.")
    own_id = None if name is None else str(name).strip()
    return QuestionRow(text, answer, own_id, task or None, origin, number)


def given_answer(row: Mapping[str, Any], *, origin: str) -> Any:
    """Return what a row gives as its answer, under either name; None where it gives none.

    Example:
        >>> given_answer({"reference": "B"}, origin="line 1"), given_answer({"answer": None}, origin="line 2")
        ('B', None)
    """
    answers = [row[name] for name in (ANSWER, SYNONYM) if row.get(name) is not None]
    if len(answers) > 1 and answers[0] != answers[1]:
        raise InputError(
            f"{origin}: Expected `{ANSWER}` or `{SYNONYM}`, which mean the same, but got {answers[0]!r} and "
            f"{answers[1]!r}."
        )
    return answers[0] if answers else None


def check_spelling(row: Mapping[str, Any], origin: str) -> None:
    """Refuse a field that looks like one of the format that is absent; other fields are the user's own."""
    has_answer = ANSWER in row or SYNONYM in row
    absent = [name for name in FIELDS if name not in row and not (name == ANSWER and has_answer)]
    absent += [] if has_answer else [SYNONYM]
    for name in row:
        known = name in (*FIELDS, SYNONYM, *OF_POOLS)
        if not known and (hint := did_you_mean(str(name).lower(), absent)):
            raise InputError(f"{origin}: Expected the fields {_listed()}, but got {name!r}.{hint}")
    if "question" not in row:
        given = ", ".join(map(str, row)) or "none"
        raise InputError(f"{origin}: Expected the field `question` (of {_listed()}), but got only {given}.")


def _parse(numbered: Iterable[tuple[int, Mapping[str, Any]]], *, origin: str, separator: str) -> list[QuestionRow]:
    end = "]" if separator == "[" else ""
    rows, others = [], dict[str, None]()
    for number, row in numbered:
        rows.append(parse_question(row, origin=f"{origin}{separator}{number}{end}", number=number))
        others |= dict.fromkeys(str(name) for name in row if name not in (*FIELDS, SYNONYM, *OF_POOLS))
    if not rows:
        raise InputError(f"Expected {origin} to hold at least one question, but got none.")
    if others:
        logger.warning("The fields %s of %s are not read; those that are: %s.", ", ".join(others), origin, _listed())
    return rows


def _text_lines(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {file} to be text in UTF-8, but got: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith('{"'):
            endings = " or ".join(JSON_ENDINGS)
            expected = f"a question in plain text (JSON lines belong into a file ending in {endings})"
            raise line_error(file, number, expected, line)
        if line.strip():
            yield number, {"question": line.strip()}


def _listed() -> str:
    return f"question, {ANSWER} (or {SYNONYM}), id, task"
