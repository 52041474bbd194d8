"""``make report-rewards``: what reward models of the bundled model know at every step, and what they buy.

Scores are compared with rollouts at every step, and with P(True), likelihood and votes at the end. Votes, best-of-N,
stopping and searches are compared with a uniform N at the same tokens.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _reward_measures import FUSED, HARD, LABELS, METRICS, MODELS, OUTCOME, PLAIN, RATES, Plan, assemble, run_seed
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.study import TESTS, TITLES, Study
from shared.tables import criteria_table, section, show, table

from selfcal_lightning.data.steps import POSITIONS

SIZES = {
    "training": (1500, "training questions without rollouts, x 8"),
    "rolled": (250, "training questions with rollouts, x 8"),
    "id": (300, "in-domain test questions"),
    "ood": (300, "out-of-domain test questions"),
    "calibration": (60, "questions for what is fitted to labels"),
    "num_samples": (16, "responses to each of these, at least 8"),
    "rolled_responses": (8, "how many of them are rolled out"),
    "num_rollouts": (8, "rollouts of a prefix"),
    "searched": (100, "questions that are searched live"),
    "workers": (2, "seeds at a time, one thread each"),
}
QUICK = {"training": 120, "rolled": 20, "id": 30, "ood": 30, "calibration": 20, "rolled_responses": 4, "searched": 15}


def complete(parser: argparse.ArgumentParser, plan: Plan) -> None:
    if plan.num_samples < 8:
        parser.error(f"--num_samples must be at least 8, got {plan.num_samples}.")


def run_jobs(plan: Plan) -> None:
    with ProcessPoolExecutor(plan.workers, mp_context=get_context("fork")) as pool:
        list(pool.map(partial(run_seed, plan), plan.seeds))


HEADS = {"brier": "Brier ↓", "ece": "ECE ↓", "bias": "bias", "pinball": "pinball ↓"}
HEADS |= {"below": "below low", "above": "above high"}
# What the tables by position hold, the second without its interval.
PAIRS = (("brier", "ece"), ("bias", "pinball"), ("below", "above"))
POSITION_NAMES = dict(zip(POSITIONS, ("question", "first step", "middle", "before the answer", "end"), strict=True))
RESPONSES = {"brier": "Brier ↓", "ece": "ECE ↓", "auroc": "AUROC ↑", "within_question_auroc": "within a question ↑"}
VOTE_SIZES = ("1", "2", "4", "8", "16")
TICKS = (50, 100, 200, 400, 800)
AT_EQUAL = ("plain votes at the same tokens", "best-of-N at the same tokens")
COLOURS = {OUTCOME: "#4878a8", RATES: "#5b9a5b", HARD: "#c2504a"}


def as_markdown(report: Mapping[str, Any]) -> str:
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
    drawing = Figure(figsize=(11.0, 6.4), layout="constrained")
    steps, answers = drawing.subfigures(2, 1, height_ratios=(1.0, 1.2))
    panels = steps.subplots(1, len(POSITIONS), sharey=True)
    for axes, position in zip(panels, POSITIONS, strict=True):
        _draw_calibration(axes, report["calibration"], position)
    panels[0].set_ylabel("share that came out right")
    steps.suptitle("Calibration by step, in domain", fontsize=11)
    whole = answers.subplots(1, len(TESTS))
    for axes, test in zip(whole, TESTS, strict=True):
        _draw_answers(axes, report["votes"][test])
        axes.set_title(TITLES[test], fontsize=11)
    whole[0].set_ylabel("accuracy")
    for part, axes in ((steps, panels[0]), (answers, whole[0])):
        part.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return drawing


def _head(report: Mapping[str, Any]) -> str:
    sizes = report["sizes"]
    return (
        f"Command: `{report['command']}` ({report['cpu_minutes']} CPU minutes on {len(report['seeds'])} seeds: "
        f"{', '.join(map(str, report['seeds']))}). *All* are {sizes['training']:,} training questions x 8; "
        f"the others have {sizes['rolled']:,}, whose prefixes were rolled out {sizes['num_rollouts']} times as well. "
        f"Test: {sizes['id']:,} in-domain and {sizes['ood']:,} out-of-domain questions x {sizes['num_samples']} "
        f"responses, {sizes['rolled_responses']} of them rolled out; {sizes['calibration']:,} labelled questions for "
        "what is fitted to labels. Means over seeds, 95 % intervals over questions and seeds."
    )


def _places(models: Mapping[str, Any], title: str) -> list[str]:
    rows = [[one.label, *(show(models[name]["all"][metric]) for metric in METRICS)] for name, one in MODELS.items()]
    lines = table([f"{title}, all places", *(HEADS[name] for name in METRICS)], rows)
    for first, second in PAIRS:
        head = f"{title}, {HEADS[first].rstrip(' ↓')} ({HEADS[second].rstrip(' ↓')})"
        rows = []
        for name, one in MODELS.items():
            found = [models[name][position] for position in POSITIONS]
            rows.append([one.label, *(f"{show(at[first])} ({show([at[second][0], None, None])})" for at in found)])
        lines += ["", *table([head, *POSITION_NAMES.values()], rows)]
    return [*lines, ""]


def _responses(rows: Mapping[str, Any], title: str) -> list[str]:
    cells = [[label, *(show(rows[name][metric]) for metric in RESPONSES)] for name, label in LABELS.items()]
    return [*table([f"{title}, whole responses", *RESPONSES.values()], cells), ""]


def _answers(votes: Mapping[str, Any], title: str) -> list[str]:
    sizes = [size for size in VOTE_SIZES if size in votes[PLAIN]]
    fixed = [
        [way_label(way), *(show(settings[size]["correct"]) for size in sizes)]
        for way, settings in votes.items()
        if way.split()[0] in ("plain", "vote", "best")
    ]
    tokens = ["tokens", *(f"{votes[PLAIN][size]['tokens'][0]:.0f}" for size in sizes)]
    adaptive = [
        [f"{way_label(way)}, {setting}", *_spent_cells(row, "less_best", "less_plain")]
        for way, settings in votes.items()
        if way.split()[0] in ("adaptive", "stop")
        for setting, row in settings.items()
    ]
    heads = ["accuracy", "tokens", f"minus uniform {AT_EQUAL[1]}", f"minus {AT_EQUAL[0]}"]
    return [
        *table([f"{title}, accuracy at", *sizes], [*fixed, tokens]), "",
        *table([f"{title}: what adapts", *heads], adaptive), "",
    ]  # fmt: skip


def _searches(report: Mapping[str, Any]) -> list[str]:
    heads = ["", "accuracy", "tokens", *(f"minus {other}" for other in AT_EQUAL)]
    rows = [[label, *_spent_cells(row, "less_plain", "less_best")] for label, row in report["searches"].items()]
    return [
        f"Live, the first {report['sizes']['searched']} in-domain questions; beams of 8 over 2 kept beginnings, tokens "
        "counted to the step, with the one that tells its end:",
        "",
        *table(heads, rows),
        "",
    ]


def _spent_cells(row: Mapping[str, Any], *less: str) -> list[str]:
    return [show(row["correct"]), show(row["tokens"], digits=0), *(show(row[name], "+") for name in less)]


def way_label(way: str) -> str:
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
        axes.plot(scores, rates, color=colour, linewidth=1.2, label=MODELS[name].label)
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


if __name__ == "__main__":
    study = Study(
        "rewards/report_rewards.py", SIZES, run_jobs, assemble, as_markdown, figure, quick=QUICK,
        complete=complete, options=Plan, alone="make report-rewards", layout={"dpi": 110},
    )  # fmt: skip
    raise SystemExit(study.main())
