"""The files of llm-calibration, `sampled.jsonl` (a response a line) and `ground_truth.jsonl` (a question a line)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from selfcal_lightning.pools.line_format import PoolLine
from selfcal_lightning.records import Message, Question, QuestionSamples
from selfcal_lightning.runtime.json_files import line_error, read_json_lines
from selfcal_lightning.tasks.judging import is_failed

SAMPLED, GROUND_TRUTH = "sampled.jsonl", "ground_truth.jsonl"
SAMPLED_KEYS = (
    "example_id", "sampled_id", "prompt_tokens", "completion_tokens", "prompt", "response", "parsed_response",
    "ground_truth_answer", "correctness",
)  # fmt: skip
TRUTH_KEYS = (
    "example_id", "total_prompt_tokens", "total_completion_tokens", "ground_truth_answer", "num_samples",
    "num_correct", "expected_accuracy", "question",
)  # fmt: skip


@dataclass
class SampledPool:
    """What the two files hold.

    Attributes:
        lines: Questions with their responses, in the order in which they first occur.
        dropped: Rows that are left out, by reason.
        overruled: Rows without an answer that were called right; they count as wrong.
        differing: Questions of which the second file counts other responses, or other right ones, than the first has.
        without_responses: Questions of the second file of which the first has no response.
    """

    lines: list[PoolLine]
    dropped: Counter[str] = field(default_factory=Counter)
    overruled: int = 0
    differing: int = 0
    without_responses: int = 0


def find_sampled(path: str | Path) -> Path | None:
    """Return the file of responses where ``path`` is one, or a folder that holds one; else None."""
    place = Path(path)
    if place.is_dir():
        return place / SAMPLED if (place / SAMPLED).is_file() else None
    first = next((line for _, line in read_json_lines(place)), {}) if place.suffix == ".jsonl" else {}
    return place if {"example_id", "response"} <= first.keys() else None


def read_sampled(path: Path, *, task: str, split: str, stated: bool = True) -> SampledPool:
    """Read the responses and, where it lies beside them, the file of questions.

    A question is told by its whole id. Rows whose response is no text, and those whose id and number occurred before,
    are left out and counted; others are numbered anew, from 0, in the order of their own numbers.

    Args:
        path: The file of responses.
        task: Task of the questions.
        split: Split of the questions.
        stated: Whether answers and verdicts are those that the file states; else they are left to be read anew.

    Raises:
        InputError: A row is not as described, with file and line.
    """
    truths = _read_truths(path.with_name(GROUND_TRUTH))
    pool = SampledPool([])
    found: dict[str, dict[object, dict[str, Any]]] = {}
    questions: dict[str, Question] = {}
    for number, row in read_json_lines(path):
        name = _id(path, number, row)
        if not isinstance(row.get("response"), str):
            pool.dropped["without a response"] += 1
            continue
        given = found.setdefault(name, {})
        own = row.get("sampled_id", len(given))
        if own in given:
            pool.dropped["of a number that occurred before"] += 1
            continue
        given[own] = _response(path, number, row, pool, stated=stated)
        if name not in questions:
            questions[name] = _question(path, number, row, truths.get(name, {}), task)
    pool.lines = [
        PoolLine(questions[name], split, [given[own] for own in sorted(given, key=_order)])
        for name, given in found.items()
        if name in questions
    ]
    pool.without_responses = len(truths.keys() - questions.keys())
    pool.differing = sum(_differs(truths[name], found[name]) for name in questions if name in truths) if stated else 0
    return pool


def sampled_rows(group: QuestionSamples) -> Iterator[dict[str, Any]]:
    """Yield the rows of a question's responses; those that the engine could not give are left out."""
    prompt = [asdict(message) for message in group.question.messages]
    tokens = None if group.prompt_ids is None else len(group.prompt_ids)
    for sample in group.samples:
        if not is_failed(sample):
            values = (
                group.question.id, sample.index, tokens, sample.num_tokens, prompt, sample.text, sample.answer,
                group.question.reference, int(bool(sample.correct)),
            )  # fmt: skip
            yield dict(zip(SAMPLED_KEYS, values, strict=True))


def truth_row(group: QuestionSamples) -> dict[str, Any]:
    """Return the row of a question."""
    rows = list(sampled_rows(group))
    right = sum(row["correctness"] for row in rows)
    lengths = [[row[name] for row in rows] for name in ("prompt_tokens", "completion_tokens")]
    totals = [None if None in column else sum(column) for column in lengths]
    question = group.question
    values = (question.id, *totals, question.reference, len(rows), right, right / len(rows), question.text)
    return dict(zip(TRUTH_KEYS, values, strict=True))


def _read_truths(path: Path) -> dict[str, dict[str, Any]]:
    rows = read_json_lines(path) if path.is_file() else ()
    return {_id(path, number, row): row for number, row in rows}


def _id(path: Path, number: int, row: Mapping[str, Any]) -> str:
    name = row.get("example_id")
    if isinstance(name, bool) or not isinstance(name, str | int) or not str(name).strip():
        raise line_error(path, number, "`example_id` to be text or a whole number", repr(name))
    return str(name)


def _response(path: Path, number: int, row: Mapping[str, Any], pool: SampledPool, *, stated: bool) -> dict[str, Any]:
    """Return a response as a line of a pool has it."""
    tokens = row.get("completion_tokens")
    response: dict[str, Any] = {"text": row["response"]}
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
        response["tokens"] = tokens
    if not stated:
        return response
    correct = row.get("correctness")
    if correct not in (0, 1, None):
        raise line_error(path, number, "`correctness` to be 0, 1 or null", repr(correct))
    answer = _text(row.get("parsed_response"))
    if answer is None and correct:
        pool.overruled += 1
    right = None if correct is None else bool(correct) and answer is not None
    return {**response, "answer": answer, "correct": right}


def _question(path: Path, number: int, row: Mapping[str, Any], truth: Mapping[str, Any], task: str) -> Question:
    prompt = row.get("prompt")
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(turns, list) or not all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    ):
        raise line_error(path, number, "`prompt` to be text or a list of {role, content}", repr(prompt))
    messages = tuple(Message(turn["role"], turn["content"]) for turn in turns)
    text = truth.get("question")
    asked = text if isinstance(text, str) else next((m.content for m in reversed(messages) if m.role == "user"), "")
    return Question(_id(path, number, row), task, messages, _text(row.get("ground_truth_answer")), asked)


def _text(value: object) -> str | None:
    """Return an answer as text: a whole number without a point, no answer as None.

    Example:
        >>> _text(18.0), _text("B"), _text(" "), _text(None)
        ('18', 'B', None, None)
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None else str(value)
    return text if text.strip() else None


def _order(own: object) -> tuple[int, int, str]:
    """Return what rows of a question are sorted by: the number in which their own id ends, else the id."""
    text = str(own)
    digits = text[len(text.rstrip("0123456789")) :]
    return (0, int(digits), text) if digits else (1, 0, text)


def _differs(truth: Mapping[str, Any], given: Mapping[object, Mapping[str, Any]]) -> bool:
    right = sum(bool(response["correct"]) for response in given.values())
    return (truth.get("num_samples"), truth.get("num_correct")) != (len(given), right)
