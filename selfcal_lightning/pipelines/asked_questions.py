"""Questions that a user asks: one text, or a file of them, put into the form of a task's prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.pipelines.foreign import line_error, read_json_lines
from selfcal_lightning.records import Message, Question, duplicate_ids
from selfcal_lightning.tasks.dataset import DatasetTask, write_messages
from selfcal_lightning.tasks.registry import get_task

KEYS = ("id", "question", "reference", "task")
JSON_ENDINGS = (".jsonl", ".ndjson")


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
    reader = get_task(task)
    if isinstance(reader, DatasetTask):
        answers = reader.dataset.answers
        messages = write_messages(text, answers.hint, chain_of_thought=chain_of_thought)
        gold = None if reference is None else answers.canonical(reference)
    else:
        if not chain_of_thought:
            raise InputError(f"Expected `chain_of_thought` to be true for task {task!r}, which has no other prompt.")
        messages = (Message("user", text),)
        gold = None if reference is None else reader.extract(str(reference))
    if reference is not None and gold is None:
        raise InputError(
            f"Expected `reference` to be an answer of task {task!r} ({reader.answer_type}), but got {reference!r}."
        )
    return Question(question_id, task, messages, gold, text)


def read_questions(path: str | Path, *, task: str, chain_of_thought: bool = True) -> list[Question]:
    """Read a file of questions: JSON lines where its name ends in .jsonl or .ndjson, else one question a line.

    A JSON line is ``{"question", "id"?, "reference"?, "task"?}``; ids default to ``line-N``. Empty lines of a text file
    are skipped.

    Args:
        path: The file.
        task: Task of the questions that name none.
        chain_of_thought: Whether the prompt asks for reasoning before the answer.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it holds no question, or a line is not as described, with file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"Expected `questions` to be a file, but there is none at {path}.")
    lines = _json_lines(file) if file.suffix in JSON_ENDINGS else _text_lines(file)
    questions = []
    for number, line in lines:
        try:
            question = ask_question(
                line["question"],
                task=line.get("task") or task,
                question_id=line.get("id") or f"line-{number}",
                reference=line.get("reference"),
                chain_of_thought=chain_of_thought,
            )
        except ValueError as error:
            raise InputError(f"{file}:{number}: {error}") from error
        questions.append(question)
    if not questions:
        raise InputError(f"Expected {file} to hold at least one question, but got none.")
    if repeated := duplicate_ids(questions):
        raise InputError(f"Expected the ids in {file} to be unique, but got {repeated[0]!r} again.")
    return questions


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in read_json_lines(file):
        if unknown := sorted(line.keys() - set(KEYS)):
            raise line_error(file, number, f"only the fields {', '.join(KEYS)}", repr(unknown))
        for name in ("question", "id", "task"):
            value = line.get(name)
            if not (isinstance(value, str) or (value is None and name != "question")):
                raise line_error(file, number, f"`{name}` to be text", repr(value))
        yield number, line


def _text_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"Expected {file} to be text in UTF-8, but got: {error}.") from error
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith('{"'):
            expected = f"a question in plain text (JSON lines belong into a file ending in {' or '.join(JSON_ENDINGS)})"
            raise line_error(file, number, expected, line)
        if line.strip():
            yield number, {"question": line.strip()}
