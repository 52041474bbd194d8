"""Confidences of a model that shows nothing but text, and what each costs, on stored responses.

    python benchmarks/serving/black_box.py --stores bundled=bundled:runs/demo/evaluation/samples/before:test_id
        smollm2=runs/real/smollm2:runs/demo-real/test:test --plugins examples/smollm/country_facts.py --annotations ...

Each response gets every confidence; costs are per answer: responses drawn, further requests, tokens of both. What a
model states is asked for as `selfcal serve` does. Brier scores are those after Platt scaling, fitted on the other four
fifths of the questions. With `--readers`, one model's server is asked about the responses of another.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from load import call, serving
from shared.estimates import metric_columns
from shared.study import RESULTS
from shared.tables import show, table, triple, write_report
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from selfcal_lightning.confidence.agreement import Cocoa, SemanticEntropy, SemanticShare, hybrid
from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE, STATED, confidence_of
from selfcal_lightning.confidence.verbalized import Verbalized
from selfcal_lightning.core.plugins import load_plugins
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.metrics.arrays import AUROC, BRIER
from selfcal_lightning.metrics.bootstrap import bootstrap_interval, estimate_of
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import QuestionSamples, Response

Pool = Sequence[QuestionSamples]
Scores = list[list[float | None]]
FOLDS = 5
AGREEMENT = {
    "share of equal answers": SemanticShare,
    "semantic entropy": SemanticEntropy,
    "CoCoA (needs log-probabilities)": Cocoa,
}


def in_groups(size: int, pool: Pool, score: Callable[[Pool], Scores]) -> Scores:
    """Score every response within its own group of ``size``, as a server that draws so many sees it."""
    rows: Scores = []
    for entry in pool:
        starts = range(0, len(entry.samples) - size + 1, size)
        groups = [replace(entry, samples=entry.samples[start : start + size]) for start in starts]
        rows.append([*chain(*score(groups)), *[None] * (len(entry.samples) % size)])
    return rows


def columns(pool: Pool, scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return score, verdict and cluster of each response: the country that a fact is about, else the question."""
    facts, names = pool[0].question.task == "country_facts", [entry.question.id for entry in pool]
    keys = [name.rsplit("/", 1)[-1].split("-")[0] if facts else name for name in names]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    clusters = [places[key] for key, entry in zip(keys, pool, strict=True) for _ in entry.samples]
    correct = [bool(sample.correct) for entry in pool for sample in entry.samples]
    return np.array([*chain(*scores)], dtype=float), np.array(correct), np.array(clusters)


def row(name: str, pool: Pool, scores: Scores, responses: int, requests: int, tokens: float) -> dict[str, Any]:
    """Measure a confidence on the responses that have it, and count the others."""
    whole = columns(pool, scores)
    known = ~np.isnan(whole[0])
    values, correct, cluster = (column[known] for column in whole)
    found = {"confidence": name, "responses": responses, "requests": requests, "tokens": round(tokens, 1),
             "missing": round(1 - float(known.mean()), 4), "auroc": [None] * 3, "brier": [None] * 3}  # fmt: skip
    if len(set(correct)) == 2:
        model, folds = LogisticRegression(C=1e6), PredefinedSplit(cluster % FOLDS)
        measured = {"auroc": (values, AUROC)}
        with suppress(ValueError):  # the other folds may all be right
            scaled = cross_val_predict(model, values[:, None], correct, cv=folds, method="predict_proba")[:, 1]
            measured["brier"] = scaled, BRIER
        for key, (column, metric) in measured.items():
            found[key] = triple(bootstrap_interval(column, correct, cluster, metrics=[metric])[metric])
    return found


