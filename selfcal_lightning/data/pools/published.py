"""Published training records of self-calibration: ``input, answer, weighted_consistency, consistency``."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import line_error, read_json_lines, write_json_lines
from selfcal_lightning.data.pools.importing import QUESTIONS_PER_SHARD, further_counts
from selfcal_lightning.data.pools.line_format import TRL_FIELDS, check_line, open_imported
from selfcal_lightning.data.store.shards import read_parquet
from selfcal_lightning.data.tasks.judging import judge
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Question, QuestionSamples, RecordedResponse

FIELDS = ("input", "answer", "weighted_consistency", "consistency")
TARGETS = {"ssc": "weighted_consistency", "consistency": "consistency"}


@dataclass(frozen=True, slots=True)
class RecordsReport:
    records: int
    questions: int
    reused: int
    unreadable: int
    without_target: int
    doubled_prompts: int
    ended: int
    other_fields: tuple[str, ...]

    def __str__(self) -> str:
        unread = f"; fields not read: {', '.join(self.other_fields)}" if self.other_fields else ""
        further = further_counts(self, ("records", "questions", "other_fields"))
        return f"{self.records:,} records of {self.questions:,} questions{further}{unread}"


def import_training_records(
    path: str | Path,
    store_dir: str | Path,
    *,
    prompt_separator: str,
    task: str,
    split: str = "train",
    end_of_turn: str = "",
    model: str | None = None,
    revision: str | None = None,
) -> RecordsReport:
    """Read published training records into their own store, as samples with finished targets."""
    path = Path(path)
    if not prompt_separator:
        raise InputError("Expected `prompt_separator` to be the text that opens the assistant's turn, but got ''.")
    reader = get_task(task)
    groups: dict[str, list[RecordedResponse]] = {}
    counts = Counter[str](records=0)  # an empty one would take truth values as they are
    others: set[str] = set()
    rows = enumerate(read_parquet(path).to_pylist(), start=1) if path.suffix == ".parquet" else read_json_lines(path)
    for number, record in rows:
        _check_fields(path, number, record, FIELDS)
        given, answer = record["input"], record["answer"]
        check_line(path, number, "`input` to be text", given, isinstance(given, str))
        is_plain = isinstance(answer, str | int | float | None)
        check_line(path, number, "`answer` to be text, a number or null", answer, is_plain)
        prompt, text, doubled = _split_input(path, number, given, prompt_separator)
        ended = bool(end_of_turn) and text.endswith(end_of_turn)
        targets = {
            name: _share(path, number, field, value, slack=1e-6)
            for name, field in TARGETS.items()
            if (value := record[field]) is not None and value == value  # nan is unknown too
        }
        said, stated = text.removesuffix(end_of_turn) if ended else text, None if answer is None else str(answer)
        response = RecordedResponse(said, finish="stop" if ended else None, answer=stated, confidences=targets)
        groups.setdefault(prompt, []).append(response)
        others |= record.keys() - set(FIELDS)
        counts.update(records=1, unreadable=answer is None, without_target="ssc" not in targets)
        counts.update(doubled_prompts=doubled, ended=ended)
    if not groups:
        raise InputError(f"Expected {path} to hold training records, but got an empty file.")
    chat = None if model is None else ChatFormat(load_tokenizer(model, revision=revision))
    settings = {"prompt_separator": prompt_separator, "end_of_turn": end_of_turn, "task": task, "split": split}
    store = open_imported(store_dir, path, settings | ({} if chat is None else chat.describe()))
    with store.writer("import", questions_per_shard=QUESTIONS_PER_SHARD) as writer:
        stored = store.question_ids(include_parts=True)
        for prompt, responses in groups.items():
            question = Question(f"record/{hashlib.sha256(prompt.encode()).hexdigest()[:24]}", task, (), None, prompt)
            if question.id not in stored:
                samples, prompt_ids = judge(question, responses, reader), None
                if chat is not None:
                    prompt_ids = tuple(chat.tokenizer.encode(prompt, add_special_tokens=False))
                    samples = tuple(replace(sample, token_ids=chat.response_ids(sample.text)) for sample in samples)
                writer.append(QuestionSamples(question, samples, split, prompt_ids))
    store.join()
    return RecordsReport(questions=len(groups), reused=len(stored), other_fields=tuple(sorted(others)), **counts)


def _split_input(path: Path, number: int, text: str, separator: str) -> tuple[str, str, bool]:
    """Return (prompt, response, whether the input held the prompt twice)."""
    head, found, response = text.rpartition(separator)
    expected = f"`input` to hold the prompt separator {separator!r}, which opens the assistant's turn"
    check_line(path, number, expected, text, bool(found))
    prompt = head + separator
    # Parts are joined by a space. One published generator returned the prompt with its response: it is there twice.
    half = len(prompt) // 2
    doubled = len(prompt) % 2 == 1 and prompt == f"{prompt[:half]} {prompt[:half]}"
    return prompt[:half] if doubled else prompt, response.removeprefix(" "), doubled


def _share(path: Path, number: int, field: str, value: Any, *, slack: float = 0.0) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    check_line(path, number, f"`{field}` to lie in [0, 1]", value, is_number and 0.0 <= value <= 1.0 + slack)
    return min(float(value), 1.0)


def _check_fields(path: Path, number: int, record: dict[str, Any], fields: Sequence[str]) -> None:
    if missing := [field for field in fields if field not in record]:
        raise line_error(path, number, f"the fields {', '.join(missing)}", f"only {', '.join(sorted(record))}")


SUCCESS_FIELDS = ("question", "reasoning_prefix", "success_prob")
SUCCESS = "success_prob"
# Control tokens of common model families.
_CONTROL = re.compile(r"<[|｜][^\s<>|｜]{2,}[|｜]>|</?s>|<(?:bos|eos|pad|start_of_turn|end_of_turn)>")


class SuccessCounts(NamedTuple):
    prefixes: int
    most: int  # of one question
    bare: int
    without_steps: int
    contradicting: int


def write_success_pool(path: str | Path, pool: Path, *, task: str, split: str, separator: str = "\n") -> SuccessCounts:
    """Write the records of a file as a pool, in which a prefix is a response whose confidence is its success rate.

    Records with the same question text are one line. A prefix with different rates gets their mean, and is counted;
    a record without a prefix is left out and counted.
    """
    groups: dict[str, list[tuple[str, float]]] = {}
    bare = without_steps = 0
    for question, prefixes in _records(Path(path), separator):
        kept = [(prefix, rate) for prefix, rate in prefixes if prefix.strip()]
        bare += len(prefixes) - len(kept)
        without_steps += not prefixes
        if kept:
            groups.setdefault(question, []).extend(kept)
    if not groups:
        raise InputError(f"Expected {path} to hold records with a `reasoning_prefix`, but got none.")
    contradicting = 0
    for question, group in groups.items():
        rates: dict[str, list[float]] = {}
        for prefix, rate in group:
            rates.setdefault(prefix, []).append(rate)
        contradicting += sum(len(set(found)) > 1 for found in rates.values())
        groups[question] = [(prefix, fmean(rates[prefix])) for prefix, _ in group]
    write_json_lines(pool, (_line(*item, task=task, split=split) for item in groups.items()))
    sizes = [len(group) for group in groups.values()]
    return SuccessCounts(sum(sizes), max(sizes), bare, without_steps, contradicting)


def _records(path: Path, separator: str) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    for number, record in read_json_lines(path):
        if record.keys() >= set(TRL_FIELDS):
            prompt, steps, labels = (record[name] for name in TRL_FIELDS)
            check_line(path, number, "`prompt` to be text", prompt, isinstance(prompt, str) and prompt.strip() != "")
            are_steps = isinstance(steps, list) and all(isinstance(step, str) and step.strip() for step in steps)
            check_line(path, number, "`completions` to be a list of steps", steps, are_steps)
            are_as_many = isinstance(labels, list) and len(labels) == len(steps)
            check_line(path, number, f"`labels` to be a list of {len(steps)}, one a step", labels, are_as_many)
            are_shares = all(isinstance(label, int | float) and 0 <= label <= 1 for label in labels)
            check_line(path, number, "`labels` to be true, false or shares in [0, 1]", labels, are_shares)
            _check_plain(path, number, "completions", steps)
            prefixes = accumulate(steps, lambda before, step: f"{before}{separator}{step}")
            yield prompt, list(zip(prefixes, map(float, labels), strict=True))
            continue
        _check_fields(path, number, record, SUCCESS_FIELDS)
        question, prefix, rate = (record[field] for field in SUCCESS_FIELDS)
        is_text = isinstance(question, str) and question.strip() != ""
        check_line(path, number, "`question` to be text", question, is_text)
        check_line(path, number, "`reasoning_prefix` to be text", prefix, isinstance(prefix, str))
        rate = _share(path, number, SUCCESS, rate)
        _check_plain(path, number, "reasoning_prefix", [prefix])
        yield question, [(prefix, rate)]


def _check_plain(path: Path, number: int, field: str, texts: list[str]) -> None:
    """Refuse a text with a control token, which training would read as plain letters."""
    for text in texts:
        if found := _CONTROL.search(text):
            refusal = line_error(path, number, f"`{field}` without control tokens of a model", repr(found[0]))
            raise InputError(f"{refusal} It is in {text[-80:]!r}. Take it out of the text.")


def _line(question: str, group: list[tuple[str, float]], *, task: str, split: str) -> dict[str, Any]:
    responses = [{"text": prefix, "answer": None, "confidence": {SUCCESS: rate}} for prefix, rate in group]
    name = f"prefixes/{hashlib.sha256(question.encode()).hexdigest()[:24]}"
    return {"id": name, "task": task, "split": split, "question": question, "reference": None, "responses": responses}
