"""Rows of data sets: from the Hugging Face hub, or from a local JSON-lines or Parquet file."""

import csv
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError, RunError, did_you_mean
from selfcal_lightning.core.files import UnreadableJSONError, line_error, parse_json, read_json_lines

Row = Mapping[str, Any]

JSON_ENDINGS, PARQUET_ENDING = (".jsonl", ".ndjson", ".json"), ".parquet"
PARQUET_CONVERSION = "refs/convert/parquet"


@dataclass(frozen=True, slots=True)
class HubSource:
    """Where a data set lives on the Hugging Face hub.

    The Parquet conversion of a script data set has one folder for each configuration and no configuration names, so it
    is read by ``data_dir``.
    """

    hub_id: str
    splits: Mapping[str, str]  # names here -> names on the hub; splits without labels are left out
    config: str | None = None
    data_dir: str | None = None  # folder inside the repository
    revision: str | None = None

    def describe(self, split: str) -> str:
        return f"{self.hub_id} ({self.splits[split]})"


@dataclass(frozen=True, slots=True)
class HubRows:
    """Rows of one place on the hub: a piece of a joined split."""

    source: HubSource
    split: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    number_column: str | None = None
    mark: str = ""
    without: "HubRows | None" = None  # rows of another split, which are left out by their ids


@dataclass(frozen=True, slots=True)
class JoinedSource:
    """A data set whose splits join several places on the hub, or leave out the rows of another split."""

    pieces: Mapping[str, tuple[HubRows, ...]]  # by the name of the split that joins them

    @property
    def splits(self) -> Mapping[str, str]:
        return {name: " + ".join(one.source.describe(one.split) for one in rows) for name, rows in self.pieces.items()}


@dataclass(frozen=True, slots=True)
class FileSource:
    """The files of a data set that comes with the code of its task, such as a plug-in: split -> path."""

    splits: Mapping[str, str]


