"""Success rates of prefixes made elsewhere as a pool of responses: published records, and rows as TRL has them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.trl_rows import TRL_FIELDS, read_trl_row
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.json_files import line_error, read_json_lines

FIELDS = ("question", "reasoning_prefix", "success_prob")
SUCCESS = "success_prob"
# The ways in which families of models write their control tokens: there is no model here whose own could be asked for.
_CONTROL = re.compile(r"<[|｜][^\s<>|｜]{2,}[|｜]>|</?s>|<(?:bos|eos|pad|start_of_turn|end_of_turn)>")


class SuccessCounts(NamedTuple):
    """What became of records.

    Attributes:
        prefixes: Prefixes written.
        bare: Records left out since their prefix is empty: there is nothing of a response to read.
        without_steps: Rows of TRL left out since they have no step.
    """

    prefixes: int
    bare: int
    without_steps: int


def write_success_pool(path: str | Path, pool: Path, *, task: str, split: str, separator: str = "\n") -> SuccessCounts:
    """Write the records of a file as a pool, in which a prefix is a response whose confidence is its success rate.

    Records of one question, by its text, are one line. A record of the question alone, without a prefix, is left out
    and counted.

    Args:
        path: JSON lines.
        pool: Where to.
        task: Task of the questions.
        split: Split of the questions.
        separator: What stands between two steps of TRL's rows.

    Raises:
        InputError: A record lacks a field, a rate is none, or a prefix holds a control token; with file and line.
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
    write_json_lines(pool, (_line(*item, task=task, split=split) for item in groups.items()))
    return SuccessCounts(sum(map(len, groups.values())), bare, without_steps)


def _records(path: Path, separator: str) -> Iterator[tuple[str, list[tuple[str, float]]]]:
    """Yield the question of every line, and its prefixes with their rates."""
    for number, record in read_json_lines(path):
        if record.keys() >= set(TRL_FIELDS):
            try:
                asked, prefixes = read_trl_row(record, separator=separator)
            except InputError as error:
                raise InputError(f"{path}:{number}: {error}") from error
            _check_plain(path, number, "completions", record["completions"])
            yield asked, prefixes
            continue
        if missing := [field for field in FIELDS if field not in record]:
            raise line_error(path, number, f"the fields {', '.join(missing)}", f"only {', '.join(sorted(record))}")
        question, prefix, rate = (record[field] for field in FIELDS)
        for field, value in (("question", question), ("reasoning_prefix", prefix)):
            if not isinstance(value, str) or (field == "question" and not value.strip()):
                raise line_error(path, number, f"`{field}` to be text", repr(value))
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not math.isfinite(rate) or not 0.0 <= rate <= 1.0:
            raise line_error(path, number, f"`{SUCCESS}` to lie in [0, 1]", repr(rate))
        _check_plain(path, number, "reasoning_prefix", [prefix])
        yield question, [(prefix, float(rate))]


def _check_plain(path: Path, number: int, field: str, texts: list[str]) -> None:
    """Raise where a text holds a control token, which training would read as letters that no policy writes."""
    for text in texts:
        if found := _CONTROL.search(text):
            refusal = line_error(path, number, f"`{field}` without control tokens of a model", repr(found[0]))
            raise InputError(f"{refusal} It stands in {text[-80:]!r}. Take it out of the text.")


def _line(question: str, group: list[tuple[str, float]], *, task: str, split: str) -> dict[str, Any]:
    responses = [{"text": prefix, "answer": None, "confidence": {SUCCESS: rate}} for prefix, rate in group]
    name = f"prefixes/{hashlib.sha256(question.encode()).hexdigest()[:24]}"
    return {"id": name, "task": task, "split": split, "question": question, "reference": None, "responses": responses}
