"""Confidences of a model that shows nothing but text, and what each costs, on stored responses.

    python benchmarks/serving/black_box.py --stores bundled=bundled:runs/demo/evaluation/samples/before:test_id
        smollm2=runs/real/smollm2:runs/demo-real/test:test --plugins examples/smollm/country_facts.py --annotations ...

Each response gets every confidence; costs are per answer: responses drawn, further requests, tokens of both. What a
model states is asked for as `selfcal serve` does. Brier scores are those after Platt scaling, fitted on the other four
fifths of the questions. With `--readers`, `/v1/confidence` of one
model's server is asked about the responses of another.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from load import call, serving
from shared.estimates import metric_columns
from shared.study import RESULTS
from shared.tables import show, table, triple, write_report
from sklearn.linear_model import LogisticRegression

from selfcal_lightning.confidence.agreement import Cocoa, SemanticEntropy, SemanticShare, hybrid
from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.verbalized import Verbalized
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.metrics.arrays import AUROC, BRIER
from selfcal_lightning.metrics.bootstrap import bootstrap_interval, estimate_of
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import QuestionSamples, Request, Response

Scores = list[list[float | None]]
FOLDS = 5
AGREEMENT = {
    "share of equal answers": SemanticShare(),
    "semantic entropy": SemanticEntropy(),
    "CoCoA (needs log-probabilities)": Cocoa(),
}


class Counting:
    """An engine that counts what it is asked and what it draws."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.requests, self.tokens = engine, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, requests: Sequence[Request]) -> list[str]:
        self.requests += len(requests)
        return self.engine.submit(requests)

    def poll(self) -> list[Response]:
        found = self.engine.poll()
        self.tokens += sum(len(response.token_ids) for response in found)
        return found


def in_groups(size: int, pool: Sequence[QuestionSamples], score: Callable[[list[QuestionSamples]], Scores]) -> Scores:
    """Score every response within its own group of ``size``, as a server that draws so many sees it."""
    rows: Scores = []
    for entry in pool:
        starts = range(0, len(entry.samples) - size + 1, size)
        groups = [replace(entry, samples=entry.samples[start : start + size]) for start in starts]
        values = [value for row in score(groups) for value in row]
        rows.append([*values, *[None] * (len(entry.samples) - len(values))])
    return rows


def scaled(values: np.ndarray, correct: np.ndarray, question: np.ndarray) -> np.ndarray:
    """Return Platt-scaled confidences, each fitted without the questions of its own fold."""
    found = np.full(len(values), correct.mean())
    for fold in range(FOLDS):
        held = question % FOLDS == fold
        if len(set(correct[~held])) == 2:
            fitted = LogisticRegression(C=1e6).fit(values[~held, None], correct[~held])
            found[held] = fitted.predict_proba(values[held, None])[:, 1]
    return found


def clusters(pool: Sequence[QuestionSamples]) -> list[int]:
    """Return what resamples and folds keep together: the country that facts are about, else the question."""
    names = [entry.question.id for entry in pool]
    facts = pool[0].question.task == "country_facts"
    keys = [name.rsplit("/", 1)[-1].split("-")[0] if facts else name for name in names]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def row(
    name: str, pool: Sequence[QuestionSamples], scores: Scores, responses: int, requests: int, tokens: float
) -> dict[str, Any]:
    """Measure a confidence on the responses that have it, and count the others."""
    cells = [
        (value, bool(sample.correct), number)
        for number, entry, values in zip(clusters(pool), pool, scores, strict=True)
        for sample, value in zip(entry.samples, values, strict=True)
        if value is not None
    ]
    total = sum(len(entry.samples) for entry in pool)
    found: dict[str, Any] = {
        "confidence": name, "responses": responses, "requests": requests, "tokens": round(tokens, 1),
        "missing": round(1 - len(cells) / total, 4),
    }  # fmt: skip
    if len({right for _, right, _ in cells}) < 2:
        return found | {"auroc": [None, None, None], "brier": [None, None, None]}
    values, correct, question = (np.array(column) for column in zip(*cells, strict=True))
    probability = scaled(values.astype(float), correct, question)
    return found | {
        key: triple(bootstrap_interval(column, correct, question, metrics=[metric], num_resamples=1000)[metric])
        for key, column, metric in (("auroc", values.astype(float), AUROC), ("brier", probability, BRIER))
    }


