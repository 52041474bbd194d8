"""``make report-capability``: how well we know the bundled model's capability before it answers."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _capability_measures import AWAKE, BEFORE, LABELLED, LEFT_OUT, PROBE, READ, TAUGHT, assemble, run_seed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.study import TESTS, TITLES, Options, Study
from shared.tables import section, show, table

from selfcal_lightning.capability.budgets import SEQUENTIAL, UNIFORM
from selfcal_lightning.capability.evaluation import LEAST_JUDGES, ORACLE
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE
from selfcal_lightning.metrics.drawing import AFTER, GREY, RIGHT, WRONG, frame
from selfcal_lightning.metrics.drawing import BEFORE as BLUE

SIZES = {
    "train": (2000, "training questions"),
    "train_samples": (10, "responses to each"),
    "id": (300, "test questions in domain"),
    "ood": (150, "test questions out of domain"),
    "calibration": (200, "labelled questions for maps"),
    "num_samples": (16, "responses to test and calibration questions"),
}


def complete(parser: argparse.ArgumentParser, plan: Options) -> None:
    if plan.num_samples < (least := READ + LEAST_JUDGES):
        parser.error(f"--num_samples must be at least {least}, got {plan.num_samples}.")


_show = partial(show, missing="–")
# Value and ends of an interval by key; a list of these for what has several budgets, shares or k.
Measured = Mapping[str, Any]
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
ABSTAINING = {PROBE: "label-free probe", LABELLED: "probe, fitted to labels", ORACLE: "oracle"}
TRAINED_ON = {
    "all": "all questions, all responses",
    "one response": "all questions, one response each",
    "few questions": "a tenth of the questions, all responses",
}


def as_markdown(report: Mapping[str, Any]) -> str:
    measured: Measured = report["measured"]
    parts = {
        "head": [head(report)],
        "targets": table(
            ["what must hold", "held to", "measured", ""],
            [[row["what"] or "the same", row["held_to"], _show(row["found"]), "met" if row["holds"] else "**missed**"]
             for row in report["checks"]],
        ),
        **split_tables(measured),
    }  # fmt: skip
    return "\n".join(line for name, text in parts.items() for line in section(name, text)).rstrip("\n") + "\n"


def head(report: Mapping[str, Any]) -> str:
    sizes, seeds = report["sizes"], ", ".join(map(str, report["seeds"]))
    samples, alone = sizes["samples"], len(report["seeds"]) == 1
    sentences = (
        f"Command: `{report['command']}` ({report['processor_minutes']:.0f} minutes of processor time).",
        f"{'Seed' if alone else 'Seeds'} {seeds}: a seed draws its own responses to the same questions.",
        f"{sizes['train']:,} training questions x {sizes['train_samples']} responses;",
        f"judged by {samples} responses each to {sizes['id']:,} questions in domain and {sizes['ood']:,} out of it;",
        f"maps are fitted on {sizes['calibration']:,} calibration questions x {samples}, with labels.",
        f"{'95 % intervals over questions' if alone else 'Means over seeds, 95 % intervals over questions and seeds'}.",
    )
    return " ".join(sentences)


def split_tables(measured: Measured) -> dict[str, list[str]]:
    shares, keys = (0.1, 0.2, 0.5), [f"{split}/lost/{name}" for split in TESTS for name in ABSTAINING]
    lost = {f"{key}/{share}": measured[key][LEFT_OUT.index(share)] for key in keys for share in shares}
    single = ((key, found) for key, found in {**measured, **lost}.items() if not isinstance(found[0], list))
    cells = {key: _show(found) for key, found in single}

    def by_split(heads: str, rows: Mapping[str, str], measures: Mapping[str, str], pattern: str) -> list[str]:
        """Return a table of the rows that were measured, with the measures of each split."""
        first, columns = heads.split(" | "), [(split, key) for split in TESTS for key in measures]
        head, found = [*first, *(f"{measures[key]}, {TITLES[split]}" for split, key in columns)], []
        for name, words in rows.items():
            shown = [cells.get(pattern.format(split, name, key), "") for split, key in columns]
            found.append(words.split(" | ") + shown)
        return table(head, [row for row in found if row[len(first)]])

    errors = {"curve error": "error of the curve", "pass@half": "error of the question, at half of the responses"}
    return {
        "estimates": by_split(
            "estimate | responses | labels",
            {one: f"{name} | {read} | {'yes' if labels else 'no'}" for one, (name, read, labels) in ESTIMATES.items()},
            {"mse": "MSE", "spearman": "Spearman", "ece": "ECE"}, "{}/{}/{}",
        ),
        "responses": by_split("confidence in a response", CONFIDENCES, {AUROC: "AUROC", ECE: "ECE", BRIER: "Brier"},
                              "{}/response/{}/{}"),
        "pass_at_k": by_split("pass@k of the label-free probe by", WAYS, errors, f"{{0}}/{PROBE}/{{2}}/{{1}}"),
        "budgets": budget_table(measured),
        "abstention": by_split("right responses lost by", ABSTAINING,
                               {str(share): f"{share:.0%} left out" for share in shares}, "{}/lost/{}/{}"),
        "sizes": by_split("probe, fitted to labels, on", TRAINED_ON, {"": "MSE"}, "{}/size/{}"),
    }  # fmt: skip


def budget_table(measured: Measured) -> list[str]:
    budgets = [int(row[0]) for row in measured["id/budgets"]]
    ways = [key.removeprefix("id/gain/") for key in measured if key.startswith("id/gain/")]
    tables = []
    for split in TESTS:
        rows = [["uniform allocation", *map(_show, measured[f"{split}/solved/{UNIFORM}"])]]
        for way in ways:
            if way != UNIFORM:
                gains = measured[f"{split}/gain/{way}"]
                rows.append([f"- {way}", *(_show(gain, "+") for gain in gains)])
        tables.append(table([f"solved, {TITLES[split]}", *(f"{budget} samples" for budget in budgets)], rows))
    return [*tables[0], "", *tables[1]]


def figure(report: Mapping[str, Any]) -> Figure:
    measured: Measured = report["measured"]
    drawn = Figure(figsize=(11.0, 8.4), layout="constrained")
    draw = (_draw_errors, _draw_curves, _draw_budgets, _draw_abstention)
    for axes, draw_on in zip(drawn.subplots(2, 2).flat, draw, strict=True):
        draw_on(axes, measured)
        frame(axes)
        axes.legend(fontsize=8, frameon=False)
    return drawn


def _draw_errors(axes: Axes, measured: Measured) -> None:
    names = [name for name in reversed(ESTIMATES) if f"id/{name}/mse" in measured]
    for split, colour, shift in (("id", AFTER, 0.13), ("ood", BLUE, -0.13)):
        for at, name in enumerate(names):
            value, *ends = measured[f"{split}/{name}/mse"]
            axes.plot(ends, [at + shift] * 2, color=GREY, linewidth=1.2)
            axes.plot(value, at + shift, "o", markersize=4, color=colour, label=TITLES[split] if not at else None)
    axes.set_yticks(range(len(names)), [f"{ESTIMATES[name][0]} ({ESTIMATES[name][1]})" for name in names], fontsize=7)
    axes.set(xlabel="squared error of capability", title="Estimates (responses that they read)")


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
    axes.set(xlabel="samples k", ylabel="pass@k", title="pass@k in domain")


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
    axes.set(xlabel="mean samples a question", ylabel="solved beyond a uniform allocation", title="Budgets in domain")


def _draw_abstention(axes: Axes, measured: Measured) -> None:
    for split, style in (("id", "-"), ("ood", "--")):
        for name, words, colour in ((PROBE, "label-free probe", AFTER), (ORACLE, "oracle", GREY)):
            lost = _values(measured[f"{split}/lost/{name}"])
            axes.plot(LEFT_OUT, lost, style, color=colour, marker="o", markersize=3, label=f"{words}, {TITLES[split]}")
    axes.plot((0.0, LEFT_OUT[-1]), (0.0, LEFT_OUT[-1]), ":", color="black", linewidth=0.8, label="at random")
    axes.set(xlabel="share of questions left out", ylabel="share of right responses lost", title="Abstention")


def _values(rows: Sequence[Sequence[float]]) -> list[float]:
    return [row[0] for row in rows]


STUDY = Study(
    "capability/report_capability.py", SIZES, lambda plan: [run_seed(plan, seed) for seed in plan.seeds], assemble,
    as_markdown, figure, complete=complete, image="report_capability.png",
    met=lambda _, report: all(row["holds"] for row in report["checks"]),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
