"""Success rates of prefixes made elsewhere as a pool of responses: published records, and rows as TRL has them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.trl_rows import TRL_FIELDS, read_trl_row
from selfcal_lightning.runtime.files import write_json_lines
from selfcal_lightning.runtime.json_files import line_error, read_json_lines

FIELDS = ("question", "reasoning_prefix", "success_prob")
SUCCESS = "success_prob"


def write_success_pool(path: str | Path, pool: Path, *, task: str, split: str, separator: str = "\n") -> int:
    """Write the records of a file as a pool, in which a prefix is a response whose confidence is its success rate.

    Records of one question, by its text, are one line. A record of the question alone, without a prefix, is left out:
    there is nothing of a response to read.

    Args:
        path: JSON lines.
        pool: Where to.
        task: Task of the questions.
        split: Split of the questions.
        separator: What stands between two steps of TRL's rows.

    Returns:
        How many prefixes there are.

    Raises:
        InputError: A record lacks a field, or a rate is none; with file and line.
    """
    groups: dict[str, list[tuple[str, float]]] = {}
    for question, prefix, rate in _records(Path(path), separator):
        group = groups.setdefault(question, [])
        if prefix.strip():
            group.append((prefix, rate))
    found = {question: group for question, group in groups.items() if group}
    if not found:
        raise InputError(f"Expected {path} to hold records with a `reasoning_prefix`, but got none.")
    write_json_lines(pool, (_line(*item, task=task, split=split) for item in found.items()))
    return sum(map(len, found.values()))


def _records(path: Path, separator: str) -> Iterator[tuple[str, str, float]]:
    for number, record in read_json_lines(path):
        if record.keys() >= set(TRL_FIELDS):
            try:
                asked, prefixes = read_trl_row(record, separator=separator)
            except InputError as error:
                raise InputError(f"{path}:{number}: {error}") from error
            yield from ((asked, prefix, rate) for prefix, rate in prefixes)
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
        yield question, prefix, float(rate)


def _line(question: str, group: list[tuple[str, float]], *, task: str, split: str) -> dict[str, Any]:
    responses = [{"text": prefix, "answer": None, "confidence": {SUCCESS: rate}} for prefix, rate in group]
    name = f"prefixes/{hashlib.sha256(question.encode()).hexdigest()[:24]}"
    return {"id": name, "task": task, "split": split, "question": question, "reference": None, "responses": responses}
