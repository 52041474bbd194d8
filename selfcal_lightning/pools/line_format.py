"""The lines of a pool: responses to questions as JSON, one question a line.

A pool holds one question a line::

    {"id", "task", "question", "reference", "responses": [{"text", "answer"?, "correct"?, "confidence"?, "tokens"?}]}

``reference`` (or ``answer``, text or number) is null where unknown. A response's ``confidence`` maps names to numbers,
of which "yes_mass", "no_mass" and "logprob" are the columns of that name, and "p_true" follows from the masses where
these are given. ``tokens`` is the length of the response or the list of its token ids. ``split`` and ``messages`` of a
question and ``finish`` of a response may be given too, and are written on export. Other keys are an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.records import UNSTATED, Message, Question, QuestionSamples, RecordedResponse
from selfcal_lightning.runtime.files import as_json_line
from selfcal_lightning.runtime.json_files import line_error, read_json_lines
from selfcal_lightning.store.sample_store import StoredRow
from selfcal_lightning.tasks.base import Task
from selfcal_lightning.tasks.judging import judge
from selfcal_lightning.tasks.question_rows import ANSWER, SYNONYM, check_spelling, given_answer

QUESTION_KEYS = {"id", "task", "question", "reference", "responses", "split", "messages"}
RESPONSE_KEYS = {"text", "answer", "correct", "confidence", "tokens", "finish"}
COLUMNS = ("yes_mass", "no_mass", "logprob")
PROBABILITIES = ("p_true", "yes_mass", "no_mass")
NUM_TOKENS = "num_tokens"
LARGEST = 1e300
WRITTEN_KEYS = ("id", "task", "split", "question", "messages", "reference", "responses")
LONGEST_LINE = 2**28  # bytes; what is longer is no line of a pool


@dataclass(frozen=True, slots=True)
class PoolLine:
    """One line of a pool, checked but not judged: ``responses`` are as in the file."""

    question: Question
    split: str
    responses: list[dict[str, Any]]


def read_pool(
    path: Path, *, task: str | None, split: str | None, default_split: str | None = None
) -> Iterator[tuple[int, PoolLine]]:
    """Yield (line number, line) for every line of a pool.

    Args:
        path: The pool.
        task: Task of all questions; None takes the field ``task`` of every line.
        split: Split of all questions; None takes the field ``split`` of every line.
        default_split: Split of the questions whose line has no field ``split``; None requires it.

    Raises:
        ValueError: A line is not as described, with file and line.
    """
    assumed = {} if default_split is None else {"split": default_split}
    for number, line in read_json_lines(path):
        given = {name: value for name, value in (("task", task), ("split", split)) if value is not None}
        yield number, _parse_line(path, number, {**assumed, **line, **given})


def _parse_line(path: Path, number: int, line: dict[str, Any]) -> PoolLine:
    line = _with_reference(line, origin=f"{path}:{number}")
    missing = sorted({"id", "task", "question", "reference", "responses", "split"} - line.keys())
    if missing:
        hint = " (or the argument of that name)" if {*missing} & {"task", "split"} else ""
        raise line_error(path, number, f"the fields {', '.join(missing)}{hint}", f"only {', '.join(sorted(line))}")
    _check_keys(path, number, line, QUESTION_KEYS)
    for name in ("id", "task", "question", "split"):
        _check(path, number, f"`{name}` to be text", line[name], isinstance(line[name], str))
    reference, responses = line["reference"], line["responses"]
    _check(path, number, "`reference` to be text or null", reference, reference is None or isinstance(reference, str))
    _check(path, number, "`responses` to be a list", responses, isinstance(responses, list))
    messages = line.get("messages", [{"role": "user", "content": line["question"]}])
    well_formed = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    _check(path, number, "`messages` to be a list of {role, content}", messages, well_formed)
    for response in responses:
        _check_response(path, number, response)
    chat = tuple(Message(message["role"], message["content"]) for message in messages)
    question = Question(line["id"], line["task"], chat, reference, line["question"])
    return PoolLine(question, line["split"], responses)


def _with_reference(line: dict[str, Any], *, origin: str) -> dict[str, Any]:
    """Return the line with its answer as text in ``reference``, whichever of its two names and types it has."""
    check_spelling(line, origin)
    if ANSWER not in line and SYNONYM not in line:
        return line
    found = given_answer(line, origin=origin)
    if isinstance(found, int | float) and not isinstance(found, bool):
        found = str(int(found)) if float(found).is_integer() else repr(found)
    return {**{name: value for name, value in line.items() if name != ANSWER}, SYNONYM: found}


def _check_response(path: Path, number: int, response: Any) -> None:
    _check(path, number, "a response to be an object", response, isinstance(response, dict))
    _check_keys(path, number, response, RESPONSE_KEYS)
    text, answer, correct = response.get("text"), response.get("answer"), response.get("correct")
    _check(path, number, "`text` of a response to be text", text, isinstance(text, str))
    _check(path, number, "`answer` to be text or null", answer, answer is None or isinstance(answer, str))
    _check(path, number, "`correct` to be true, false or null", correct, correct is None or isinstance(correct, bool))
    unreadable = "answer" in response and answer is None
    _check(path, number, "an unreadable answer not to be correct", response, not (unreadable and correct))
    finish, tokens = response.get("finish"), response.get("tokens")
    _check(path, number, '`finish` to be "stop", "length" or null', finish, finish in ("stop", "length", None))
    whole = [tokens] if _is_whole(tokens) else tokens
    listed = tokens is None or (isinstance(whole, list) and all(_is_whole(token) for token in whole))
    _check(path, number, "`tokens` to be a number of tokens or a list of ids", tokens, listed)
    confidence = response.get("confidence", {})
    _check(path, number, "`confidence` to map names to numbers", confidence, isinstance(confidence, dict))
    _check(path, number, "the length of a response in `tokens`", NUM_TOKENS, NUM_TOKENS not in confidence)
    for name, value in confidence.items():
        number_like = isinstance(value, int | float) and not isinstance(value, bool)
        finite = value is None or (number_like and abs(value) < LARGEST)
        _check(path, number, f"confidence `{name}` to be a finite number or null", value, finite)
        if name in PROBABILITIES and value is not None:
            _check(path, number, f"confidence `{name}` to lie in [0, 1]", value, 0.0 <= value <= 1.0)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def recorded_response(response: Mapping[str, Any]) -> RecordedResponse:
    """Return a response of a checked line; what the line does not give is unstated."""
    confidence = {name: float(value) for name, value in response.get("confidence", {}).items() if value is not None}
    columns = {name: confidence.pop(name, None) for name in COLUMNS}
    if columns["yes_mass"] is not None and columns["no_mass"] is not None:
        confidence.pop("p_true", None)
    tokens = response.get("tokens")
    return RecordedResponse(
        text=response["text"],
        token_ids=tuple(tokens) if isinstance(tokens, list) else None,
        finish=response.get("finish"),
        answer=response.get("answer", UNSTATED),
        correct=response.get("correct", UNSTATED),
        confidences=confidence,
        num_tokens=tokens if isinstance(tokens, int) else None,
        **columns,
    )


def judge_line(line: PoolLine, task: Task) -> QuestionSamples:
    """Return the samples of a line; what is not given is read out of the text and verified."""
    samples = judge(line.question, [recorded_response(response) for response in line.responses], task)
    return QuestionSamples(line.question, samples, line.split)


def pool_line(rows: Sequence[StoredRow], *, token_ids: bool) -> dict[str, Any]:
    """Return a question with its responses as an object of a pool."""
    question = rows[0].question
    responses = []
    for row in rows:
        sample = row.sample
        numbers = {"p_true": sample.p_true, **{name: getattr(sample, name) for name in COLUMNS}, **sample.confidences}
        response = {
            "text": sample.text,
            "answer": sample.answer,
            "correct": sample.correct,
            "confidence": {name: value for name, value in numbers.items() if value is not None},
            "finish": sample.finish,
        }
        tokens = list(sample.token_ids) if token_ids and sample.token_ids is not None else sample.num_tokens
        responses.append(response if tokens is None else {**response, "tokens": tokens})
    return {
        "id": question.id,
        "task": question.task,
        "split": rows[0].split,
        "question": question.text,
        "messages": [asdict(message) for message in question.messages],
        "reference": question.reference,
        "responses": responses,
    }


def is_written_pool(path: Path) -> bool:
    """Return whether a file begins with a line as ``pool_line`` makes it and this project writes it.

    Pools from elsewhere have other fields, or another order or spelling of them.
    """
    with open(path, "rb") as file:
        line = file.readline(LONGEST_LINE)
    try:
        content = json.loads(line)
        is_as_written = line == as_json_line(content).encode()
    except (ValueError, RecursionError):
        return False
    return is_as_written and isinstance(content, dict) and tuple(content) == WRITTEN_KEYS


def _check(path: Path, number: int, expected: str, found: object, is_met: bool) -> None:
    if not is_met:
        raise line_error(path, number, expected, repr(found))


def _check_keys(path: Path, number: int, found: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(found.keys() - known)
    _check(path, number, f"only the fields {', '.join(sorted(known))}", unknown, not unknown)
