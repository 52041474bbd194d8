"""The lines of a pool, one question with its responses per line.

Format of a line::

    {"id", "task", "question", "reference", "responses": [{"text", "answer"?, "correct"?, "confidence"?, "tokens"?}]}

``reference`` (or ``answer``, text or number) is null where unknown. A response's ``confidence`` maps names to numbers;
"yes_mass", "no_mass" and "logprob" become the columns of that name, and "p_true" follows from the masses if both are
given. ``tokens`` is the length of the response or its token ids. ``split`` and ``messages`` of a question and
``finish`` of a response are optional, and are written on export. Other keys are an error.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from selfcal_lightning import records
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import as_json_line, line_error, read_json_lines
from selfcal_lightning.data.store.manifest import StoreFingerprint, read_round, round_file
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.dataset import DatasetTask
from selfcal_lightning.data.tasks.judging import judge
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import ANSWER, SYNONYM, as_text, check_spelling, given_answer


def open_imported(
    store_dir: str | Path, source: Path, settings: Mapping[str, Any], *, digest: str | None = None
) -> SampleStore:
    """Open the store for what is imported from ``source``, identified by ``digest`` (by default the file's sha256)."""
    if digest is None:
        with open(source, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    first = round_file(Path(store_dir), 0)
    known = read_round(first).fingerprint.prompt.further.get("source_sha256") if first.exists() else None
    if known not in (None, digest):
        raise InputError(
            f"Expected {store_dir} to hold responses of {source}, but got those of another file, or of this one before "
            "it changed, or with other options. Use another `store_dir`, or delete the folder."
        )
    prompt = records.PromptIdentity.from_json({"source_sha256": digest, **settings})
    fingerprint = StoreFingerprint(records.ModelIdentity(records.IMPORTED), prompt, sampling=None, seed=0)
    engine = {"engine": "imported", "source": str(source)}
    return SampleStore.create_or_open(store_dir, fingerprint, num_samples=None, engine=engine)


def count_lines(path: Path) -> int:
    """Return the number of lines of a file, empty ones included, without decoding them."""
    with open(path, "rb") as file:
        return sum(1 for _ in file)


QUESTION_KEYS = {"id", "task", "question", "reference", "responses", "split", "messages"}
RESPONSE_KEYS = {"text", "answer", "correct", "confidence", "tokens", "finish"}
COLUMNS = ("yes_mass", "no_mass", "logprob")
PROBABILITIES = ("p_true", "yes_mass", "no_mass")
NUM_TOKENS = "num_tokens"
LARGEST = 1e300
WRITTEN_KEYS = ("id", "task", "split", "question", "messages", "reference", "responses")
LONGEST_LINE = 2**28  # bytes


@dataclass(frozen=True, slots=True)
class PoolLine:
    """One line of a pool, checked but not verified: ``responses`` are as in the file."""

    question: records.Question
    split: str
    responses: list[dict[str, Any]]


def _parse_line(path: Path, number: int, line: dict[str, Any]) -> PoolLine:
    check_spelling(line, f"{path}:{number}")
    if ANSWER in line or SYNONYM in line:
        found = given_answer(line, origin=f"{path}:{number}")
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        line = {name: value for name, value in line.items() if name != ANSWER}
        line[SYNONYM] = as_text(found) if is_number else found
    if missing := sorted(QUESTION_KEYS - {"messages"} - line.keys()):
        hint = " (or the argument of that name)" if {*missing} & {"task", "split"} else ""
        raise line_error(path, number, f"the fields {', '.join(missing)}{hint}", f"only {', '.join(sorted(line))}")
    _check_keys(path, number, line, QUESTION_KEYS)
    for name in ("id", "task", "question", "split"):
        check_line(path, number, f"`{name}` to be text", line[name], isinstance(line[name], str))
    reference, responses = line["reference"], line["responses"]
    check_line(path, number, "`reference` to be text or null", reference, isinstance(reference, str | None))
    check_line(path, number, "`responses` to be a list", responses, isinstance(responses, list))
    messages = line.get("messages", [{"role": "user", "content": line["question"]}])
    well_formed = isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    check_line(path, number, "`messages` to be a list of {role, content}", messages, well_formed)
    for response in responses:
        _check_response(path, number, response)
    chat = tuple(records.Message(message["role"], message["content"]) for message in messages)
    reference = _canonical(path, number, reference, get_task(line["task"]), responses)
    question = records.Question(line["id"], line["task"], chat, reference, line["question"])
    return PoolLine(question, line["split"], responses)


def _canonical(
    path: Path, number: int, reference: str | None, task: Task, responses: list[dict[str, Any]]
) -> str | None:
    """Return a reference as the task compares it; one that it cannot read is refused if anything has to be compared."""
    if reference is None or not isinstance(task, DatasetTask) or task.answer_type not in ("number", "option letter"):
        return reference
    found = task.dataset.answers.canonical(reference) or task.extract(reference)
    is_met = found is not None or all("correct" in response for response in responses)
    wanted = f"`reference` to be an answer of task {task.name!r} ({task.answer_type})"
    check_line(path, number, wanted, reference, is_met)
    return found or reference


def _check_response(path: Path, number: int, response: Any) -> None:
    check_line(path, number, "a response to be an object", response, isinstance(response, dict))
    _check_keys(path, number, response, RESPONSE_KEYS)
    text, answer, correct = response.get("text"), response.get("answer"), response.get("correct")
    check_line(path, number, "`text` of a response to be text", text, isinstance(text, str))
    check_line(path, number, "`answer` to be text or null", answer, isinstance(answer, str | None))
    check_line(path, number, "`correct` to be true, false or null", correct, isinstance(correct, bool | None))
    unreadable = "answer" in response and answer is None
    check_line(path, number, "an unreadable answer not to be correct", response, not (unreadable and correct))
    finish, tokens = response.get("finish"), response.get("tokens")
    check_line(path, number, '`finish` to be "stop", "length" or null', finish, finish in ("stop", "length", None))
    whole = [tokens] if _is_whole(tokens) else tokens
    listed = tokens is None or (isinstance(whole, list) and all(_is_whole(token) for token in whole))
    check_line(path, number, "`tokens` to be a number of tokens or a list of ids", tokens, listed)
    confidence = response.get("confidence", {})
    check_line(path, number, "`confidence` to map names to numbers", confidence, isinstance(confidence, dict))
    check_line(path, number, "the length of a response in `tokens`", NUM_TOKENS, NUM_TOKENS not in confidence)
    for name, value in confidence.items():
        number_like = isinstance(value, int | float) and not isinstance(value, bool)
        finite = value is None or (number_like and abs(value) < LARGEST)
        check_line(path, number, f"confidence `{name}` to be a finite number or null", value, finite)
        if name in PROBABILITIES and value is not None:
            check_line(path, number, f"confidence `{name}` to lie in [0, 1]", value, 0.0 <= value <= 1.0)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def recorded_response(response: Mapping[str, Any]) -> records.RecordedResponse:
    """Return a response of a checked line; missing answers and verdicts are unstated."""
    confidence = {name: float(value) for name, value in response.get("confidence", {}).items() if value is not None}
    columns: dict[str, Any] = {name: confidence.pop(name, None) for name in COLUMNS}
    if columns["yes_mass"] is not None and columns["no_mass"] is not None:
        confidence.pop("p_true", None)
    tokens = response.get("tokens")
    return records.RecordedResponse(
        text=response["text"], token_ids=tuple(tokens) if isinstance(tokens, list) else None,
        finish=response.get("finish"), answer=response.get("answer", records.UNSTATED),
        correct=response.get("correct", records.UNSTATED), confidences=confidence,
        num_tokens=tokens if isinstance(tokens, int) else None, **columns,
    )  # fmt: skip


def judge_line(line: PoolLine) -> records.QuestionSamples:
    """Return the samples of a line; missing answers and verdicts are extracted and verified."""
    task = get_task(line.question.task)
    samples = judge(line.question, [recorded_response(response) for response in line.responses], task)
    return records.QuestionSamples(line.question, samples, line.split)


def pool_line(group: records.QuestionSamples, *, token_ids: bool) -> dict[str, Any]:
    responses = []
    for sample in group.samples:
        numbers = {"p_true": sample.p_true, **{name: getattr(sample, name) for name in COLUMNS}, **sample.confidences}
        known = {name: value for name, value in numbers.items() if value is not None}
        response = {"text": sample.text, "answer": sample.answer, "correct": sample.correct, "confidence": known}
        response["finish"] = sample.finish
        tokens = list(sample.token_ids) if token_ids and sample.token_ids is not None else sample.num_tokens
        responses.append(response if tokens is None else {**response, "tokens": tokens})
    return written_line(group.question, group.split, responses)


def written_line(question: records.Question, split: str, responses: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [asdict(message) for message in question.messages]
    values = (question.id, question.task, split, question.text, messages, question.reference, responses)
    return dict(zip(WRITTEN_KEYS, values, strict=True))


def is_written_pool(path: Path) -> bool:
    """Return whether a file starts with a line of ``pool_line``; pools from elsewhere differ in fields or layout."""
    with open(path, "rb") as file:
        line = file.readline(LONGEST_LINE)
    try:
        content = json.loads(line)
        is_as_written = line == as_json_line(content).encode()
    except (ValueError, RecursionError):
        return False
    return is_as_written and isinstance(content, dict) and tuple(content) == WRITTEN_KEYS


def check_line(path: Path, number: int, expected: str, found: object, is_met: bool) -> None:
    if not is_met:
        raise line_error(path, number, expected, repr(found))


def _check_keys(path: Path, number: int, found: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(found.keys() - known)
    check_line(path, number, f"only the fields {', '.join(sorted(known))}", unknown, not unknown)


# Split of a pool made elsewhere that names none.
UNNAMED = "test"


def read_foreign_pool(
    path: Path, *, task: str | None, split: str | None, default_split: str | None = None
) -> Iterator[tuple[int, PoolLine]]:
    """Yield (line number, line) of a pool, or of a task's data set with ``responses`` if the first line has no id."""
    first = next((line for _, line in islice(read_json_lines(path), 1)), {})
    if task is not None and "id" not in first and "responses" in first:
        lines = _read_rows(path, get_task(task), split or default_split or UNNAMED)
    else:
        assumed = {} if default_split is None else {"split": default_split}
        given = {name: value for name, value in (("task", task), ("split", split)) if value is not None}
        numbered = read_json_lines(path)
        lines = ((number, _parse_line(path, number, {**assumed, **line, **given})) for number, line in numbered)
    seen: dict[str, int] = {}
    for number, line in lines:
        if (earlier := seen.setdefault(line.question.id, number)) != number:
            raise line_error(path, number, "`id` to be unique", f"{line.question.id!r} again, from line {earlier}")
        yield number, line


def _read_rows(path: Path, task: Task, split: str) -> Iterator[tuple[int, PoolLine]]:
    texts: list[list[dict[str, str]]] = []
    for number, line in read_json_lines(path):
        responses = line.get("responses")
        if not isinstance(responses, list) or not all(isinstance(text, str) for text in responses):
            raise line_error(path, number, "`responses` to be a list of texts", repr(responses))
        texts.append([{"text": text} for text in responses])
    questions = task.load(split, path=str(path))
    if len(questions) != len(texts):
        found = f"{len(questions)} of {len(texts)} rows of {path}"
        raise InputError(f"Task {task.name!r} reads only {found}. Remove the rows that it warns of.")
    for number, (question, responses) in enumerate(zip(questions, texts, strict=True), start=1):
        yield number, PoolLine(question, split, responses)


StepLabels = Literal["hard", "rate"]
TRL_FIELDS = ("prompt", "completions", "labels")


def trl_row(prompt: str, steps: Sequence[str], rates: Sequence[float], labels: StepLabels) -> dict[str, Any]:
    made = [rate > 0.0 for rate in rates] if labels == "hard" else list(rates)
    return {"prompt": prompt, "completions": [step.strip() for step in steps], "labels": made}
