"""``make report-capability``: how well we know the bundled model's capability before it answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _capability_measures import (
    AWAKE,
    BEFORE,
    LABELLED,
    LEFT_OUT,
    PROBE,
    READ,
    TAUGHT,
    Columns,
    confidence_columns,
    measure_seed,
    processor_seconds,
    run_seed,
    size_columns,
    targets,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.estimates import Column, column_over_seeds, estimated
from shared.jobs import seconds_of
from shared.study import TESTS, Options, Study
from shared.tables import section, triple

from selfcal_lightning.capability.budgets import SEQUENTIAL, UNIFORM
from selfcal_lightning.capability.evaluation import ORACLE
from selfcal_lightning.evaluation.tables import format_estimate
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.metrics.drawing import AFTER, GREY, RIGHT, WRONG, frame
from selfcal_lightning.metrics.drawing import BEFORE as BLUE

# Seconds of a prompt's pass are small numbers.
DIGITS = 5
SIZES = {
    "train": (2000, "training questions"),
    "train_samples": (10, "responses to each"),
    "id": (300, "test questions in domain"),
    "ood": (150, "test questions out of domain"),
    "calibration": (200, "labelled questions for maps"),
    "num_samples": (16, "responses to test and calibration questions"),
}


def run_jobs(plan: Options) -> None:
    for seed in plan.seeds:
        run_seed(plan, seed)


def assemble(plan: Options) -> dict[str, Any]:
    columns = over_seeds([_measured(plan.folder(seed)) for seed in plan.seeds])
    seconds = _timed(plan)
    checks = targets(columns, seconds=seconds)
    return {
        **dict.fromkeys(("seeds", "taught_seeds", "awake_seeds"), plan.seeds),
        "sizes": {**plan.sizes("train", "train_samples"), "samples": plan.num_samples, **plan.parts},
        "processor_minutes": sum(sum(seconds_of(plan.folder(seed)).values()) for seed in plan.seeds) / 60.0,
        "seconds": {"a prompt's states": seconds[0], "a response": seconds[1]},
        "checks": [{**asdict(check), "found": triple(check.found, digits=DIGITS)} for check in checks],
        "measured": {key: _plain(column) for key, column in columns.items()},
    }


def over_seeds(found: Sequence[Columns]) -> Columns:
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: column_over_seeds([one[key] for one in found if key in one]) for key in keys}


def _measured(folder: Path) -> Columns:
    return measure_seed(folder) | size_columns(folder) | confidence_columns(folder)


def _timed(plan: Options) -> tuple[float, float]:
    file = plan.output / "seconds.json"
    if not file.exists():
        file.write_text(json.dumps(processor_seconds()))
    reading, answering = json.loads(file.read_text())
    return reading, answering


def _plain(column: Column) -> Any:
    if not isinstance(column, ErrorBounds) and column.ndim > 1:
        return [_plain(row) for row in column]
    return triple(estimated(column), digits=DIGITS)


# Value and ends of an interval by key; a list of these for what has several budgets, shares or k.
Measured = Mapping[str, Any]
WORDS = {"id": "in domain", "ood": "out of domain"}
MAPPED = " + isotonic"
# Name of each estimate, the responses that it reads, and whether labels are needed.
ESTIMATES: Mapping[str, tuple[str, int, bool]] = {
    PROBE: ("label-free probe", 0, False),
    LABELLED: ("probe, fitted to labels", 0, True),
    PROBE + MAPPED: ("label-free probe, isotonic", 0, True),
    TAUGHT: ("P(True) before answering, taught without labels", 0, False),
    BEFORE: ("P(True) before answering, untaught", 0, False),
    BEFORE + MAPPED: ("P(True) before answering, untaught, isotonic", 0, True),
    "agreeing_pairs": ("agreeing pairs", READ, False),
    "agreeing_pairs" + MAPPED: ("agreeing pairs, isotonic", READ, True),
    "top_share": ("share of the top answer", READ, False),
    "top_share" + MAPPED: ("share of the top answer, isotonic", READ, True),
    "mean_logprob" + MAPPED: ("mean log-probability, isotonic", READ, True),
    "p_true": ("P(True) after answering, of the base model", READ, False),
    "p_true" + MAPPED: ("P(True) after answering, of the base model, isotonic", READ, True),
    AWAKE: ("P(True) after answering, self-calibrated", READ, False),
    "verdict": ("the verdict on one response", 1, True),
    "constant": ("the best constant", 0, True),
}
WAYS = {"power": "1 - (1 - p)^k", "beta": "a Beta distribution", "inflated_beta": "an inflated Beta distribution",
        "maps": "an isotonic map for each k"}  # fmt: skip
CONFIDENCES = {PROBE: "label-free probe", "p_true": "P(True) of the base model", AWAKE: "P(True), self-calibrated"}


def as_markdown(report: Mapping[str, Any]) -> str:
    measured: Measured = report["measured"]
    parts = {
        "head": head(report),
        "targets": _table(
            ["what must hold", "held to", "measured", ""],
            [[row["what"] or "the same", row["held_to"], _shown(row["found"]), "met" if row["holds"] else "**missed**"]
             for row in report["checks"]],
        ),
        "estimates": estimate_table(measured),
        "responses": confidence_table(measured),
        "pass_at_k": pass_at_k_table(measured),
        "budgets": budget_table(measured),
        "abstention": abstention_table(measured),
        "sizes": size_table(measured),
    }  # fmt: skip
    return "\n".join(line for name, text in parts.items() for line in section(name, [text])).rstrip("\n") + "\n"


def head(report: Mapping[str, Any]) -> str:
    sizes, seeds = report["sizes"], ", ".join(map(str, report["seeds"]))
    taught, awake = (", ".join(map(str, report[name])) or "none" for name in ("taught_seeds", "awake_seeds"))
    samples, alone = sizes["samples"], len(report["seeds"]) == 1
    sentences = (
        f"Command: `{report['command']}` ({report['processor_minutes']:.0f} minutes of processor time).",
        f"{'Seed' if alone else 'Seeds'} {seeds}: a seed draws its own responses to the same questions.",
        f"{sizes['train']:,} training questions x {sizes['train_samples']} responses;",
        f"judged by {samples} responses each to {sizes['id']:,} questions in domain and {sizes['ood']:,} out of it;",
        f"maps are fitted on {sizes['calibration']:,} calibration questions x {samples}, with labels.",
        f"{'95 % intervals over questions' if alone else 'Means over seeds, 95 % intervals over questions and seeds'}.",
        f"Of seeds with trained adapters alone: P(True) before answering, taught ({taught}); P(True) after answering, "
        f"self-calibrated ({awake}).",
    )
    return " ".join(sentences)


def estimate_table(measured: Measured) -> str:
    rows = [
        [words, str(samples), "yes" if labels else "no",
         *(_cell(measured, f"{split}/{name}/{measure}") for split in TESTS for measure in ("mse", "spearman", "ece"))]
        for name, (words, samples, labels) in ESTIMATES.items()
        if f"id/{name}/mse" in measured
    ]  # fmt: skip
    measures = [f"{name}, {WORDS[split]}" for split in TESTS for name in ("MSE", "Spearman", "ECE")]
    return _table(["estimate", "responses", "labels", *measures], rows)


def confidence_table(measured: Measured) -> str:
    rows = [
        [words, *(_cell(measured, f"{split}/response/{name}/{measure}") for split in TESTS
                  for measure in (AUROC, ECE, BRIER))]
        for name, words in CONFIDENCES.items()
        if f"id/response/{name}/{AUROC}" in measured
    ]  # fmt: skip
    measures = [f"{name}, {WORDS[split]}" for split in TESTS for name in ("AUROC", "ECE", "Brier")]
    return _table(["confidence in a response", *measures], rows)


def pass_at_k_table(measured: Measured) -> str:
    measures = {"curve error": "curve", "pass@half": "question, at half of the responses"}
    rows = [
        [words, *(_cell(measured, f"{split}/{PROBE}/{key}/{way}") for split in TESTS for key in measures)]
        for way, words in WAYS.items()
    ]
    headings = [f"error of the {words}, {WORDS[split]}" for split in TESTS for words in measures.values()]
    return _table(["pass@k of the label-free probe by", *headings], rows)


def budget_table(measured: Measured) -> str:
    budgets = [int(row[0]) for row in measured["id/budgets"]]
    ways = [key.removeprefix("id/gain/") for key in measured if key.startswith("id/gain/")]
    tables = []
    for split in TESTS:
        rows = [["uniform allocation", *map(_shown, measured[f"{split}/solved/{UNIFORM}"])]]
        for way in ways:
            if way != UNIFORM:
                gains = measured[f"{split}/gain/{way}"]
                rows.append([f"- {way}", *(_shown(gain, signed=True) for gain in gains)])
        tables.append(_table([f"solved, {WORDS[split]}", *(f"{budget} samples" for budget in budgets)], rows))
    return "\n\n".join(tables)


def abstention_table(measured: Measured) -> str:
    shown = [share for share in LEFT_OUT if share in (0.1, 0.2, 0.5)]
    rows = [
        [words, *(_shown(measured[f"{split}/lost/{name}"][LEFT_OUT.index(share)])
                  for split in TESTS for share in shown)]
        for name, words in ((PROBE, "label-free probe"), (LABELLED, "probe, fitted to labels"), (ORACLE, "oracle"))
    ]  # fmt: skip
    headings = [f"{share:.0%} left out, {WORDS[split]}" for split in TESTS for share in shown]
    return _table(["right responses lost by", *headings], rows)


def size_table(measured: Measured) -> str:
    kinds = {"all": "all questions, all responses", "one response": "all questions, one response each",
             "few questions": "a tenth of the questions, all responses"}  # fmt: skip
    rows = [[words, *(_cell(measured, f"{split}/size/{kind}") for split in TESTS)] for kind, words in kinds.items()]
    return _table(["probe, fitted to labels, on", *(f"MSE, {WORDS[split]}" for split in TESTS)], rows)


def figure(report: Mapping[str, Any]) -> Figure:
    measured: Measured = report["measured"]
    drawn = Figure(figsize=(11.0, 8.4), layout="constrained")
    (errors, curves), (budgets, abstention) = drawn.subplots(2, 2)
    _draw_errors(errors, measured)
    _draw_curves(curves, measured)
    _draw_budgets(budgets, measured)
    _draw_abstention(abstention, measured)
    return drawn


def _draw_errors(axes: Axes, measured: Measured) -> None:
    names = [name for name in reversed(ESTIMATES) if f"id/{name}/mse" in measured]
    for split, colour, shift in (("id", AFTER, 0.13), ("ood", BLUE, -0.13)):
        for at, name in enumerate(names):
            value, *ends = measured[f"{split}/{name}/mse"]
            axes.plot(ends, [at + shift] * 2, color=GREY, linewidth=1.2)
            axes.plot(value, at + shift, "o", markersize=4, color=colour, label=WORDS[split] if not at else None)
    axes.set_yticks(range(len(names)), [f"{ESTIMATES[name][0]} ({ESTIMATES[name][1]})" for name in names], fontsize=7)
    frame(axes)
    axes.set(xlabel="squared error of capability", title="Estimates (responses that they read)")
    axes.legend(fontsize=8, frameon=False)


def _draw_curves(axes: Axes, measured: Measured) -> None:
    shown = _values(measured["id/pass@k/shown"])
    ks = [2**power for power in range(len(shown))]
    for (way, words), colour in zip(WAYS.items(), (WRONG, AFTER, GREY, BLUE), strict=True):
        style = "--" if way == "inflated_beta" else "-"  # which the Beta distribution may lie on
        values = _values(measured[f"id/{PROBE}/pass@k/{way}"])
        axes.plot(ks, values, style, color=colour, linewidth=1.6, label=f"probe, {words}")
    axes.plot(ks, shown, "o", color="black", markersize=5, label="the responses")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    frame(axes)
    axes.set(xlabel="samples k", ylabel="pass@k", title="pass@k in domain")
    axes.legend(fontsize=8, frameon=False)


def _draw_budgets(axes: Axes, measured: Measured) -> None:
    budgets = _values(measured["id/budgets"])
    ways = {
        f"{PROBE}, Beta gain": ("plan by the label-free probe", AFTER),
        f"{LABELLED}, Beta gain": ("plan by the labelled probe", BLUE),
        ORACLE: ("plan by the verdicts (oracle)", GREY),
        SEQUENTIAL: ("one at a time, no probe", RIGHT),
        f"{PROBE}, {SEQUENTIAL}": ("one at a time, label-free probe", WRONG),
    }
    for way, (words, colour) in ways.items():
        values, low, high = zip(*measured[f"id/gain/{way}"], strict=True)
        axes.plot(budgets, values, "o-", markersize=4, color=colour, label=words)
        axes.fill_between(budgets, low, high, alpha=0.12, color=colour, linewidth=0)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:.0f}" for budget in budgets])
    frame(axes)
    axes.set(xlabel="mean samples a question", ylabel="solved beyond a uniform allocation", title="Budgets in domain")
    axes.legend(fontsize=8, frameon=False)


def _draw_abstention(axes: Axes, measured: Measured) -> None:
    for split, style in (("id", "-"), ("ood", "--")):
        for name, words, colour in ((PROBE, "label-free probe", AFTER), (ORACLE, "oracle", GREY)):
            lost = _values(measured[f"{split}/lost/{name}"])
            axes.plot(LEFT_OUT, lost, style, color=colour, marker="o", markersize=3, label=f"{words}, {WORDS[split]}")
    axes.plot((0.0, LEFT_OUT[-1]), (0.0, LEFT_OUT[-1]), ":", color="black", linewidth=0.8, label="at random")
    frame(axes)
    axes.set(xlabel="share of questions left out", ylabel="share of right responses lost", title="Abstention")
    axes.legend(fontsize=8, frameon=False)


def _cell(measured: Measured, key: str) -> str:
    return _shown(measured[key]) if key in measured else ""


def _shown(found: Sequence[float | None], *, signed: bool = False) -> str:
    return format_estimate(Estimate(*found), signed=signed)


def _values(rows: Sequence[Sequence[float]]) -> list[float]:
    return [row[0] for row in rows]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


STUDY = Study(
    "capability/report_capability.py", SIZES, run_jobs, assemble, as_markdown, figure,
    image="report_capability.png", met=lambda _, report: all(row["holds"] for row in report["checks"]),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
