"""The report on reward models as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _reward_criteria import TITLES
from _reward_jobs import FEW_OUTCOME, FEW_VOTES, HARD, OUTCOME, RATES, TESTS, VOTES
from _reward_places import METRICS
from _reward_votes import FUSED, LABELS, PLAIN
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.criteria import criteria_table
from shared.tables import section, show

from selfcal_lightning.data.steps import POSITIONS

FULL = "make report-rewards"
# What that command runs.
FULL_SIZES = {"training": 1500, "rolled": 250, "id": 300, "ood": 300, "num_samples": 16}
MODELS = {
    OUTCOME: "outcomes, all questions", VOTES: "votes, all questions", FEW_OUTCOME: "outcomes", FEW_VOTES: "votes",
    RATES: "success rates", HARD: "hard labels",
}  # fmt: skip
HEADS = {"brier": "Brier ↓", "ece": "ECE ↓", "bias": "bias", "pinball": "pinball ↓"}
HEADS |= {"below": "below low", "above": "above high"}
# What the tables by position hold, the second without its interval.
PAIRS = (("brier", "ece"), ("bias", "pinball"), ("below", "above"))
POSITION_NAMES = dict(
    zip(POSITIONS, ("question", "first step", "middle", "before the answer", "end"), strict=True)
)  # fmt: skip
RESPONSES = {"brier": "Brier ↓", "ece": "ECE ↓", "auroc": "AUROC ↑", "within_question_auroc": "within a question ↑"}
SIZES = ("1", "2", "4", "8", "16")
TICKS = (50, 100, 200, 400, 800)
COLOURS = {OUTCOME: "#4878a8", RATES: "#5b9a5b", HARD: "#c2504a"}


def as_markdown(report: Mapping[str, Any]) -> str:
    """Write the report as Markdown."""
    lines = [
        *section("head", [_head(report)]),
        *section("targets", criteria_table(report["criteria"])),
        *section("steps", [line for test in TESTS for line in _places(report["places"][test], TITLES[test])]),
        *section("responses", [line for test in TESTS for line in _responses(report["responses"][test], TITLES[test])]),
        *section("answers", [line for test in TESTS for line in _answers(report["votes"][test], TITLES[test])]),
        *section("searches", _searches(report)),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def figure(report: Mapping[str, Any]) -> Figure:
    """Draw calibration by step over accuracy against tokens."""
    drawing = Figure(figsize=(11.0, 6.4), layout="constrained")
    steps, answers = drawing.subfigures(2, 1, height_ratios=(1.0, 1.2))
    panels = steps.subplots(1, len(POSITIONS), sharey=True)
    for axes, position in zip(panels, POSITIONS, strict=True):
        _draw_calibration(axes, report["calibration"], position)
    panels[0].set_ylabel("share that came out right")
    steps.suptitle("Calibration by step, in domain", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    steps.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    panels = answers.subplots(1, len(TESTS))
    for axes, test in zip(panels, TESTS, strict=True):
        _draw_answers(axes, report["votes"][test])
        axes.set_title(TITLES[test], fontsize=11)
    panels[0].set_ylabel("accuracy")
    handles, labels = panels[0].get_legend_handles_labels()
    answers.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return drawing


def _head(report: Mapping[str, Any]) -> str:
    sizes = report["sizes"]
    text = (
        f"Command: `{report['command']}` ({report['cpu_minutes']} CPU minutes on {len(report['seeds'])} seeds: "
        f"{', '.join(map(str, report['seeds']))}). *All* are {sizes['training']:,} training questions x 8; "
        f"the others have {sizes['rolled']:,}, whose prefixes were rolled out {sizes['num_rollouts']} times as well. "
        f"Test: {sizes['id']:,} in-domain and {sizes['ood']:,} out-of-domain questions x {sizes['num_samples']} "
        f"responses, {sizes['rolled_responses']} of them rolled out; {sizes['calibration']:,} labelled questions for "
        "what is fitted to labels. Means over seeds, 95 % intervals over questions and seeds."
    )
    if all(sizes[name] >= size for name, size in FULL_SIZES.items()):
        less = "" if len(report["seeds"]) >= 3 else f"\n\n`{FULL}` alone has three seeds of these sizes."
        return text + less
    return (
        f"{text}\n\n**This is far less than `{FULL}` alone**, which has three seeds, 1,500 and 250 training questions "
        "and 300 + 300 test questions: intervals are wide, and a demand on the end of one may be missed for that alone."
    )


def _places(models: Mapping[str, Any], title: str) -> list[str]:
    lines = [
        f"| {title}, all places | {' | '.join(HEADS[name] for name in METRICS)} |",
        f"|---|{'---:|' * len(METRICS)}",
    ]
    for name, label in MODELS.items():
        lines.append(f"| {label} | {' | '.join(show(models[name]['all'][metric]) for metric in METRICS)} |")
    for first, second in PAIRS:
        heads = f"{HEADS[first].rstrip(' ↓')} ({HEADS[second].rstrip(' ↓')})"
        lines += ["", f"| {title}, {heads} | {' | '.join(POSITION_NAMES.values())} |"]
        lines.append(f"|---|{'---:|' * len(POSITIONS)}")
        for name, label in MODELS.items():
            cells = [
                f"{show(models[name][position][first])} ({show([*models[name][position][second][:1], None, None])})"
                for position in POSITIONS
            ]
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return [*lines, ""]


def _responses(rows: Mapping[str, Any], title: str) -> list[str]:
    lines = [f"| {title}, whole responses | {' | '.join(RESPONSES.values())} |", f"|---|{'---:|' * len(RESPONSES)}"]
    for name, label in LABELS.items():
        lines.append(f"| {label} | {' | '.join(show(rows[name][metric]) for metric in RESPONSES)} |")
    return [*lines, ""]


def _answers(votes: Mapping[str, Any], title: str) -> list[str]:
    sizes = [size for size in SIZES if size in votes[PLAIN]]
    lines = [f"| {title}, accuracy at | {' | '.join(sizes)} |", f"|---|{'---:|' * len(sizes)}"]
    for way, settings in votes.items():
        if way.split()[0] in ("plain", "vote", "best"):
            lines.append(f"| {way_label(way)} | {' | '.join(show(settings[size]['correct']) for size in sizes)} |")
    tokens = " | ".join(f"{votes[PLAIN][size]['tokens'][0]:.0f}" for size in sizes)
    lines += [
        f"| tokens | {tokens} |", "",
        f"| {title}: what adapts | accuracy | tokens | minus uniform best-of-N at the same tokens | minus plain "
        "votes at the same tokens |",
        "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for way, settings in votes.items():
        if way.split()[0] in ("adaptive", "stop"):
            for setting, row in settings.items():
                cells = [show(row["correct"]), show(row["tokens"], digits=0), show(row["less_best"], "+")]
                cells.append(show(row["less_plain"], "+"))
                lines.append(f"| {way_label(way)}, {setting} | {' | '.join(cells)} |")
    return [*lines, ""]


def _searches(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"Live, the first {report['sizes']['searched']} in-domain questions; beams of 8 over 2 kept beginnings, tokens "
        "counted to the step, with the one that tells its end:",
        "",
        "| | accuracy | tokens | minus plain votes at the same tokens | minus best-of-N at the same tokens |",
        "|---|---:|---:|---:|---:|",
    ]
    for label, row in report["searches"].items():
        cells = [show(row["correct"]), show(row["tokens"], digits=0), show(row["less_plain"], "+")]
        lines.append(f"| {label} | {' | '.join(cells)} | {show(row['less_best'], '+')} |")
    return [*lines, ""]


def way_label(way: str) -> str:
    """Return a way to choose answers in words.

    Example:
        >>> way_label("plain"), way_label("vote prm")
        ('plain votes', 'votes weighted by: reward model, outcomes')
    """
    if way == PLAIN:
        return "plain votes"
    kind, name = way.split()
    said = {"vote": "votes weighted by", "best": "best-of-N by", "adaptive": "best-of-N, N by the question's score",
            "stop": "stop at the response's score"}[kind]  # fmt: skip
    return f"{said}: {LABELS[name]}"


def _draw_calibration(axes: Axes, calibration: Mapping[str, Any], position: str) -> None:
    axes.plot([0, 1], [0, 1], color="#b0b0b0", linewidth=0.8)
    for name, colour in COLOURS.items():
        points: Sequence[Sequence[float]] = calibration[name][position]
        scores, rates, shares = zip(*points, strict=True)
        axes.plot(scores, rates, color=colour, linewidth=1.2, label=MODELS[name])
        axes.scatter(scores, rates, s=[4 + 60 * share for share in shares], color=colour)
    axes.set_title(POSITION_NAMES[position], fontsize=9)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("score", fontsize=8)


def _draw_answers(axes: Axes, votes: Mapping[str, Any]) -> None:
    lines = [
        (PLAIN, "plain votes", "#888888", "--"), (f"vote {FUSED}", "weighted votes", "#7b5ea7", "-"),
        (f"best {FUSED}", "best-of-N, the same N for all", "#4878a8", "-"),
        (f"adaptive {FUSED}", "best-of-N, N by the question's score", "#c2504a", ":"),
        (f"stop {FUSED}", "stop at the response's score", "#dd8137", "-."),
    ]  # fmt: skip
    for way, label, colour, style in lines:
        points = sorted((row["tokens"][0], row["correct"][0]) for row in votes[way].values())
        axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("tokens a question; scores are reward model + log-probability")
    axes.grid(True, color="#e4e4e4", linewidth=0.6)
