"""The report as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _report_confidences import CONTENDERS
from _report_jobs import ACTIVATED, BASE, JOINT
from _report_votes import PLAIN, label_of
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from selfcal_lightning.pipelines.comparison import SHORT_NAMES

TITLES = {"id": "in-domain", "ood": "out of domain"}
METRICS = {
    "ece": "ECE ↓", "auroc": "AUROC ↑", "brier": "Brier ↓", "within_question_auroc": "within-question AUROC ↑",
    "pass_at_1": "pass@1 ↑",
}  # fmt: skip
COLOURS = {BASE: "#4878a8", ACTIVATED: "#dd8137", JOINT: "#5b9a5b"}
DRAWN = {BASE: PLAIN[BASE], ACTIVATED: ACTIVATED, JOINT: JOINT}


def as_markdown(report: Mapping[str, Any]) -> str:
    """Write the report as Markdown."""
    sizes = report["sizes"]
    asked = f"{sizes['id']:,} in-domain and {sizes['ood']:,} out-of-domain test questions x {sizes['num_samples']}"
    lines = [
        f"Command: `{report['command']}` ({report['minutes']} minutes for what was not done before). Seeds "
        f"{', '.join(map(str, report['seeds']))}; {sizes['training']:,} training questions x 10 responses, {asked} "
        f"responses, {sizes['calibration']:,} calibration questions x {sizes['num_samples']} with labels for what is "
        "fitted to labels. Means over seeds, 95 % intervals over questions and seeds.",
        "",
        *_criteria(report["criteria"]),
        *_trained(report),
        *_sceptic(report),
        *_votes(report),
        *_savings(report),
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


def show(entry: Sequence[float | None], sign: str = "", digits: int = 3) -> str:
    """Write a value with its interval: (value, low, high).

    Example:
        >>> show([0.5, 0.25, 0.75]), show([0.0, None, None], digits=0), show([None, None, None])
        ('0.500 [0.250, 0.750]', '0', 'never')
    """
    value, low, high = entry
    if value is None:
        return "never"
    if low is None and high is None:
        return f"{value:{sign}.{digits}f}"
    ends = ("-" if end is None else f"{end:{sign}.{digits}f}" for end in (low, high))
    return f"{value:{sign}.{digits}f} [{', '.join(ends)}]"


def _criteria(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| what must hold | measured | |", "|---|---:|---|"]
    for row in rows:
        digits = 0 if row["measured"][1] is None else 3
        lines.append(
            f"| {row['text']} | {show(row['measured'], digits=digits)} | {'met' if row['met'] else '**missed**'} |"
        )
    return [*lines, ""]


def _trained(report: Mapping[str, Any]) -> list[str]:
    names = (BASE, ACTIVATED, JOINT)
    lines = [
        "What is trained; the responses of *nothing* and *activated* are the same, *joint* is judged on its own:",
        "",
        f"| | test | {' | '.join(names)} |",
        "|---|---|---:|---:|---:|",
    ]
    for metric in METRICS:
        for test, title in TITLES.items():
            cells = " | ".join(show(report["confidences"][name][test][metric]) for name in names)
            lines.append(f"| {METRICS[metric]} | {title} | {cells} |")
    return [*lines, ""]


def _sceptic(report: Mapping[str, Any]) -> list[str]:
    shown = ("auroc", "ece", "brier", "within_question_auroc")
    head = [f"{METRICS[metric]} {title}" for title in TITLES.values() for metric in shown]
    lines = [
        f"What a sceptic would use instead. *Labels*: fitted to the verdicts on {report['sizes']['calibration']} "
        "calibration questions, which are in-domain. *All*: needs all responses to the question, a single one will not "
        "do. Rows of the joint model are about its own responses.",
        "",
        f"| confidence | needs | {' | '.join(head)} |",
        f"|---|---|{'---:|' * len(head)}",
    ]
    for contender in CONTENDERS:
        needs = [
            word
            for word, needed in (
                ("training", contender.is_trained),
                ("labels", contender.needs_labels),
                ("all", contender.reads_all),
            )
            if needed
        ]
        entry = report["confidences"][contender.key]
        cells = [show(entry[test][metric]) for test in TITLES for metric in shown]
        lines.append(f"| {contender.label} | {', '.join(needs) or '-'} | {' | '.join(cells)} |")
    return [*lines, ""]


def _votes(report: Mapping[str, Any]) -> list[str]:
    sizes = report["vote_sizes"]
    head = [f"{size}, {title}" for title in TITLES.values() for size in sizes]
    lines = ["Accuracy of votes, by samples:", "", f"| votes | {' | '.join(head)} |", f"|---|{'---:|' * len(head)}"]
    for key in report["votes"]["id"]:
        cells = [show(report["votes"][test][key][str(size)]) for test in TITLES for size in sizes]
        lines.append(f"| {label_of(key)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _savings(report: Mapping[str, Any]) -> list[str]:
    response, query = report["seconds"][BASE]
    joint_response, joint_query = report["seconds"][JOINT]
    lines = [
        "Samples, tokens and seconds of one thread for the accuracy of the base model's plain votes, read off these "
        f"curves (a response of the base model takes {1000 * response:.1f} ms of processor time and its confidence "
        f"query {1000 * query:.1f} ms more; of the joint model {1000 * joint_response:.1f} and "
        f"{1000 * joint_query:.1f}):",
        "",
        "| votes | test | as plain votes of | samples | tokens | seconds |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for test, title in TITLES.items():
        for key, rows in report["savings"][test].items():
            for row in rows:
                tokens = "-" if row["tokens"] is None else f"{row['tokens']:.0f}"
                seconds = "-" if row["seconds"] is None else f"{row['seconds']:.3f}"
                samples = show(row["samples"], digits=2)
                lines.append(f"| {label_of(key)} | {title} | {row['target']} | {samples} | {tokens} | {seconds} |")
    return [*lines, ""]


def _ablations(report: Mapping[str, Any]) -> list[str]:
    if not report["ablations"]:
        return []
    names = list(SHORT_NAMES.values())
    lines = [
        f"Joint training with one change each, in-domain, seed {report['seeds'][0]}:",
        "",
        f"| change | {' | '.join(names)} |",
        f"|---|{'---:|' * len(names)}",
    ]
    for name, entry in report["ablations"].items():
        lines.append(f"| {name} | {' | '.join(show(entry[metric]) for metric in names)} |")
    return [*lines, ""]


def _draw_votes(axes: Axes, votes: Mapping[str, Mapping[str, Sequence[float | None]]]) -> None:
    lines = [
        (PLAIN[BASE], "plain votes: nothing, activated", COLOURS[ACTIVATED], "--"),
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
        if key in (ACTIVATED, PLAIN[BASE]):
            axes.fill_between(widths, low, high, color=colour, alpha=0.10, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    axes.set_xlabel("samples a question")
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
