"""Questions that a user asks: one text, a file or a list of them, put into the form of a task's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.model_files.locations import is_bundled
from selfcal_lightning.records import Message, Question, duplicate_ids
from selfcal_lightning.tasks.dataset import DatasetTask
from selfcal_lightning.tasks.question_rows import QuestionRow, parse_questions, read_question_file
from selfcal_lightning.tasks.registry import get_task

Questions = str | Path | Sequence[Mapping[str, Any]] | Sequence[Question]


def default_task(model: str) -> str:
    """Return the task that questions have where none is named.

    Example:
        >>> default_task("bundled"), default_task("Qwen/Qwen2.5-7B-Instruct")
        ('word_problems', 'local_number')
    """
    return "word_problems" if is_bundled(model) else "local_number"


def ask_question(
    text: str,
    *,
    task: str,
    question_id: str = "question",
    reference: object = None,
    chain_of_thought: bool = True,
) -> Question:
    """Return ``text`` as a question of ``task``: its prompt, its way to read answers, its form of the reference.

    Raises:
        ValueError: If the text is empty, the task unknown, or the reference no answer of the task's type.

    Example:
        >>> question = ask_question("What is 2+2?", task="local_number", reference="4.0")
        >>> question.messages[-1].content, question.reference
        ('Question: What is 2+2?', '4')
    """
    if not text.strip():
        raise InputError(f"Expected `question` to hold text, but got {text!r}.")
    row = QuestionRow(text, reference, question_id, task, "", 1)
    return put_question(row, task=task, question_id=question_id, chain_of_thought=chain_of_thought)


def put_question(row: QuestionRow, *, task: str, question_id: str, chain_of_thought: bool = True) -> Question:
    """Return a row as a question of the task that it names, or else of ``task``.

    Raises:
        InputError: The task is unknown, has no prompt without reasoning, or the answer is not of its type.
    """
    try:
        reader = get_task(row.task or task)
    except InputError as error:
        raise InputError(f"{row.where}{error}") from error
    if isinstance(reader, DatasetTask):
        return reader.ask(row, question_id=question_id, chain_of_thought=chain_of_thought)
    if not chain_of_thought:
        raise InputError(f"Expected `chain_of_thought` to be true for task {reader.name!r}, which has no other prompt.")
    gold = None if row.answer is None else reader.extract(str(row.answer))
    if row.answer is not None and gold is None:
        raise InputError(
            f"{row.where}Expected `answer` to be an answer of task {reader.name!r} ({reader.answer_type}), but got "
            f"{row.answer!r}."
        )
    return Question(question_id, reader.name, (Message("user", row.text),), gold, row.text)


def read_questions(source: Questions, *, task: str, chain_of_thought: bool = True) -> list[Question]:
    """Return the questions of a file or a list, in the one format (``tasks.question_rows``); ids default to ``line-N``.

    Args:
        source: A file, mappings with the fields of its lines, or questions, which are taken as they are.
        task: Task of the questions that name none.
        chain_of_thought: Whether the prompt asks for reasoning before the answer.

    Raises:
        FileNotFoundError: If there is no such file.
        InputError: If it holds no question, or a row is not as described, with file and line.
    """
    if isinstance(source, str | Path):
        rows = read_question_file(source)
    elif all(isinstance(one, Question) for one in source) and source:
        return _unique([one for one in source if isinstance(one, Question)], "`questions`")
    else:
        rows = parse_questions([one for one in source if not isinstance(one, Question)])
        if len(rows) < len(source):
            raise InputError("Expected `questions` to be mappings or Question records, but got both in one list.")
    questions = [
        put_question(row, task=task, question_id=row.id or f"line-{row.number}", chain_of_thought=chain_of_thought)
        for row in rows
    ]
    return _unique(questions, str(source) if isinstance(source, str | Path) else "`questions`")


def _unique(questions: list[Question], origin: str) -> list[Question]:
    if repeated := duplicate_ids(questions):
        raise InputError(f"Expected the ids in {origin} to be unique, but got {repeated[0]!r} again.")
    return questions
