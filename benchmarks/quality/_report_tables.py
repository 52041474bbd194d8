"""The report as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _report_confidences import CONTENDERS, PLAIN, Contender, label_of
from _report_jobs import ACTIVATED, BASE, JOINT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.estimates import Measured, difference, summary
from shared.tables import Criterion, criteria_table, exactly, held, section, show, table

from selfcal_lightning.evaluation.metrics import SHORT_NAMES
from selfcal_lightning.metrics.arrays import AUROC, ECE, Floats
from selfcal_lightning.metrics.bootstrap import estimate_of

FULL = "make report"
# What that command runs.
FULL_SEEDS, FULL_SIZES = 3, {"training": 1000, "id": 1000, "ood": 500, "num_samples": 16}
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
    is_full = all(sizes[name] >= size for name, size in FULL_SIZES.items()) and len(report["seeds"]) >= FULL_SEEDS
    if not is_full:
        head += f" This is less than `{FULL}` alone: three seeds, 1,000 training questions, 1,000 + 500 x 16 responses."
    lines = [
        *section("head", [head]),
        *section("calibration", [*criteria_table(report["criteria"]), *_trained(report), *_sceptic(report)]),
        *section("votes", [*_votes(report), *_savings(report)]),
        *_ablations(report),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def figure(report: Mapping[str, Any]) -> Figure:
    """Draw the accuracy of votes over the number of samples: dashed lines are plain votes, solid ones weighted."""
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
    tokens, seconds = row["tokens"], row["seconds"]
    return [
        show(row["samples"], digits=2),
        "-" if tokens is None else f"{tokens:.0f}",
        "-" if seconds is None else f"{seconds:.3f}",
    ]


def _ablations(report: Mapping[str, Any]) -> list[str]:
    if not report["ablations"]:
        return []
    names = list(SHORT_NAMES.values())
    rows = [[name, *(show(entry[metric]) for metric in names)] for name, entry in report["ablations"].items()]
    head = f"Joint training with one change each, in-domain, seed {report['seeds'][0]}:"
    return [head, "", *table(["change", *names], rows), ""]


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
        low, high = ([entry[place] for entry in votes[key].values()] for place in (1, 2))
        if key == ACTIVATED:
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
