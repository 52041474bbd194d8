"""Responses made elsewhere, from a JSON-lines pool, two sampled files or a log, into a store."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import line_error, read_json_lines
from selfcal_lightning.core.progress import Progress, Stage, counted, say
from selfcal_lightning.data.pools import line_format
from selfcal_lightning.data.pools.harness_logs import FORMATS, Log, LoggedResponse, guess_task
from selfcal_lightning.data.pools.line_format import UNNAMED, PoolLine, check_line, count_lines, open_imported
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.dataset import DatasetTask
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.data.tasks.math_processes import Undecided, say_undecided
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import as_text
from selfcal_lightning.records import Message, Question, QuestionSamples, Unstated

SAMPLED, GROUND_TRUTH = "sampled.jsonl", "ground_truth.jsonl"
SAMPLED_KEYS = (
    "example_id", "sampled_id", "prompt_tokens", "completion_tokens", "prompt", "response", "parsed_response",
    "ground_truth_answer", "correctness",
)  # fmt: skip
TRUTH_KEYS = (
    "example_id", "total_prompt_tokens", "total_completion_tokens", "ground_truth_answer", "num_samples",
    "num_correct", "expected_accuracy", "question",
)  # fmt: skip
QUESTIONS_PER_SHARD = 256


def find_sampled(path: str | Path) -> Path | None:
    """Return the file of responses if ``path`` is one or a folder that holds one, else None."""
    place = Path(path)
    if place.is_dir():
        return place / SAMPLED if (place / SAMPLED).is_file() else None
    first = next((line for _, line in read_json_lines(place)), {}) if place.suffix == ".jsonl" else {}
    return place if {"example_id", "response"} <= first.keys() else None


def _read_sampled(
    path: Path, task: str, split: str, dropped: Counter[str], further: Counter[str], *, stated: bool
) -> list[PoolLine]:
    """Read the responses and, if it is in the same folder, the file of questions.

    Rows without a text, and those whose id and number occurred before, are left out and counted; the others are
    renumbered from 0, in the order of their own numbers. ``further`` counts for the report, by its fields.
    """
    file = path.with_name(GROUND_TRUTH)
    truths = {_id(file, number, row): row for number, row in (read_json_lines(file) if file.is_file() else ())}
    found: dict[str, dict[object, dict[str, Any]]] = {}
    questions: dict[str, Question] = {}
    for number, row in read_json_lines(path):
        name = _id(path, number, row)
        if not isinstance(row.get("response"), str):
            dropped["without a response"] += 1
            continue
        given = found.setdefault(name, {})
        own = row.get("sampled_id")
        check_line(path, number, "`sampled_id` to be a number or text", own, isinstance(own, str | int | float | None))
        own = len(given) if own is None else own
        if own in given:
            dropped["of a number that occurred before"] += 1
            continue
        given[own] = _response(path, number, row, further, stated=stated)
        if name not in questions:
            questions[name] = _question(path, number, row, truths.get(name, {}), task)
    in_order = ((name, [given[own] for own in sorted(given, key=_order)]) for name, given in found.items())
    further["without_responses"] = len(truths.keys() - questions.keys())
    for name in questions.keys() & truths.keys() if stated else ():
        counted = len(found[name]), sum(bool(one["correct"]) for one in found[name].values())
        further["differing"] += counted != (truths[name].get("num_samples"), truths[name].get("num_correct"))
    return [PoolLine(questions[name], split, responses) for name, responses in in_order]


def sampled_rows(group: QuestionSamples) -> Iterator[dict[str, Any]]:
    """Yield the rows of a question's responses, without failed requests."""
    prompt = [asdict(message) for message in group.question.messages]
    tokens = None if group.prompt_ids is None else len(group.prompt_ids)
    for sample in group.samples:
        if not is_failed(sample):
            values = (
                group.question.id, sample.index, tokens, sample.num_tokens, prompt, sample.text, sample.answer,
                group.question.reference, int(bool(sample.correct)),
            )  # fmt: skip
            yield dict(zip(SAMPLED_KEYS, values, strict=True))


