"""``make report-rewards``: what reward models of the bundled model know at every step, and what they buy.

Scores are compared with rollouts at every step, and with P(True), likelihood and votes at the end. Votes, best-of-N,
stopping and searches are compared with a uniform N at the same tokens.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from _reward_measures import (
    ABOVE,
    BELOW,
    BRIER,
    ECE,
    FEW_OUTCOME,
    FEW_VOTES,
    FUSED,
    HARD,
    LABELS,
    METRICS,
    OUTCOME,
    OVERALL,
    PLAIN,
    RATES,
    STOP_AT_MOST,
    VOTES,
    Places,
    Plan,
    Spent,
    calibration,
    difference,
    estimates,
    read_places,
    read_pool,
    run_seed,
    searches,
    spend,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from shared.estimates import Measured, summary
from shared.estimates import difference as response_difference
from shared.jobs import seconds_of
from shared.study import RESULTS, TESTS, Study
from shared.tables import Criterion, criteria_table, exactly, held, section, show, table, triple

from selfcal_lightning.data.steps import POSITIONS
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of

SEARCHED = {"beam": "beam search", "beam_km": "beam search, width and number by the scores",
            "trees": "diverse tree search", "particles": "particle filtering"}  # fmt: skip
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


def assemble(plan: Plan) -> dict[str, Any]:
    seeds = plan.seeds
    each = {(seed, test): read_places(plan, seed, test, list(MODELS)) for seed in seeds for test in TESTS}
    places = {test: {name: [each[seed, test][name] for seed in seeds] for name in MODELS} for test in TESTS}
    pools = {test: [read_pool(plan, seed, test) for seed in seeds] for test in TESTS}
    responses = {
        test: {name: [Measured.of(scored_responses(pool.entries, name=name)) for pool in found] for name in LABELS}
        for test, found in pools.items()
    }
    priors = {test: [one.priors for one in places[test]["outcome"]] for test in TESTS}
    votes = {test: spend(pools[test], priors[test]) for test in TESTS}
    searched = [replace(pool, entries=pool.entries[: plan.searched]) for pool in pools["id"]]
    beside = spend(searched, [prior[: plan.searched] for prior in priors["id"]])
    live = searches(plan, seeds)
    criteria = [*_of_places(places), *_of_costs(places), *_of_answers(responses, votes["id"], live)]
    sizes = plan.sizes("training", "rolled", "num_samples", "rolled_responses", "num_rollouts", "searched")
    return {
        "sizes": {**sizes, **plan.parts},
        "seeds": list(seeds),
        "cpu_minutes": round(sum(sum(seconds_of(plan.folder(seed)).values()) for seed in seeds) / 60, 1),
        "criteria": [row.as_json() for row in criteria],
        "places": {test: {name: _of_positions(rows) for name, rows in found.items()} for test, found in places.items()},
        "calibration": {
            name: {position: calibration(places["id"][name], position) for position in POSITIONS} for name in COLOURS
        },
        "responses": {
            test: {name: {metric: triple(value) for metric, value in summary(rows).items()}
                   for name, rows in found.items()}
            for test, found in responses.items()
        },
        "votes": {
            test: {way: {key: _spent(row, found) for key, row in rows.items()} for way, rows in found.items()}
            for test, found in votes.items()
        },
        "searches": {
            **{SEARCHED[name]: _spent(row, beside) for name, row in live.items()},
            "plain votes of 8": _spent(beside[PLAIN]["8"], beside),
            f"8 votes weighted by {LABELS[FUSED]}": _spent(beside[f"vote {FUSED}"]["8"], beside),
            f"best of 8 by {LABELS[FUSED]}": _spent(beside[f"best {FUSED}"]["8"], beside),
            **{
                f"stop at {stop} of {LABELS[FUSED]}, at most {STOP_AT_MOST}": _spent(row, beside)
                for stop, row in beside[f"stop {FUSED}"].items()
            },
        },
    }  # fmt: skip


def _of_positions(rows: Sequence[Places]) -> dict[str, dict[str, list[float | None]]]:
    found = {position: estimates(rows, position) for position in (OVERALL, *POSITIONS)}
    return {position: {metric: triple(values[metric]) for metric in METRICS} for position, values in found.items()}


def _spent(row: Spent, ways: Mapping[str, Mapping[str, Spent]]) -> dict[str, list[float | None]]:
    def less(way: str) -> Floats:
        return row.correct - at_equal_tokens(ways[way], row.tokens)

    shown = {"correct": row.correct, "samples": row.samples, "tokens": row.tokens}
    shown |= {"less_plain": less(PLAIN), "less_best": less(f"best {FUSED}")}
    return {name: triple(estimate_of(column)) for name, column in shown.items()}


TITLES = {"id": "in domain", "ood": "out of domain"}
BASELINE = "8"
SCORING = RESULTS / "reward_scoring.json"


# What a model must reach alone, or by how much it must be below another.
DEMANDS: tuple[tuple[str, str | None, str, str, float], ...] = (
    (RATES, HARD, BRIER, "Brier of success rates", -0.01),
    (RATES, HARD, ECE, "ECE of success rates", -0.02),
    (RATES, None, BRIER, "Brier of success rates: at most 0.15", 0.15),
    (FEW_OUTCOME, None, BRIER, "Brier of outcomes of as many questions: at most 0.15", 0.15),
    (OUTCOME, None, BRIER, "Brier of outcomes of all questions: at most 0.13", 0.13),
    (OUTCOME, RATES, BRIER, "Brier of outcomes of all questions", 0.0),
    (RATES, None, ECE, "ECE of success rates: at most .09", 0.09),
    (FEW_VOTES, HARD, BRIER, "Brier of votes (no labels) of as many questions", 0.0),
    (VOTES, HARD, BRIER, "Brier of votes (no labels) of all questions", 0.0),
    (RATES, None, BELOW, "rates by more than .05 below the lower quantile of success rates: at most .12", 0.12),
    (RATES, None, ABOVE, "rates by more than .05 above the upper quantile of success rates: at most .12", 0.12),
)
COMPARED = {HARD: "hard labels", RATES: "success rates"}


def _of_places(places: Mapping[str, Mapping[str, Sequence[Places]]]) -> list[Criterion]:
    rows = []
    for test, models in places.items():
        for name, other, metric, words, bound in DEMANDS:
            text = f"{TITLES[test]}, {words}"
            if other is None:
                rows.append(held(text, estimates(models[name])[metric], "value", "<=", bound))
                continue
            bound = 0.01 if (name, test) == (OUTCOME, "ood") else bound
            text += f" minus {COMPARED[other]}: upper end below {bound:g}"
            rows.append(held(text, difference(models[name], models[other], metric), "high", "<", bound))
    return rows


def _of_costs(places: Mapping[str, Mapping[str, Sequence[Places]]]) -> list[Criterion]:
    every = [one for models in places.values() for rows in models.values() for one in rows]
    crossings = sum(int(((one.score[:, 1] > one.score[:, 0]) | (one.score[:, 0] > one.score[:, 2])).sum())
                    for one in every)  # fmt: skip
    one_model = [one for models in places.values() for one in models[OUTCOME]]
    distinct, published = np.sum([one.prefixes for one in one_model], axis=0)
    packed, _, apart = np.sum([one.tokens for one in one_model], axis=0)
    seconds = {cost["way"]: cost["processor_seconds"] for cost in json.loads(SCORING.read_text())["costs"]}
    times = seconds["one text a step"] / seconds["packed by question"]
    text = "CPU seconds of one text a place, of those packed by question (`reward_scoring.py`): at least 8"
    return [
        Criterion("quantiles that cross, of all scores: none", exactly(crossings), crossings == 0),
        held("rollouts drawn, of those of the published way: at most .5", exactly(distinct / published),
             "value", "<=", 0.5),
        held("tokens of one text a place, of those packed by question: at least 5.5", exactly(apart / packed),
             "value", ">", 5.5),
        held(text, exactly(times), "value", ">", 8.0),
    ]  # fmt: skip


def _of_answers(
    responses: Mapping[str, Mapping[str, Sequence[Measured]]], votes: Mapping[str, Mapping[str, Spent]],
    live: Mapping[str, Spent],
) -> list[Criterion]:  # fmt: skip
    rows = []
    plain, weighed = votes[PLAIN], votes[f"vote {FUSED}"]
    for size in ("4", "8"):
        gain = estimate_of(weighed[size].correct - plain[size].correct)
        text = f"in domain, {size} votes weighted by score + log-probability minus plain ones: lower end above 0"
        rows.append(held(text, gain, "low", ">", 0.0))
    most = max(plain, key=float)
    gain = estimate_of(weighed["8"].correct - plain[most].correct)
    text = f"in domain, 8 such votes minus {most} plain ones: lower end above -.015"
    rows.append(held(text, gain, "low", ">", -0.015))
    for name, label in (("prm", "outcomes"), ("prm_vote_share", "votes")):
        gain = response_difference(responses["id"][name], responses["id"]["prm_hard"], WITHIN_QUESTION_AUROC)
        text = f"in domain, within-question AUROC of {label} minus hard labels: lower end above 0"
        rows.append(held(text, gain, "low", ">", 0.0))
    return [*rows, _stopping(votes), *_reported(votes, live)]


def _stopping(votes: Mapping[str, Mapping[str, Spent]]) -> Criterion:
    """Return the demand on stopping: of the thresholds that cost at most .01, the one that saves most is taken."""
    whole = votes[f"best {FUSED}"][BASELINE]
    saved = [
        1.0 - one.tokens / whole.tokens
        for one in votes[f"stop {FUSED}"].values()
        if one.correct[0] >= whole.correct[0] - 0.01
    ]
    text = f"in domain, tokens saved by stopping at a score within .01 of best-of-{BASELINE}: at least .15"
    if not saved:
        return Criterion(text, Estimate(None, None, None), False)
    most = estimate_of(max(saved, key=lambda column: float(column[0])))
    return held(text, most, "value", ">", 0.15)


def _reported(votes: Mapping[str, Mapping[str, Spent]], live: Mapping[str, Spent]) -> list[Criterion]:
    fixed, adaptive = live["beam"], live["beam_km"]
    cost = estimate_of(adaptive.tokens / fixed.tokens)
    lost = estimate_of(adaptive.correct - fixed.correct)
    rows = [
        Criterion("searched questions, tokens of the adaptive beam, of the fixed one", cost, None),
        Criterion("searched questions, accuracy of the adaptive beam minus the fixed one", lost, None),
    ]
    uniform = votes[f"best {FUSED}"]
    for target, one in votes[f"adaptive {FUSED}"].items():
        gain = estimate_of(one.correct - at_equal_tokens(uniform, one.tokens))
        text = f"in domain, best-of-N with N for a target of {target} minus uniform N at the same tokens"
        rows.append(Criterion(text, gain, None))
    return rows


def at_equal_tokens(curve: Mapping[str, Spent], tokens: Floats) -> Floats:
    """Return the accuracy of a way at so many tokens [1 + R], read off between its settings in each resample."""
    points = sorted(curve.values(), key=lambda one: float(one.tokens[0]))
    cost, hits = (np.array([getattr(one, name) for one in points]) for name in ("tokens", "correct"))
    return np.array([np.interp(tokens[r], cost[:, r], hits[:, r]) for r in range(len(tokens))])


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
    return (
        f"Command: `{report['command']}` ({report['cpu_minutes']} CPU minutes on {len(report['seeds'])} seeds: "
        f"{', '.join(map(str, report['seeds']))}). *All* are {sizes['training']:,} training questions x 8; "
        f"the others have {sizes['rolled']:,}, whose prefixes were rolled out {sizes['num_rollouts']} times as well. "
        f"Test: {sizes['id']:,} in-domain and {sizes['ood']:,} out-of-domain questions x {sizes['num_samples']} "
        f"responses, {sizes['rolled_responses']} of them rolled out; {sizes['calibration']:,} labelled questions for "
        "what is fitted to labels. Means over seeds, 95 % intervals over questions and seeds."
    )


def _places(models: Mapping[str, Any], title: str) -> list[str]:
    heads = [f"{title}, all places", *(HEADS[name] for name in METRICS)]
    lines = table(
        heads, [[label, *(show(models[name]["all"][metric]) for metric in METRICS)] for name, label in MODELS.items()]
    )
    for first, second in PAIRS:
        head = f"{title}, {HEADS[first].rstrip(' ↓')} ({HEADS[second].rstrip(' ↓')})"
        rows = []
        for name, label in MODELS.items():
            found = [models[name][position] for position in POSITIONS]
            rows.append([label, *(f"{show(at[first])} ({show([at[second][0], None, None])})" for at in found)])
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
    """Return a way to choose answers in words."""
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


if __name__ == "__main__":
    study = Study(
        "rewards/report_rewards.py", SIZES, run_jobs, assemble, as_markdown, figure, quick=QUICK,
        complete=complete, options=Plan, alone="make report-rewards", layout={"dpi": 110},
    )  # fmt: skip
    raise SystemExit(study.main())
