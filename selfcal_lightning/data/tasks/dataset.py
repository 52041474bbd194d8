"""Data sets as tasks: the prompt, and questions with stable ids."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from selfcal_lightning.core.errors import InputError, check_at_least, did_you_mean
from selfcal_lightning.data.tasks import rows
from selfcal_lightning.data.tasks.answer_types import Answers, FreeTextAnswers, ShortTextAnswers
from selfcal_lightning.data.tasks.base import AnswerType, VerifierForm, verifier_form
from selfcal_lightning.data.tasks.extraction import LETTERS
from selfcal_lightning.records import Message, Question, duplicate_ids

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Item:
    """What a row asks and its gold answer, before the prompt and the canonical form."""

    body: str
    gold: Any


class UnusableRowError(InputError):
    """A row without a usable label or text; such rows are counted and reported."""


class DataSet(Protocol):
    """What `DatasetTask` needs to know of a data set: a `DatasetSpec`, or a class of a plug-in.

    Optional attributes: ``verifier`` allows `selfcal verify`; ``repeated_rows`` keeps the first row of each id;
    ``question_rows`` says that files have the format of users' questions, in which a bad row is an error.
    """

    name: str
    answers: Answers
    source: rows.HubSource | rows.JoinedSource | rows.FileSource | None
    columns: tuple[str, ...]
    id_column: str | None

    def read_row(self, row: rows.Row, question_id: str, /) -> Item:
        """Return the question text and gold answer of a row, or raise `UnusableRowError` with the reason."""


@dataclass
class DatasetSpec:
    """A data set as a row of a table; without ``read`` the first two columns are the question and its answer."""

    name: str
    answers: Answers
    source: rows.HubSource | rows.JoinedSource | rows.FileSource | None
    columns: tuple[str, ...]
    id_column: str | None = None
    read: Callable[[rows.Row, str], Item] | None = None
    verifier: VerifierForm | None = None
    repeated_rows: bool = False

    def read_row(self, row: rows.Row, question_id: str, /) -> Item:
        return self.read(row, question_id) if self.read else Item(row[self.columns[0]], row[self.columns[1]])


class LocalQuestions(DatasetSpec):
    """Users' own questions: a file in one format, see ``rows``; short texts may have a list of aliases as answer."""

    question_rows = True

    def __init__(self, name: str, answers: Answers, *, verifier: VerifierForm | None = None) -> None:
        super().__init__(name, answers, None, ("question", "answer"), id_column="id", verifier=verifier)
        # How free texts are compared with the reference; `selfcal verify` asks a model instead.
        modes: dict[type, str] = {FreeTextAnswers: "contains", ShortTextAnswers: "exact"}
        self.verify_mode = modes.get(type(answers))


def has_question_rows(dataset: DataSet) -> bool:
    return getattr(dataset, "question_rows", False)


# Writes the chat for the text of a question, a hint at the form of its answer, and ``chain_of_thought`` by keyword.
WriteMessages = Callable[..., tuple[Message, ...]]


