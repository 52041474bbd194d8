"""The report of recorded samples as one HTML file: what was measured, every question, every response."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.confidence.fusion import carried_confidences, is_probability
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import open_atomically
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.inference.choices import DEFAULT_THRESHOLD
from selfcal_lightning.records import QuestionSamples

REPORT = "report.html"
MARK = "<!-- selfcal report -->"
CHUNK = 64  # questions whose texts are unpacked together
SHOWN_CHARACTERS = 160
LONGEST_TEXT = 100_000
METRICS = ("pass_at_1", "ece", "auroc", "brier")

Tests = Mapping[str, Mapping[str, RecordedPool]]


def write_page(
    path: Path,
    tests: Tests,
    results: Mapping[str, Any],
    *,
    title: str,
    sentences: Sequence[str] = (),
    threshold: float = DEFAULT_THRESHOLD,
    redact: bool = False,
) -> None:
    """Write the report of ``tests``, {test set: {system: samples with their texts}}, to ``path``.

    The file is self-contained: a Content-Security-Policy keeps it from the network, data are compressed columns, and
    texts of models are only ever set as text.

    Args:
        path: The file, new or of an earlier report.
        tests: One system, or two to compare.
        results: Keys of ``results.json``, for the table of numbers.
        title: What was run.
        sentences: The verdict in words.
        threshold: Where the replayed stopping rule begins.
        redact: Leave out the texts of questions and responses, and the answers.
    """
    systems = list(dict.fromkeys(system for pools in tests.values() for system in pools))
    if len(systems) > 2:
        raise InputError(f"Expected one system or two to compare, but got {len(systems)}: {', '.join(systems)}.")
    if path.exists() and not _is_report(path):
        raise InputError(f"{path} exists and is not a report. Name another file.")
    confidences = _confidences(tests)
    asked = [row for number, pools in enumerate(tests.values()) for row in _questions(number, pools, systems)]
    index = {
        "title": title,
        "sentences": list(sentences),
        "systems": systems,
        "tests": list(tests),
        "confidences": confidences,
        "numbers": _numbers(tests, results),
        "threshold": threshold,
        "redacted": redact,
        "chunk": CHUNK,
        "questions": [_row(test, groups, confidences, redact=redact) for test, groups in asked],
    }
    script = _asset("page.js")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(script)}'"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path) as file:
        for part in (
            f'<!doctype html>\n{MARK}\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            f"<title>{html.escape(title)}</title>\n<style>\n{_asset('page.css')}</style></head>\n",
            '<body><div id="app"></div>\n',
            f'<script type="text/plain" id="index">{_packed(index)}</script>\n',
        ):
            file.write(part.encode())
        for start in range(0, 0 if redact else len(asked), CHUNK):
            texts = [_texts(groups) for _, groups in asked[start : start + CHUNK]]
            file.write(f'<script type="text/plain" id="c{start // CHUNK}">{_packed(texts)}</script>\n'.encode())
        file.write(f'<script type="module">{script}</script>\n</body></html>\n'.encode())


def _is_report(path: Path) -> bool:
    with open(path, "rb") as file:
        return MARK.encode() in file.read(200)


def _asset(name: str) -> str:
    return (files("selfcal_lightning") / "assets" / "report" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _packed(content: object) -> str:
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False)
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 6, mtime=0)).decode()


def _confidences(tests: Tests) -> list[str]:
    """Return the probabilities that all systems carry, P(True) first; votes are weighted by them."""
    pools = [pool for systems in tests.values() for pool in systems.values()]
    shared = [name for name in carried_confidences(pools[0]) if all(is_probability(pool, name) for pool in pools)]
    shared = [name for name in shared if all(name in carried_confidences(pool) for pool in pools)]
    return sorted(shared, key=lambda name: name != P_TRUE)


def _questions(
    test: int, pools: Mapping[str, RecordedPool], systems: Sequence[str]
) -> Iterator[tuple[int, list[QuestionSamples | None]]]:
    found = [{entry.question.id: entry for entry in pools[name].entries} if name in pools else {} for name in systems]
    for name in dict.fromkeys(name for entries in found for name in entries):
        yield test, [entries.get(name) for entries in found]


def _row(
    test: int, groups: Sequence[QuestionSamples | None], confidences: Sequence[str], *, redact: bool
) -> dict[str, Any]:
    question = next(group.question for group in groups if group is not None)
    answers: dict[str, int] = {}
    runs: list[dict[str, Any] | None] = []
    for group in groups:
        if group is None:
            runs.append(None)
            continue
        samples = group.samples
        runs.append(
            {
                "a": [-1 if s.answer is None else answers.setdefault(s.answer, len(answers)) for s in samples],
                "c": [-1 if s.correct is None else int(s.correct) for s in samples],
                "p": [[_rounded(confidence_of(s, name)) for s in samples] for name in confidences],
                "n": [s.num_tokens for s in samples],
                "f": [int(s.finish == "length") for s in samples],
            }
        )
    return {
        "t": test,
        "id": question.id,
        "q": question.id if redact else " ".join(question.text.split())[:SHOWN_CHARACTERS],
        "r": None if redact else question.reference,
        "a": [f"answer {place + 1}" for place in answers.values()] if redact else list(answers),
        "s": runs,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _texts(groups: Sequence[QuestionSamples | None]) -> dict[str, Any]:
    question = next(group.question for group in groups if group is not None)
    prompt = "\n\n".join(message.content for message in question.messages) or question.text
    return {
        "q": _cut(prompt),
        "s": [None if group is None else [_cut(sample.text) for sample in group.samples] for group in groups],
    }


def _cut(text: str) -> str:
    left = len(text) - LONGEST_TEXT
    return text if left <= 0 else f"{text[:LONGEST_TEXT]}\n[{left:,} more characters]"


def _numbers(tests: Tests, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for test, pools in tests.items():
        for system, pool in pools.items():
            keys = {name: f"own.{test}.{name}.{system}" for name in METRICS}
            values = {name: [results.get(f"{key}{end}") for end in ("", ".low", ".high")] for name, key in keys.items()}
            number = sum(len(entry.samples) for entry in pool.entries)
            counts = {"questions": len(pool.entries), "responses": number}
            rows.append({"test": test, "system": system, **counts, **values})
    return rows
