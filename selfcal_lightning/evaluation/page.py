"""The report of recorded samples as one HTML file: what was measured, every question, every response."""

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import open_atomically
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.evaluation.metrics import SIDES, shared_probabilities
from selfcal_lightning.inference.choices import DEFAULT_THRESHOLD
from selfcal_lightning.records import QuestionSamples, is_one_question

REPORT = "report.html"
MARK = "<!-- selfcal report -->"
CHUNK = 64  # questions whose texts are unpacked together
SHOWN_CHARACTERS = 160
LONGEST_TEXT = 100_000
PACKED = re.compile(r'<script type="text/plain" id="(index|c\d+)">([A-Za-z0-9+/=]*)</script>')
METRICS = ("pass_at_1", "ece", "auroc", "brier")

Tests = Mapping[str, Mapping[str, RecordedPool]]
# Of each sample: the length of each token's text, and its log-probability; None is unknown.
TokenColours = tuple[list[int], list[float]] | None


def write_page(
    path: Path,
    tests: Tests,
    results: Mapping[str, Any],
    *,
    title: str,
    sentences: Sequence[str] = (),
    threshold: float = DEFAULT_THRESHOLD,
    redact: bool = False,
    colours: Callable[[Sequence[QuestionSamples]], list[list[TokenColours]]] | None = None,
) -> None:
    """Write the report of ``tests``, {test set: {system: samples with their texts}}: of one system, or two to compare.

    The file is self-contained: a Content-Security-Policy keeps it from the network, data are compressed columns, and
    texts of models are only ever set as text. It is new, or replaces an earlier report. ``results`` has the keys of
    ``results.json``; the replayed stopping rule begins at ``threshold``; ``redact`` leaves out the texts of questions
    and responses, and the answers; ``colours`` returns the tokens of each response, [question][sample], to colour them.
    """
    systems = list(dict.fromkeys(system for pools in tests.values() for system in pools))
    _check_replaceable(path)
    shared = shared_probabilities([pool for pools in tests.values() for pool in pools.values()])
    confidences = sorted(shared, key=lambda name: name != P_TRUE)
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
        "coloured": colours is not None,
        "chunk": CHUNK,
        "questions": [_row(test, groups, confidences, redact=redact) for test, groups in asked],
    }

    def chunks() -> Iterator[list[dict[str, Any]]]:
        for start in range(0, 0 if redact else len(asked), CHUNK):
            part = [groups for _, groups in asked[start : start + CHUNK]]
            found = [] if colours is None else colours([one for groups in part for one in groups if one is not None])
            yield _texts(part, iter(found))

    _write(path, index, chunks())


def compare_pages(path: Path, reports: Mapping[str, Path], *, title: str) -> tuple[int, int]:
    """Write the report of the last systems of two; return how many questions both have, and how many one alone."""
    pages = [_read(report) for report in reports.values()]
    (one, texts), (two, others) = pages
    for report, (index, _) in zip(reports.values(), pages, strict=True):
        if index["redacted"]:
            raise InputError(f"{report} is without texts and answers, which a comparison needs. Evaluate again.")
    places = [
        {(index["tests"][row["t"]], row["id"]): at for at, row in enumerate(index["questions"])} for index, _ in pages
    ]

    def is_one(key: tuple[str, str]) -> bool:
        both = [index["questions"][found[key]] for (index, _), found in zip(pages, places, strict=True)]
        return is_one_question([row["q"] for row in both], [row["r"] for row in both])

    shared = [key for key in places[0] if key in places[1] and is_one(key)]
    if not shared:
        raise InputError(f"The evaluations {' and '.join(reports)} hold no question in common.")
    names = [name for name in one["confidences"] if name in two["confidences"]]
    tests = list(dict.fromkeys(test for test, _ in shared))
    rows, merged = [], []
    for test, name in shared:
        at = [found[test, name] for found in places]
        first, second = (index["questions"][place] for (index, _), place in zip(pages, at, strict=True))
        answers = {answer: place for place, answer in enumerate(first["a"])}
        renamed = [answers.setdefault(answer, len(answers)) for answer in second["a"]]
        runs = [_chosen(index, row, names) for (index, _), row in zip(pages, (first, second), strict=True)]
        runs[1]["a"] = [-1 if answer < 0 else renamed[answer] for answer in runs[1]["a"]]
        rows.append({**first, "t": tests.index(test), "a": list(answers), "s": runs})
        both = texts[at[0]], others[at[1]]
        merged.append({name: [found[name][-1] for found in both] for name in ("s", "l")} | {"q": both[0]["q"]})
    numbers = [
        {**row, "system": name}
        for name, (index, _) in zip(reports, pages, strict=True)
        for row in index["numbers"]
        if row["system"] == index["systems"][-1] and row["test"] in tests
    ]
    index = {
        **one, "title": title, "systems": list(reports), "tests": tests, "confidences": names, "numbers": numbers,
        "coloured": bool(one.get("coloured") or two.get("coloured")), "questions": rows,
        "sentences": [f"{name}: {sentence}" for name, (index, _) in zip(reports, pages, strict=True)
                      for sentence in index["sentences"]],
    }  # fmt: skip
    _check_replaceable(path)
    _write(path, index, (merged[start : start + CHUNK] for start in range(0, len(merged), CHUNK)))
    return len(shared), len(places[0]) + len(places[1]) - 2 * len(shared)