def load_file_rows(path: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a JSON-lines or Parquet file (by its ending), each with all of ``columns``."""
    file = check_file(path)
    return _load_parquet(file, columns) if file.suffix == PARQUET_ENDING else _load_json_lines(file, columns)


def check_file(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"Expected `path` to be a file, but there is none at {path}.")
    if file.suffix not in (PARQUET_ENDING, *JSON_ENDINGS):
        raise InputError(f"Expected `path` to end in .jsonl, .ndjson, .json or .parquet, but got {path}.")
    return file


def load_hub_rows(source: HubSource, split: str, columns: Sequence[str]) -> Iterable[Row]:
    import datasets

    try:
        rows = datasets.load_dataset(
            source.hub_id, name=source.config, data_dir=source.data_dir, revision=source.revision,
            split=source.splits[split],
        )  # fmt: skip
    except ValueError as error:  # an unknown configuration or split
        raise InputError(f"Could not read {source.hub_id}, {source.config or 'default'}: {error}") from error
    except (ConnectionError, FileNotFoundError, PermissionError) as error:
        raise RunError(
            f"Could not load {source.hub_id} from the Hugging Face hub: {error} Without access, give the same rows as "
            "a local JSON-lines or Parquet file by `path`."
        ) from error
    _check_columns(source.hub_id, rows.column_names, columns)
    return rows


def load_joined_rows(
    source: JoinedSource, split: str, columns: Sequence[str], *, id_column: str | None
) -> Iterator[Row]:
    """Yield the rows of a joined split, each piece under our column names."""
    for piece in source.pieces[split]:
        needed = [piece.renamed.get(column, column) for column in columns if column != piece.number_column]
        others: set[object] = set()
        if (without := piece.without) is not None and id_column is not None:
            others = {row[id_column] for row in load_hub_rows(without.source, without.split, [id_column])}
        for number, found in enumerate(load_hub_rows(piece.source, piece.split, needed)):
            row = {**found, **{here: found[there] for here, there in piece.renamed.items()}}
            if piece.number_column is not None:
                row[piece.number_column] = number
            if others and row.get(str(id_column)) in others:
                continue
            if id_column is not None and piece.mark and id_column in row:
                row[id_column] = f"{piece.mark}{row[id_column]}"
            yield row


def _load_parquet(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    import pyarrow

    from selfcal_lightning.data.store.shards import read_parquet

    try:
        table = read_parquet(file)
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"Expected {file} to be a Parquet file, but it cannot be read: {error}") from error
    _check_columns(str(file), table.column_names, columns)
    return table.to_pylist()


def _load_json_lines(file: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = parse_json(line, origin=f"{file}, line {number},")
            if not isinstance(row, dict):
                raise InputError(f"Expected {file}, line {number}, to be a JSON object, but got {type(row).__name__}.")
            _check_columns(f"{file}, line {number}", row, columns)
            rows.append(row)
    return rows


def _check_columns(origin: str, present: Iterable[str], columns: Sequence[str]) -> None:
    present = list(present)
    if missing := [column for column in columns if column not in present]:
        raise InputError(
            f"Expected {origin} to have the columns {', '.join(columns)}, but {', '.join(missing)} is missing. "
            f"Present: {', '.join(present) or 'none'}."
        )


logger = logging.getLogger(__name__)

FIELDS = ("question", "answer", "id", "task", "choices")
CHOICE_TASK = "local_choice"
HUB_PREFIX, DELIMITERS = "hf:", {".csv": ",", ".tsv": "\t"}
ANSWER, SYNONYM = "answer", "reference"
LISTED = f"question, {ANSWER} (or {SYNONYM}), id, task, choices"
# Fields of pools, whose lines are questions with responses.
OF_POOLS = ("responses", "split", "messages")
CHOICE_LETTERS = "ABCDEFGH"


@dataclass(frozen=True, slots=True)
class QuestionRow:
    """A question as a user wrote it."""

    text: str
    answer: object
    id: str | None
    task: str | None
    origin: str
    number: int

    @property
    def where(self) -> str:
        """Start of an error message about it."""
        return f"{self.origin}: " if self.origin else ""


@dataclass(frozen=True, slots=True)
class Columns:
    """Column names of a data set where they differ from ours.

    Attributes:
        question: The question's text.
        answer: The reference answer.
        choices: The options of a multiple-choice question: a list, or a mapping with "text" and "label".
        id: The question's id; null numbers the rows.
        responses: A list of responses, for `selfcal import-pool`.
        correct: Whether each response is right, for `selfcal import-pool`.
    """

    question: str | None = None
    answer: str | None = None
    choices: str | None = None
    id: str | None = None
    responses: str | None = None
    correct: str | None = None


def read_question_file(
    path: str | Path, *, option: str = "questions", columns: Columns | None = None
) -> list[QuestionRow]:
    """Return the questions of a file, or of a data set on the hub ("hf:NAME:CONFIG:SPLIT")."""
    name = str(path)
    if is_hub_name(name) or columns not in (None, Columns()) or name.endswith(tuple(DELIMITERS)):
        rows = enumerate(read_table(path, option=option), start=1)
        columns = columns or Columns()
        place = "{}, row {}" if name.endswith(tuple(DELIMITERS)) else "{}:{}"  # cells may have several lines
        return _parse(((n, _our_names(row, columns, place.format(name, n))) for n, row in rows), name, place)
    file = check_question_file(path, option=option)
    if file.suffix in JSON_ENDINGS:
        numbered: Iterable[tuple[int, Mapping[str, Any]]] = read_json_lines(file)
    elif file.suffix == PARQUET_ENDING:
        numbered = enumerate(load_file_rows(str(file), ["question"]), start=1)
    else:
        numbered = _text_lines(file)
    return _parse(numbered, name, "{}:{}")


def check_question_file(path: str | Path, *, option: str = "questions") -> Path:
    if not str(path).strip():
        raise InputError(f"Expected `{option}` to be a file of questions, but got an empty name.")
    file = Path(path)
    if not is_hub_name(str(path)) and not file.is_file():
        raise FileNotFoundError(f"Expected `{option}` to be a file, but there is none at {path}.")
    return file


def is_hub_name(name: str) -> bool:
    return name.startswith(HUB_PREFIX)


def read_table(path: str | Path, *, option: str = "path") -> Iterable[dict[str, Any]]:
    if is_hub_name(str(path)):
        return map(dict, load_hub_rows(*_hub_source(str(path), option), []))
    file = check_question_file(path, option=option)
    return _csv_rows(file) if file.suffix in DELIMITERS else load_file_rows(str(file), [])


def _hub_source(name: str, option: str) -> tuple[HubSource, str]:
    place, *rest = name.removeprefix(HUB_PREFIX).split(":")
    if not place or not 1 <= len(rest) <= 2 or not rest[-1]:
        raise InputError(
            f"Expected `{option}` as hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT (hf:openai/gsm8k:main:test), got {name!r}."
        )
    config = rest[0] or None if len(rest) == 2 else None
    return HubSource(place, {rest[-1]: rest[-1]}, config=config), rest[-1]


def _csv_rows(file: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**28)
    with file.open(encoding="utf-8-sig", newline="") as lines:
        try:
            for row in csv.DictReader(lines, delimiter=DELIMITERS[file.suffix], strict=True):
                if None in row or None in row.values():
                    raise InputError(f"Expected {file} to have as many fields in every row as names in its first.")
                yield row
        except (csv.Error, UnicodeDecodeError) as error:
            raise InputError(f"Expected {file} to be a {file.suffix} file in UTF-8, but got: {error}.") from error


def _our_names(row: Mapping[str, Any], columns: Columns, origin: str) -> dict[str, Any]:
    """Return the fields of a row under our names, read as public data sets write them."""
    named = {field: given for field in FIELDS if (given := getattr(columns, field, None)) is not None}
    wanted = {"question": "question", **named}
    if missing := [column for column in wanted.values() if column not in row]:
        present = ", ".join(map(str, row)) or "none"
        way_out = " `--columns.question NAME` names another." if missing == ["question"] else ""
        raise InputError(f"{origin}: Expected the column {', '.join(missing)}, but the columns are {present}.{way_out}")
    found = {field: row[named.get(field, field)] for field in FIELDS if named.get(field, field) in row}
    answer, choices = found.get("answer", row.get(SYNONYM)), found.get("choices")
    if isinstance(choices, str) and choices.startswith("["):
        choices = parse_json(choices, origin=origin)
    if isinstance(choices, Mapping) and {"text", "label"} <= choices.keys():  # ARC, CommonsenseQA
        labels, choices = list(choices["label"]), list(choices["text"])
        answer = CHOICE_LETTERS[labels.index(answer)] if answer in labels[: len(CHOICE_LETTERS)] else answer
    if choices and isinstance(answer, int) and 0 <= answer < min(len(choices), len(CHOICE_LETTERS)):  # MMLU: from 0
        answer = CHOICE_LETTERS[answer]
    if isinstance(answer, str) and "####" in answer:  # GSM8K: after the solution
        answer = answer.rpartition("####")[2].strip()
    found |= {"answer": answer} | ({} if choices is None else {"choices": choices})
    return {name: value for name, value in found.items() if value not in (None, "") or name == "question"}


def parse_questions(rows: Iterable[Mapping[str, Any]]) -> list[QuestionRow]:
    return _parse(enumerate(rows, start=1), "questions", "{}[{}]")


def _parse_question(row: Mapping[str, Any], *, origin: str, number: int) -> QuestionRow:
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
    if (choices := row.get("choices")) is not None:
        text, answer, task = *_multiple_choice(text, answer, choices, origin), task or CHOICE_TASK
    own_id = None if name is None else str(name).strip()
    return QuestionRow(text, answer, own_id, task or None, origin, number)


def _multiple_choice(text: str, answer: object, choices: object, origin: str) -> tuple[str, object]:
    """Return the question with its options written out, and the letter of an answer that is given as text."""
    if not isinstance(choices, list | tuple) or not all(isinstance(one, str) and one.strip() for one in choices):
        raise InputError(f"{origin}: Expected `choices` to be a list of texts, but got {choices!r}.")
    if not 2 <= len(choices) <= len(CHOICE_LETTERS) or len(set(choices)) < len(choices):
        raise InputError(f"{origin}: Expected 2 to {len(CHOICE_LETTERS)} different `choices`, but got {choices!r}.")
    if answer in choices:
        answer = CHOICE_LETTERS[list(choices).index(answer)]
    elif answer is not None and str(answer).strip().upper() not in list(CHOICE_LETTERS[: len(choices)]):
        raise InputError(f"{origin}: Expected `answer` to be one of `choices` or its letter, but got {answer!r}.")
    return write_options(text, choices), answer


def write_options(question: str, options: Sequence[str]) -> str:
    lines = [f"({letter}) {option.strip()}" for letter, option in zip(CHOICE_LETTERS, options, strict=False)]
    return "\n".join([question.strip(), *lines])


def as_text(value: object) -> str:
    """Return an answer as text, whole numbers without a point: a column of numbers with gaps may hold 1999.0."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def given_answer(row: Mapping[str, Any], *, origin: str) -> Any:
    answers = [row[name] for name in (ANSWER, SYNONYM) if row.get(name) is not None]
    if len(answers) > 1 and answers[0] != answers[1]:
        raise InputError(
            f"{origin}: `{ANSWER}` and `{SYNONYM}` mean the same, but got {answers[0]!r} and {answers[1]!r}."
        )
    return answers[0] if answers else None


def check_spelling(row: Mapping[str, Any], origin: str) -> None:
    """Refuse a field that looks like a misspelt one of the format; other fields are the user's own."""
    has_answer = ANSWER in row or SYNONYM in row
    absent = [name for name in FIELDS if name not in row and not (name == ANSWER and has_answer)]
    absent += [] if has_answer else [SYNONYM]
    for name in row:
        known = name in (*FIELDS, SYNONYM, *OF_POOLS)
        if not known and (hint := did_you_mean(str(name).lower(), absent)):
            raise InputError(f"{origin}: Expected the fields {LISTED}, but got {name!r}.{hint}")
    if "question" not in row:
        given = ", ".join(map(str, row)) or "none"
        raise InputError(f"{origin}: Expected the field `question` (of {LISTED}), but got only {given}.")


def _parse(numbered: Iterable[tuple[int, Mapping[str, Any]]], origin: str, place: str) -> list[QuestionRow]:
    """Parse numbered rows; ``place`` is how messages name a row, by the origin and its number."""
    rows, others = [], dict[str, None]()
    for number, row in numbered:
        rows.append(_parse_question(row, origin=place.format(origin, number), number=number))
        others |= dict.fromkeys(str(name) for name in row if name not in (*FIELDS, SYNONYM, *OF_POOLS))
    if not rows:
        raise InputError(f"Expected {origin} to hold at least one question, but got none.")
    if others:
        logger.warning("The fields %s of %s are not read; those that are: %s.", ", ".join(others), origin, LISTED)
    return rows


def _text_lines(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {file} to be text in UTF-8, but got: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith('{"'):
            expected = f"a question in plain text (JSON lines need the ending {' or '.join(JSON_ENDINGS)})"
            raise line_error(file, number, expected, line)
        if "\0" in line or _is_json(line):
            raise line_error(file, number, "a question in plain text", repr(line))
        if line.strip():
            yield number, {"question": line.strip()}


def _is_json(line: str) -> bool:
    """Return whether a line is a JSON number, list or null, so that the file is damaged or misnamed."""
    try:
        return not isinstance(parse_json(line, origin="the line"), str)
    except UnreadableJSONError:
        return False