def measure(model: str, store: str, split: str, shown: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Return the table of one store."""
    names = [name for name in annotation_names(store) if name in shown]
    pool = list(load_recorded_pool(store, split=split, confidences=names, token_ids=True, limit=limit).entries)
    options = EngineOptions()
    chat = load_chat(options, model, query=DEFAULT_QUERY)
    engine = Counting(open_engine(options, model, chat=chat))
    stated = Verbalized(engine, chat, max_new_tokens=64).score(pool)
    each, asked = mean_tokens(pool), engine.tokens / max(engine.requests, 1)

    numbers = {
        (entry.question.id, sample.index): value
        for entry, values in zip(pool, stated, strict=True)
        for sample, value in zip(entry.samples, values, strict=True)
    }

    def both(groups: list[QuestionSamples]) -> Scores:
        return [
            hybrid([s.answer for s in group.samples], [numbers[group.question.id, s.index] for s in group.samples])
            for group in groups
        ]

    read = {
        "likelihood (needs log-probabilities)": "mean_logprob",
        "P(True), base model (needs token ids)": "p_true",
        **{f"{name}, calibrated": name for name in names},
    }
    rows = [
        row("verbalised", pool, stated, 1, 1, each + asked),
        row("two-sample hybrid", pool, in_groups(2, pool, both), 2, 2, 2 * (each + asked)),
    ]
    for size in (2, 4, 8):
        for title, estimator in AGREEMENT.items():
            scores = in_groups(size, pool, estimator.score)
            rows.append(row(f"{title}, {size}", pool, scores, size, 0, size * each))
    for title, name in read.items():
        scores = [[confidence_of(sample, name) for sample in entry.samples] for entry in pool]
        asks = name != "mean_logprob"
        rows.append(row(title, pool, scores, 1, int(asks), each + asks * len(chat.query.suffix_ids)))
    return {**described(model, split, pool), "rows": rows}


def read_by_another(reader: str, adapter: str, store: str, split: str, limit: int | None) -> dict[str, Any]:
    """Ask `/v1/confidence` of a server of ``reader`` about the stored responses of another model."""
    pool = list(load_recorded_pool(store, split=split, limit=limit).entries)
    scores: Scores = []
    with serving("--model", reader, "--adapter", adapter, "--name", "reader"):
        for entry in pool:
            messages = [{"role": message.role, "content": message.content} for message in entry.question.messages]
            bodies = ({"model": "reader", "messages": messages, "response": s.text} for s in entry.samples)
            scores.append([json.loads(call("/v1/confidence", body))["confidence"] for body in bodies])
    each = mean_tokens(pool)
    likelihood = [[confidence_of(sample, "mean_logprob") for sample in entry.samples] for entry in pool]
    rows = [
        row("read by the other model, /v1/confidence", pool, scores, 1, 1, each),
        row("own likelihood (needs log-probabilities)", pool, likelihood, 1, 0, each),
    ]
    return {**described(reader, split, pool), "rows": rows, "above": above(pool, scores, likelihood)}


def mean_tokens(pool: Sequence[QuestionSamples]) -> float:
    return statistics.fmean(sample.num_tokens or 0 for entry in pool for sample in entry.samples)


def described(model: str, split: str, pool: Sequence[QuestionSamples]) -> dict[str, Any]:
    verdicts = [bool(sample.correct) for entry in pool for sample in entry.samples]
    right = round(statistics.fmean(verdicts), 4)
    return {"model": model, "split": split, "questions": len(pool), "responses": len(verdicts), "right": right}


def above(pool: Sequence[QuestionSamples], scores: Scores, others: Scores) -> list[float | None]:
    """Return by how much the AUROC of one confidence is above another's, on the same resamples."""
    numbers = [number for number, entry in zip(clusters(pool), pool, strict=True) for _ in entry.samples]
    correct = [bool(sample.correct) for entry in pool for sample in entry.samples]

    def flat(one: Scores) -> np.ndarray:
        return np.array([value for values in one for value in values], dtype=float)

    first, second = (
        metric_columns((flat(one), np.array(correct), np.array(numbers)), [AUROC], num_resamples=1000)[AUROC]
        for one in (scores, others)
    )
    return triple(estimate_of(first - second))


def as_markdown(report: dict[str, Any]) -> str:
    heads = ("confidence", "responses", "further requests", "tokens", "missing", "AUROC", "Brier, scaled")
    lines = ["# Confidences of models behind an API", ""]
    for name, found in report["stores"].items():
        size = f"{found['questions']} questions, {found['responses']} responses, {found['right']:.1%} right."
        lines += [f"## {name}", "", f"`{found['command']}`", "", size, ""]
        rows = [
            [r["confidence"], str(r["responses"]), f"{r['requests']:g}", f"{r['tokens']:.0f}", f"{r['missing']:.0%}",
             show(r["auroc"], missing="-"), show(r["brier"], missing="-")]
            for r in found["rows"]
        ]  # fmt: skip
        lines += table(heads, rows)
        if "above" in found:
            lines += ["", f"AUROC of the reader above the likelihood, paired: {show(found['above'], '+')}."]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", nargs="*", default=[], help="NAME=MODEL:FOLDER:SPLIT")
    parser.add_argument("--readers", nargs="*", default=[], help="NAME=MODEL:ADAPTER:FOLDER:SPLIT")
    parser.add_argument("--annotations", nargs="*", default=[], help="calibrated confidences to show, by name")
    parser.add_argument("--limit", type=int, help="questions of each store")
    parser.add_argument("--plugins", nargs="*", default=[])
    given = parser.parse_args()
    if given.plugins:
        from selfcal_lightning.core.plugins import load_plugins

        load_plugins(given.plugins)
    command = " ".join(["python", *sys.argv])
    file = RESULTS / "black_box.json"
    stores = json.loads(file.read_text())["stores"] if file.exists() else {}  # of other commands
    for text in given.stores:
        name, _, rest = text.partition("=")
        model, folder, split = rest.split(":")
        stores[name] = measure(model, folder, split, given.annotations, given.limit) | {"command": command}
    for text in given.readers:
        name, _, rest = text.partition("=")
        stores[name] = read_by_another(*rest.split(":"), given.limit) | {"command": command}
    report = {"stores": stores}
    write_report(RESULTS, "black_box", report, as_markdown(report), indent=1)


if __name__ == "__main__":
    main()