def truth_row(question: Question, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a question whose responses have the rows of :func:`sampled_rows`."""
    right = sum(row["correctness"] for row in rows)
    lengths = [[row[name] for row in rows] for name in ("prompt_tokens", "completion_tokens")]
    totals = [None if None in column else sum(column) for column in lengths]
    values = (question.id, *totals, question.reference, len(rows), right, right / len(rows), question.text)
    return dict(zip(TRUTH_KEYS, values, strict=True))


def _id(path: Path, number: int, row: Mapping[str, Any]) -> str:
    name = row.get("example_id")
    is_name = isinstance(name, str | int) and not isinstance(name, bool) and str(name).strip() != ""
    check_line(path, number, "`example_id` to be text or a whole number", name, is_name)
    return str(name)


def _response(
    path: Path, number: int, row: Mapping[str, Any], further: Counter[str], *, stated: bool
) -> dict[str, Any]:
    tokens = row.get("completion_tokens")
    response: dict[str, Any] = {"text": row["response"]}
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
        response["tokens"] = tokens
    if not stated:
        return response
    correct = row.get("correctness")
    check_line(path, number, "`correctness` to be 0, 1 or null", correct, correct in (0, 1, None))
    answer = _text(row.get("parsed_response"))
    further["overruled"] += answer is None and bool(correct)
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
    """Return an answer as text; None for an empty one."""
    text = "" if value is None else as_text(value)
    return text if text.strip() else None


def _order(own: object) -> tuple[int, int, str]:
    """Return the sort key of a row: the number at the end of its id, else the id."""
    text = str(own)
    digits = text[len(text.rstrip("0123456789")) :]
    return (0, int(digits), text) if digits else (1, 0, text)


@dataclass(frozen=True, slots=True)
class ImportReport:
    questions: int
    reused: int = 0
    without_responses: int = 0
    responses: int = 0
    extracted: int = 0
    verified: int = 0
    unreadable: int = 0
    truncated: int = 0
    undecided: int = 0
    dropped: int = 0
    overruled: int = 0
    differing: int = 0
    references_unreadable: int = 0

    def __str__(self) -> str:
        further = further_counts(self, ("questions", "responses"))
        return f"{self.responses:,} responses to {self.questions:,} questions{further}"


def further_counts(report: Any, without: Sequence[str]) -> str:
    names = [one.name for one in fields(report) if one.name not in without]
    found = [f"{name.replace('_', ' ')} {getattr(report, name):,}" for name in names if getattr(report, name)]
    return f" ({', '.join(found)})" if found else ""


def import_pool(
    path: str | Path,
    store_dir: str | Path,
    *,
    task: str | None = None,
    split: str | None = None,
    prefixes_of: str | Path | None = None,
) -> ImportReport:
    """Read a JSON-lines pool of responses made elsewhere, or of the prefixes in a file, into its own store.

    With ``task``, a file with the task's columns and a list of texts in ``responses`` is read too. The whole file is
    checked before the first row is stored. Equal answers are named by the first seen.
    """
    path, source = Path(path), Path(prefixes_of or path)
    sizes: dict[str, int] = {}
    with Progress(count_lines(path), label=f"Checking {path.name}", unit="lines", only_if_slow=True) as progress:
        for _, line in counted(line_format.read_foreign_pool(path, task=task, split=split), progress):
            sizes[line.question.id] = len(line.responses)
            get_task(line.question.task)
    if not sizes:
        raise InputError(f"Expected {path} to hold a question on every line, but got an empty file.")
    with Stage(f"Hashing {source.name}"), open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    store = open_imported(store_dir, source, {"task": task}, digest=digest)
    lines = line_format.read_foreign_pool(path, task=task, split=split)
    return _store_lines(source, store, lines, sizes, Counter(), have_answers=prefixes_of is None)


def import_sampled(path: Path, store_dir: str | Path, *, task: str, split: str, stated: bool = True) -> ImportReport:
    """Read `sampled.jsonl`, and `ground_truth.jsonl` if it exists, into its own store."""
    get_task(task)
    dropped, further = Counter[str](), Counter[str]()
    with Stage(f"Reading {path.name}"):
        lines = _read_sampled(path, task, split, dropped, further, stated=stated)
    if not lines:
        raise InputError(f"Expected {path} to hold responses to questions, but got none.")
    store = open_imported(store_dir, path, {"task": task, "stated": stated})
    return replace(_store_lines(path, store, enumerate(lines, start=1), _sizes(lines), dropped), **further)


def import_log(
    path: Path, format: str, log: Log, store_dir: str | Path, *, task: str | None, split: str | None, stated: bool
) -> ImportReport:
    """Read the log of another tool into its own store; without ``task`` it is guessed from the reference answers.

    Answers and verdicts of the log are kept where it states both; without ``stated`` they are extracted and verified.
    """
    with Stage(f"Reading {path.name}, format {format}"):
        try:
            responses = list(FORMATS[format].read(log))
        except (AttributeError, KeyError, TypeError) as error:  # a field of another type than the tool writes
            raise InputError(f"{path} is not as {format} writes it: {error}. Name another `--format`.") from error
        if not responses:
            reasons = f"; left out are {_reasons(log.skipped)}" if log.skipped.total() else ""
            raise InputError(f"Expected {path} to hold responses, as {format} writes them, but got none{reasons}.")
        if task is None:
            task = guess_task(one.reference for one in responses)
            say(f"The reference answers look like those of the task {task}; `--task` names another.")
        read = _LoggedAnswers(get_task(task))
        lines = read.lines(responses, task, split or UNNAMED, stated=stated)
        digest = hashlib.sha256("".join(map(repr, responses)).encode(errors="surrogatepass")).hexdigest()
    store = open_imported(store_dir, path, {"task": task, "stated": stated, "format": format}, digest=digest)
    report = _store_lines(path, store, enumerate(lines, start=1), _sizes(lines), log.skipped)
    return replace(report, overruled=read.overruled, references_unreadable=read.unreadable)


def _sizes(lines: Iterable[PoolLine]) -> dict[str, int]:
    return {line.question.id: len(line.responses) for line in lines}


class _LoggedAnswers:
    def __init__(self, task: Task) -> None:
        self._task = task
        self.unreadable = self.overruled = 0

    def lines(self, responses: Iterable[LoggedResponse], task: str, split: str, *, stated: bool) -> list[PoolLine]:
        found: dict[str, PoolLine] = {}
        for one in responses:
            if one.question_id not in found:
                reference = self._reference(one.reference)
                self.unreadable += reference is None and one.reference not in (None, "", [])
                question = Question(one.question_id, task, one.messages(), reference, one.question)
                found[one.question_id] = PoolLine(question, split, [])
            found[one.question_id].responses.append(self._response(one, stated=stated))
        return list(found.values())

    def _response(self, one: LoggedResponse, *, stated: bool) -> dict[str, Any]:
        given: dict[str, Any] = {"text": one.text, "finish": one.finish, "tokens": one.tokens}
        response = {name: value for name, value in given.items() if value is not None}
        if one.logprob is not None:
            response["confidence"] = {"logprob": one.logprob}
        if not stated or isinstance(one.correct, Unstated):
            return response
        answer = one.answer
        if answer is not None:  # what the task cannot read is a judge's remark or the whole text
            canonical = None if isinstance(answer, Unstated) else self._canonical(answer)
            answer = canonical or self._task.extract(one.text, finished=one.finish != "length")
        self.overruled += bool(one.correct) and answer is None
        return {**response, "answer": answer, "correct": bool(one.correct) and answer is not None}

    def _canonical(self, answer: Any) -> str | None:
        if isinstance(self._task, DatasetTask):
            return self._task.dataset.answers.canonical(answer)
        return self._task.extract(str(answer))

    def _reference(self, given: Any) -> str | None:
        """Return the reference in canonical form: of a list, all as aliases, or the first that can be read."""
        if isinstance(given, list) and len(given) > 1 and self._task.answer_type == "short text":
            return self._canonical(given)
        for one in given if isinstance(given, list) else [given]:
            if one is not None and (found := self._canonical(one) or self._task.extract(str(one))) is not None:
                return found
        return None


def _reasons(skipped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common() if count)


def _store_lines(
    path: Path,
    store: SampleStore,
    lines: Iterable[tuple[int, PoolLine]],
    sizes: Mapping[str, int],
    skipped: Counter[str],
    *,
    have_answers: bool = True,
) -> ImportReport:
    """Verify and store the ``lines`` that the store lacks, and join it; ``sizes`` are their numbers of responses."""
    before, counts = Undecided.so_far(), Counter[str]()
    with store.writer("import", questions_per_shard=QUESTIONS_PER_SHARD) as writer:
        stored = store.stored_questions(include_parts=True)
        total = sum(count for name, count in sizes.items() if name not in stored)
        with Progress(total, label=f"Importing {path.name}") as progress:
            for number, line in lines:
                known = stored.get(line.question.id)
                if known is not None:
                    expected = f"split {known.split!r} as stored"
                    check_line(path, number, expected, line.split, known.split == line.split)
                    counts["reused"] += 1
                elif not line.responses:
                    counts["without_responses"] += 1
                else:
                    judged = line_format.judge_line(line)
                    writer.append(judged)
                    unreadable = sum(have_answers and sample.answer is None for sample in judged.samples)
                    counts["responses"] += len(judged.samples)
                    counts["extracted"] += sum("answer" not in response for response in line.responses)
                    if line.question.reference is not None:
                        counts["verified"] += sum("correct" not in response for response in line.responses)
                    counts["unreadable"] += unreadable
                    counts["truncated"] += sum(sample.finish == "length" for sample in judged.samples)
                    progress.update(len(judged.samples), unreadable=unreadable)
    with Stage(f"Joining {store.path.name}"):
        store.join()
    if skipped.total():
        say(f"Left out of {path}: {_reasons(skipped)}.")
    return ImportReport(questions=len(sizes), undecided=say_undecided(before), dropped=skipped.total(), **counts)
