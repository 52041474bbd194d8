"""``make report``: nothing, activated and joint on the bundled model, and what a sceptic would use instead.

The base model's responses are sampled once a seed; the activated adapter scores them, and only the joint model samples
its own.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from _report_confidences import (
    ACTIVATED,
    BASE,
    CONTENDERS,
    JOINT,
    PLAIN,
    Contender,
    Plan,
    fit_on,
    label_of,
    mean_tokens,
    measure_seconds,
    read_pool,
    run_seed,
    savings,
    vote_curves,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.estimates import Measured, difference, mean_over_seeds, summary
from shared.study import TESTS, Study
from shared.tables import Criterion, criteria_table, exactly, held, section, show, table, triple
from shared.timing import measured_once

from selfcal_lightning.confidence.base import scored_pool
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.curves import powers_of_two
from selfcal_lightning.evaluation.metrics import SHORT_NAMES, scored_responses
from selfcal_lightning.metrics.arrays import AUROC, ECE, Floats
from selfcal_lightning.metrics.bootstrap import estimate_of

SIZES = {
    "training": (1000, "training questions, 10 responses each"),
    "id": (1000, "in-domain test questions"),
    "ood": (500, "out-of-domain test questions"),
    "calibration": (200, "questions for what is fitted to labels"),
    "num_samples": (16, "responses per test question, at least 8"),
    "asleep": (50, "questions sampled again with the sleeping adapter"),
    "workers": (2, "jobs at a time"),
    "threads": (1, "threads of a job"),
}


def complete(parser: argparse.ArgumentParser, plan: Plan) -> None:
    if plan.num_samples < max(SIZES_OF_VOTES):
        parser.error(f"--num_samples must be at least {max(SIZES_OF_VOTES)}, got {plan.num_samples}.")


def run_jobs(plan: Plan) -> None:
    with ThreadPoolExecutor(plan.workers) as pool:
        list(pool.map(partial(run_seed, plan), plan.seeds))


def assemble(plan: Plan) -> dict[str, Any]:
    seeds = plan.seeds
    pools = {(seed, test): read_fitted(plan, seed, test) for seed in seeds for test in TESTS}
    rows = {
        test: {
            one.key: [
                Measured.of(scored_responses(pools[seed, test][one.generator].entries, name=one.confidence))
                for seed in seeds
            ]
            for one in CONTENDERS
        }
        for test in TESTS
    }
    curves = {}
    for test in TESTS:
        found = [vote_curves(pools[seed, test]) for seed in seeds]
        curves[test] = {key: mean_over_seeds(np.array([row[key] for row in found])) for key in found[0]}
    adapter, joint = plan.place(seeds[0], ACTIVATED) / "adapter", plan.place(seeds[0], JOINT) / "calibrated"
    seconds = measured_once(plan.output / "seconds.json", partial(measure_seconds, adapter, joint))
    sizes = powers_of_two(plan.num_samples)
    targets = [size for size in (4, 8, 16) if size <= plan.num_samples]
    tokens = {
        test: {name: mean_tokens(found[JOINT if name == JOINT else BASE]) for name in (BASE, ACTIVATED, JOINT)}
        for test, found in ((test, pools[seeds[0], test]) for test in TESTS)
    }
    unequal, compared = changed_texts(plan, seeds)
    return {
        "sizes": {**plan.sizes("training", "num_samples"), **plan.parts},
        "seeds": seeds,
        "criteria": [row.as_json() for row in criteria(rows, curves, unequal, compared)],
        "confidences": {
            contender.key: {
                test: {name: triple(value) for name, value in summary(rows[test][contender.key]).items()}
                for test in TESTS
            }
            for contender in CONTENDERS
        },
        "vote_sizes": sizes,
        "votes": {
            test: {
                key: {str(size): triple(estimate_of(curve[size - 1])) for size in sizes} for key, curve in found.items()
            }
            for test, found in curves.items()
        },
        "seconds": seconds,
        "savings": {test: savings(curves[test], targets, tokens[test], seconds) for test in TESTS},
        "minutes": plan.minutes,
    }  # fmt: skip


def read_fitted(plan: Plan, seed: int, test: str) -> dict[str, RecordedPool]:
    found = {}
    for name in (BASE, JOINT):
        fitted = fit_on(read_pool(plan, seed, name, "calibration").entries, name)
        pool = read_pool(plan, seed, name, test)
        found[name] = replace(pool, entries=scored_pool(pool.entries, fitted))
    return found


def changed_texts(plan: Plan, seeds: list[int]) -> tuple[int, int]:
    """Return how many texts differ with the sleeping adapter loaded, and how many were compared."""
    pairs: list[tuple[str, str]] = []
    for seed in seeds:
        awake = SampleStore(plan.responses(seed, BASE)).samples(split="id")
        texts = {entry.question.id: [sample.text for sample in entry.samples] for entry in awake}
        for entry in SampleStore(plan.place(seed, ACTIVATED) / "asleep").samples(split="id"):
            pairs += zip((sample.text for sample in entry.samples), texts[entry.question.id], strict=True)
    return sum(one != other for one, other in pairs), len(pairs)


TITLES = {"id": "in-domain", "ood": "out of domain"}
METRICS = {
    "ece": "ECE ↓", "auroc": "AUROC ↑", "brier": "Brier ↓", "within_question_auroc": "within-question AUROC ↑",
    "pass_at_1": "pass@1 ↑",
}  # fmt: skip
COLOURS = {BASE: "#4878a8", ACTIVATED: "#dd8137", JOINT: "#5b9a5b"}


def as_markdown(report: Mapping[str, Any]) -> str:
    sizes = report["sizes"]
    asked = f"{sizes['id']:,} in-domain and {sizes['ood']:,} out-of-domain test questions x {sizes['num_samples']}"
    head = (
        f"Command: `{report['command']}` ({report['minutes']} minutes for what was not done before). Seeds "
        f"{', '.join(map(str, report['seeds']))}; {sizes['training']:,} training questions x 10 responses, {asked} "
        f"responses, {sizes['calibration']:,} calibration questions x {sizes['num_samples']} with labels for what is "
        "fitted to labels. Means over seeds, 95 % intervals over questions and seeds."
    )
    lines = [
        *section("head", [head]),
        *section("calibration", [*criteria_table(report["criteria"]), *_trained(report), *_sceptic(report)]),
        *section("votes", [*_votes(report), *_savings(report)]),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def figure(report: Mapping[str, Any]) -> Figure:
    drawing = Figure(figsize=(9.2, 3.9), layout="constrained")
    panels = drawing.subplots(1, len(TITLES), sharey=True)
    for axes, (test, title) in zip(panels, TITLES.items(), strict=True):
        _draw_votes(axes, report["votes"][test])
        axes.set_title(title, fontsize=11)
    panels[0].set_ylabel("accuracy of the vote")
    handles, labels = panels[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return drawing


def _trained(report: Mapping[str, Any]) -> list[str]:
    names, found = (BASE, ACTIVATED, JOINT), report["confidences"]
    rows = [
        [label, title, *(show(found[name][test][metric]) for name in names)]
        for metric, label in METRICS.items()
        for test, title in TITLES.items()
    ]
    return [
        "What is trained; the responses of *nothing* and *activated* are the same, *joint* is judged on its own:",
        "",
        *table(["", "test", *names], rows, left=2),
        "",
    ]


def _sceptic(report: Mapping[str, Any]) -> list[str]:
    shown, found = ("auroc", "ece", "brier", "within_question_auroc"), report["confidences"]
    lines = [
        f"What a sceptic would use instead. *Labels*: fitted to the verdicts on {report['sizes']['calibration']} "
        "calibration questions, which are in-domain. *All*: needs all responses to the question, a single one will not "
        "do. Rows of the joint model are about its own responses.",
        "",
    ]
    for test, title in TITLES.items():
        rows = [
            [one.label, _needs(one), *(show(found[one.key][test][metric]) for metric in shown)] for one in CONTENDERS
        ]
        lines += [*table([title, "needs", *(METRICS[metric] for metric in shown)], rows, left=2), ""]
    return lines


def _needs(contender: Contender) -> str:
    needed = {"training": contender.is_trained, "labels": contender.needs_labels, "all": contender.reads_all}
    return ", ".join(word for word, is_needed in needed.items() if is_needed) or "-"


def _votes(report: Mapping[str, Any]) -> list[str]:
    sizes = report["vote_sizes"]
    lines = ["Accuracy of the vote of so many samples:", ""]
    for test, title in TITLES.items():
        votes = report["votes"][test].items()
        rows = [[label_of(key), *(show(found[str(size)]) for size in sizes)] for key, found in votes]
        lines += [*table([title, *map(str, sizes)], rows), ""]
    return lines


def _savings(report: Mapping[str, Any]) -> list[str]:
    prices = ", ".join(
        f"{name} {1000 * response:.1f} + {1000 * query:.1f}" for name, (response, query) in report["seconds"].items()
    )
    lines = [
        "Samples, tokens and seconds of one thread for the accuracy of the base model's plain votes, read off these "
        f"curves (milliseconds of processor time of a response + its confidence query: {prices}):",
        "",
    ]
    for test, title in TITLES.items():
        found = report["savings"][test]
        targets = [row["target"] for row in next(iter(found.values()))]
        heads = [f"{name}, as {target} plain" for target in targets for name in ("samples", "tokens", "seconds")]
        rows = [[label_of(key), *(cell for row in cells for cell in _paid(row))] for key, cells in found.items()]
        lines += [*table([title, *heads], rows), ""]
    return lines


def _paid(row: Mapping[str, Any]) -> list[str]:
    plain = [
        show((row[unit], None, None), digits=digits, missing="-") for unit, digits in (("tokens", 0), ("seconds", 3))
    ]
    return [show(row["samples"], digits=2), *plain]


def _draw_votes(axes: Axes, votes: Mapping[str, Mapping[str, Sequence[float | None]]]) -> None:
    lines = [
        (PLAIN[BASE], "plain votes: nothing, activated", COLOURS[BASE], "--"),
        (BASE, "weighted: nothing", COLOURS[BASE], "-"),
        (ACTIVATED, "weighted: activated", COLOURS[ACTIVATED], "-"),
        (PLAIN[JOINT], "plain votes: joint", COLOURS[JOINT], "--"),
        (JOINT, "weighted: joint", COLOURS[JOINT], "-"),
        ("likelihood", "weighted: log-probability, Platt", "#888888", ":"),
    ]
    for key, label, colour, style in lines:
        widths = [int(width) for width in votes[key]]
        values = [entry[0] for entry in votes[key].values()]
        axes.plot(widths, values, style, label=label, color=colour, marker="o", markersize=3, linewidth=1.4)
        if key == ACTIVATED:
            low, high = ([entry[place] for entry in votes[key].values()] for place in (1, 2))
            axes.fill_between(widths, low, high, color=colour, alpha=0.10, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("samples a question")
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)


SIZES_OF_VOTES = (4, 8)


def criteria(
    rows: Mapping[str, Mapping[str, Sequence[Measured]]],
    curves: Mapping[str, Mapping[str, Floats]],
    unequal: int,
    compared: int,
) -> list[Criterion]:
    here, there = rows["id"], rows["ood"]
    error = summary(here[ACTIVATED])[SHORT_NAMES[ECE]]
    below = difference(here[ACTIVATED], here[JOINT], ECE)
    ranks = difference(here[ACTIVATED], here[JOINT], AUROC)
    adds = difference(there["activated_likelihood"], there["likelihood"], AUROC)
    found = [
        Criterion(f"of {compared:,} texts, the sleeping adapter changes none", exactly(unequal), unequal == 0),
        held("in-domain, ECE of the activated: at most .10", error, "value", "<=", 0.10),
        held("in-domain, ECE of the activated minus the joint's: below 0", below, "value", "<=", 0.0),
        held("in-domain, AUROC of the activated minus the joint's: at least -.01", ranks, "value", ">", -0.01),
    ]
    for size in SIZES_OF_VOTES:
        gain = estimate_of(curves["id"][ACTIVATED][size - 1] - curves["id"][PLAIN[BASE]][size - 1])
        text = f"in-domain, {size} votes weighted by the activated minus {size} plain ones: lower end above -.005"
        found.append(held(text, gain, "low", ">", -0.005))
    text = "out of domain, AUROC of log-probability + activated minus log-probability: lower end above 0"
    return [*found, held(text, adds, "low", ">", 0.0)]


STUDY = Study(
    "quality/report.py", SIZES, run_jobs, assemble, as_markdown, figure, complete=complete, options=Plan,
    alone="make report",
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