def measure(model: str, store: str, split: str, shown: Sequence[str], limit: int | None) -> dict[str, Any]:
    names = [name for name in annotation_names(store) if name in shown]
    pool = load_recorded_pool(store, split=split, confidences=names, token_ids=True, limit=limit).entries
    chat = load_chat(EngineOptions(), model, query=DEFAULT_QUERY)
    engine, lengths = open_engine(EngineOptions(), model, chat=chat), list[int]()
    poll = engine.poll

    def counted() -> list[Response]:
        found = poll()
        lengths.extend(len(response.token_ids) for response in found)
        return found

    engine.poll = counted
    stated = Verbalized(engine, chat, max_new_tokens=64).score(pool)
    each, asked = mean_tokens(pool), statistics.fmean(lengths or [0])
    told = []
    for entry, values in zip(pool, stated, strict=True):
        samples = zip(entry.samples, values, strict=True)
        told.append(replace(entry, samples=tuple(replace(one, confidences={STATED: value}) for one, value in samples)))

    def both(groups: Pool) -> Scores:
        told = ([(one.answer, one.confidences[STATED]) for one in group.samples] for group in groups)
        return [hybrid(*zip(*pairs, strict=True)) for pairs in told]

    rows = [
        row("verbalised", pool, stated, 1, 1, each + asked),
        row("two-sample hybrid", pool, in_groups(2, told, both), 2, 2, 2 * (each + asked)),
    ]
    for size in (2, 4, 8):
        for title, estimator in AGREEMENT.items():
            rows.append(row(f"{title}, {size}", pool, in_groups(size, pool, estimator.score), size, 0, size * each))
    read = {"likelihood (needs log-probabilities)": MEAN_LOGPROB, "P(True), base model (needs token ids)": P_TRUE}
    for title, name in (read | {f"{name}, calibrated": name for name in names}).items():
        asks = name != MEAN_LOGPROB
        rows.append(row(title, pool, recorded(pool, name), 1, int(asks), each + asks * len(chat.query.suffix_ids)))
    return described(model, split, pool, rows)


def read_by_another(reader: str, adapter: str, store: str, split: str, limit: int | None) -> dict[str, Any]:
    """Ask `/v1/confidence` of a server of ``reader`` about the stored responses of another model."""
    pool = load_recorded_pool(store, split=split, limit=limit).entries
    scores: Scores = []
    with serving("--model", reader, "--adapter", adapter, "--name", "reader"):
        for entry in pool:
            messages = [{"role": message.role, "content": message.content} for message in entry.question.messages]
            bodies = ({"model": "reader", "messages": messages, "response": s.text} for s in entry.samples)
            scores.append([json.loads(call("/v1/confidence", body))["confidence"] for body in bodies])
    each, likelihood = mean_tokens(pool), recorded(pool, MEAN_LOGPROB)
    rows = [
        row("read by the other model, /v1/confidence", pool, scores, 1, 1, each),
        row("own likelihood (needs log-probabilities)", pool, likelihood, 1, 0, each),
    ]
    resampled = (metric_columns(columns(pool, one), [AUROC], num_resamples=1000) for one in (scores, likelihood))
    first, second = (found[AUROC] for found in resampled)
    return described(reader, split, pool, rows) | {"above": triple(estimate_of(first - second))}


def recorded(pool: Pool, name: str) -> Scores:
    return [[confidence_of(sample, name) for sample in entry.samples] for entry in pool]


def mean_tokens(pool: Pool) -> float:
    return statistics.fmean(sample.num_tokens or 0 for entry in pool for sample in entry.samples)


def described(model: str, split: str, pool: Pool, rows: list[dict[str, Any]]) -> dict[str, Any]:
    verdicts = [bool(sample.correct) for entry in pool for sample in entry.samples]
    facts = {"model": model, "split": split, "questions": len(pool), "responses": len(verdicts)}
    return facts | {"right": round(statistics.fmean(verdicts), 4), "rows": rows}


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
    load_plugins(given.plugins)
    file, command = RESULTS / "black_box.json", " ".join(["python", *sys.argv])
    stores = json.loads(file.read_text())["stores"] if file.exists() else {}  # of other commands
    for text in given.stores:
        name, _, rest = text.partition("=")
        stores[name] = measure(*rest.split(":"), given.annotations, given.limit) | {"command": command}
    for text in given.readers:
        name, _, rest = text.partition("=")
        stores[name] = read_by_another(*rest.split(":"), given.limit) | {"command": command}
    report = {"stores": stores}
    write_report(RESULTS, "black_box", report, as_markdown(report), indent=1)


if __name__ == "__main__":
    main()