def _chosen(index: Mapping[str, Any], row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the samples of the last system of a row, with these confidences."""
    run = row["s"][-1]
    if run is None:
        raise InputError(f"Question {row['id']!r} has no responses of {index['systems'][-1]}.")
    return {**run, "p": [run["p"][index["confidences"].index(name)] for name in names]}


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if not _is_report(path):
        raise InputError(f"{path} is not a report of this program.")
    found = {name: content for name, content in PACKED.findall(path.read_text(encoding="utf-8"))}
    try:
        parts = {name: json.loads(gzip.decompress(base64.b64decode(content))) for name, content in found.items()}
        index = parts.pop("index")
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise InputError(f"{path} is damaged: {error}. `selfcal evaluate` writes it again.") from error
    return index, [row for name in sorted(parts, key=lambda name: int(name[1:])) for row in parts[name]]


def _write(path: Path, index: Mapping[str, Any], chunks: Iterable[list[dict[str, Any]]]) -> None:
    plots, script = _asset("plot.js"), _asset("page.js")
    allowed = f"'sha256-{_digest(plots)}' 'sha256-{_digest(script)}'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomically(path) as file:
        for part in (
            f'<!doctype html>\n{MARK}\n<html lang="en"><head><meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            f"<title>{html.escape(str(index['title']))}</title>\n<style>\n{_asset('page.css')}</style></head>\n",
            '<body><div id="app"></div>\n',
            f'<script type="text/plain" id="index">{_packed(index)}</script>\n',
        ):
            file.write(part.encode())
        for number, texts in enumerate(chunks):
            file.write(f'<script type="text/plain" id="c{number}">{_packed(texts)}</script>\n'.encode())
        file.write(f'<script>{plots}</script>\n<script type="module">{script}</script>\n</body></html>\n'.encode())


def _check_replaceable(path: Path) -> None:
    if path.exists() and not _is_report(path):
        raise InputError(f"{path} exists and is not a report. Name another file.")


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
                "p": [
                    [None if (value := confidence_of(s, name)) is None else round(value, 6) for s in samples]
                    for name in confidences
                ],
                "n": [s.num_tokens for s in samples],
                "f": [int(s.finish == "length") for s in samples],
            }
        )
    return {
        "t": test,
        "k": question.task,
        "id": question.id,
        "q": question.id if redact else " ".join(question.text.split())[:SHOWN_CHARACTERS],
        "r": None if redact else question.reference,
        "a": [f"answer {place + 1}" for place in answers.values()] if redact else list(answers),
        "s": runs,
    }


def _texts(
    part: Sequence[Sequence[QuestionSamples | None]], colours: Iterator[list[TokenColours]]
) -> list[dict[str, Any]]:
    rows = []
    for groups in part:
        question = next(group.question for group in groups if group is not None)
        rows.append({
            "q": _cut("\n\n".join(message.content for message in question.messages) or question.text),
            "s": [None if group is None else [_cut(sample.text) for sample in group.samples] for group in groups],
            "l": [None if group is None else next(colours, None) for group in groups],
        })  # fmt: skip
    return rows


def _cut(text: str) -> str:
    left = len(text) - LONGEST_TEXT
    return text if left <= 0 else f"{text[:LONGEST_TEXT]}\n[{left:,} more characters]"


def _numbers(tests: Tests, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for test, pools in tests.items():
        is_pair = f"own.{test}.ece.change" in results  # two systems are before and after, whatever they are called
        for side, (system, pool) in zip(SIDES if is_pair else pools, pools.items(), strict=True):
            keys = {name: f"own.{test}.{name}.{side}" for name in METRICS}
            values = {name: [results.get(f"{key}{end}") for end in ("", ".low", ".high")] for name, key in keys.items()}
            number = sum(len(entry.samples) for entry in pool.entries)
            counts = {"questions": len(pool.entries), "responses": number}
            rows.append({"test": test, "system": system, **counts, **values})
    return rows