class DatasetTask:
    """A data set as a task."""

    def __init__(self, dataset: DataSet, *, prompt: WriteMessages | None = None) -> None:
        self.dataset = dataset
        self.prompt = prompt or write_messages
        self.name = dataset.name
        self.answer_type: AnswerType = dataset.answers.answer_type
        self.verifier: VerifierForm | None = verifier_form(dataset)

    def load(
        self, split: str, *, path: str | None = None, chain_of_thought: bool = True, limit: int | None = None
    ) -> list[Question]:
        """Return the first ``limit`` usable questions of a split, from the hub or from the local file ``path``."""
        check_at_least(0, limit=limit)
        if has_question_rows(self.dataset):
            return self._own_questions(split, path, chain_of_thought=chain_of_thought)[:limit]
        origin, found = self._rows(split, path)
        questions: list[Question] = []
        unusable: Counter[str] = Counter()
        num_read, seen = 0, set[str]()
        for index, row in enumerate(found):
            if limit is not None and len(questions) >= limit:
                break
            try:
                name = self._question_id(row, split, index)
                if getattr(self.dataset, "repeated_rows", False) and name in seen:
                    continue
                num_read += 1
                questions.append(self._question(row, name, chain_of_thought))
                seen.add(name)
            except UnusableRowError as error:
                unusable[str(error)] += 1
        if unusable:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in unusable.most_common())
            logger.warning("%d of %d rows of %s cannot be used (%s).", unusable.total(), num_read, origin, reasons)
        if not questions and limit != 0:
            raise InputError(f"Expected split {split!r} of {self.name} to hold questions, but {origin} has none.")
        self._check_ids(questions, origin)
        return questions

    def ask(self, row: rows.QuestionRow, *, question_id: str, chain_of_thought: bool = True) -> Question:
        answers, given = self.dataset.answers, row.answer
        if isinstance(given, list | tuple) and self.answer_type != "short text":  # is compared with one answer
            read = {*answers.group([answers.canonical(one) for one in given])} - {None}
            given = read.pop() if len(read) == 1 else None
        reference = answers.canonical(given)
        if reference is None and row.answer is not None:
            raise InputError(
                f"{row.where}Expected `answer` to be an answer of task {self.name!r} ({self.answer_type}), but got "
                f"{row.answer!r}. Name another task by `--task` or in the field `task` of the question, such as "
                "local_number, local_choice, local_expression or local_text."
            )
        messages = self.prompt(row.text, answers.hint, chain_of_thought=chain_of_thought)
        return Question(question_id, self.name, messages, reference, row.text)

    def check_source(self, split: str, *, path: str | None = None) -> None:
        source = self.dataset.source
        if path is not None:
            if has_question_rows(self.dataset):
                rows.check_question_file(path, option="path")
            else:
                rows.check_file(path)
        elif source is None:
            raise InputError(
                f"Expected `path` to name a local file for task {self.name!r}, but got None. It holds JSON lines or "
                f"Parquet with the columns {', '.join(self.dataset.columns)}."
            )
        elif split not in source.splits:
            raise InputError(
                f"Expected `split` of {self.name} to be one of {', '.join(source.splits)}, but got {split!r}."
                f"{did_you_mean(split, source.splits)} Other splits lack labels; pass your own rows by `path`."
            )

    def is_remote(self, *, path: str | None = None) -> bool:
        return path is None and isinstance(self.dataset.source, rows.HubSource | rows.JoinedSource)

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        return self.dataset.answers.extract(text, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        return self.dataset.answers.verify(answer, reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        return self.dataset.answers.group(answers)

    def _rows(self, split: str, path: str | None) -> tuple[str, Iterable[rows.Row]]:
        self.check_source(split, path=path)
        source, columns = self.dataset.source, self.dataset.columns
        if path is None and isinstance(source, rows.HubSource):
            return source.describe(split), rows.load_hub_rows(source, split, columns)
        if path is None and isinstance(source, rows.JoinedSource):
            return source.splits[split], rows.load_joined_rows(source, split, columns, id_column=self.dataset.id_column)
        if path is None and isinstance(source, rows.FileSource):
            path = source.splits[split]
        return f"the file {path}", rows.load_file_rows(str(path), columns)

    def _own_questions(self, split: str, path: str | None, *, chain_of_thought: bool) -> list[Question]:
        self.check_source(split, path=path)
        written = rows.read_question_file(str(path), option="path")
        mine = [(index, row) for index, row in enumerate(written) if row.task in (None, self.name)]
        if not mine:
            others = ", ".join(dict.fromkeys(row.task or "" for row in written))
            raise InputError(f"Expected {path} to hold questions of task {self.name!r}, but all are of {others}.")
        named = ((f"{self.name}/{split}/{row.id or f'{index:06d}'}", row) for index, row in mine)
        questions = [self.ask(row, question_id=name, chain_of_thought=chain_of_thought) for name, row in named]
        self._check_ids(questions, f"the file {path}")
        return questions

    def _check_ids(self, questions: Sequence[Question], origin: str) -> None:
        if repeated := duplicate_ids(questions):
            raise InputError(
                f"Expected question ids to be unique, but in {origin} {len(repeated)} occur more than once, "
                f"the first of them {repeated[0]!r}. Give every row its own `{self.dataset.id_column}`."
            )

    def _question_id(self, row: rows.Row, split: str, index: int) -> str:
        column = self.dataset.id_column
        if column is None or column not in row:
            return f"{self.name}/{split}/{index:06d}"
        if row[column] is None or str(row[column]).strip() == "":
            raise UnusableRowError(f"no {column}")
        return f"{self.name}/{split}/{str(row[column]).strip()}"

    def _question(self, row: rows.Row, question_id: str, chain_of_thought: bool) -> Question:
        for column in self.dataset.columns:
            if row[column] is None:
                raise UnusableRowError(f"no {column}")
        try:
            item = self.dataset.read_row(row, question_id)
            has_text = item.body.strip() != ""
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # a field of another type
            raise UnusableRowError(f"a field that cannot be read, {error}") from error
        answers = self.dataset.answers
        reference = answers.canonical(item.gold)
        if reference is None:
            raise UnusableRowError("no valid label")
        if not has_text:
            raise UnusableRowError("no text")
        messages = self.prompt(item.body, answers.hint, chain_of_thought=chain_of_thought)
        return Question(question_id, self.name, messages, reference, item.body)


def write_messages(body: str, hint: str, *, chain_of_thought: bool) -> tuple[Message, ...]:
    """Return the chat that asks a question in the layout "Explanation:" / "Answer:", or "Answer:" alone."""
    if chain_of_thought:
        system = (
            "Work the question out before you commit to an answer. Write two fields and nothing else.\n"
            f"Explanation: your reasoning, one step after the other.\nAnswer: {hint}."
        )
    else:
        system = f"Give no reasoning. Write one field and nothing else.\nAnswer: {hint}."
    return Message("system", system), Message("user", f"Question: {body}")


def bare_question(body: str, hint: str, *, chain_of_thought: bool) -> tuple[Message, ...]:
    """Return the question alone as the user's turn: no system text, no layout."""
    del hint, chain_of_thought
    return (Message("user", body),)


def write_options(question: str, options: Sequence[str]) -> str:
    if not 2 <= len(options) <= len(LETTERS):
        raise UnusableRowError(f"{len(options)} options")
    return rows.write_options(question, options)
