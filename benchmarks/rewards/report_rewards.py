"""``make report-rewards``: reward models on the bundled model, what they know and what they buy, over three seeds.

    python benchmarks/rewards/report_rewards.py [--small]

Six models learn from outcomes, votes, success rates and hard labels. Their scores are held against rollouts at every
step, and against P(True), the likelihood and votes at the end; answers are chosen by votes, best-of-N, adaptive N,
stopping and searches over steps, always beside a uniform N at the same tokens. Every job is the command that a user
would type, and an interrupted report goes on where it stopped. Figures go to
``benchmarks/results/report_rewards.{json,md,png}``. Exit status 1 where a demand is missed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _reward_jobs import MODELS, Plan, run_seed
from _reward_measures import (
    FUSED,
    LABELS,
    METRICS,
    OVERALL,
    PLAIN,
    STOP_AT_MOST,
    Places,
    Spent,
    calibration,
    estimates,
    first_questions,
    read_places,
    read_pool,
    searches,
    spend,
)
from _reward_tables import COLOURS, FULL, Found, as_markdown, at_equal_tokens, criteria, figure
from shared.estimates import Measured, summary
from shared.jobs import seconds_of
from shared.study import COLLECT, TESTS, command_line, study_parser
from shared.tables import triple

from selfcal_lightning.data.steps import POSITIONS
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import estimate_of

SEARCHED = {
    "beam": "beam search",
    "beam_km": "beam search, width and number by the scores",
    "trees": "diverse tree search",
    "particles": "particle filtering",
}
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
SMALL = {"training": 120, "rolled": 20, "id": 30, "ood": 30, "calibration": 20, "rolled_responses": 4, "searched": 15}


def main() -> int:
    """Run all jobs that are not done yet, then print and write the report."""
    plan = parse_arguments()
    if not plan.collect:
        with ProcessPoolExecutor(plan.workers, mp_context=get_context("fork")) as pool:
            list(pool.map(partial(run_seed, plan), plan.seeds))
    report = assemble(plan, plan.seeds)
    report["command"] = command_line("rewards/report_rewards.py", alone=FULL)
    plan.publish("report_rewards", report, as_markdown(report), picture=figure(report), dpi=110)
    return 1 if any(row["met"] is False for row in report["criteria"]) else 0


def parse_arguments() -> Plan:
    parser = study_parser(__doc__, "runs/report-rewards", SIZES)
    parser.add_argument("--small", action="store_true", help=f"sizes of a few CPU minutes a seed: {SMALL}")
    parser.add_argument(COLLECT, action="store_true", help="run nothing, only collect what is there")
    plan = parser.parse_args(namespace=Plan())
    if plan.small:
        parser.set_defaults(**SMALL)
        plan = parser.parse_args(namespace=Plan())
    if plan.num_samples < 8:
        parser.error(f"Expected --num_samples to be at least 8, but got {plan.num_samples}.")
    return plan


def assemble(plan: Plan, seeds: Sequence[int]) -> dict[str, Any]:
    each = {(seed, test): read_places(plan, seed, test, list(MODELS)) for seed in seeds for test in TESTS}
    places = {test: {name: [each[seed, test][name] for seed in seeds] for name in MODELS} for test in TESTS}
    pools = {test: [read_pool(plan, seed, test) for seed in seeds] for test in TESTS}
    responses = {
        test: {name: [Measured.of(scored_responses(pool.entries, name=name)) for pool in found] for name in LABELS}
        for test, found in pools.items()
    }
    priors = {test: [one.priors for one in places[test]["outcome"]] for test in TESTS}
    votes = {test: spend(pools[test], priors[test]) for test in TESTS}
    searched = [first_questions(pool, plan.searched) for pool in pools["id"]]
    beside = spend(searched, [prior[: plan.searched] for prior in priors["id"]])
    live = searches(plan, seeds)
    sizes = plan.sizes("training", "rolled", "num_samples", "rolled_responses", "num_rollouts", "searched")
    return {
        "sizes": {**sizes, **plan.parts},
        "seeds": list(seeds),
        "cpu_minutes": round(sum(sum(seconds_of(plan.folder(seed)).values()) for seed in seeds) / 60, 1),
        "criteria": [row.as_json() for row in criteria(Found(places, responses, votes, live))],
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
    """Return what a way costs and reaches, and by how much it beats votes and best-of-N at the same tokens."""

    def less(way: str) -> Floats:
        return row.correct - at_equal_tokens(ways[way], row.tokens)

    shown = {"correct": row.correct, "samples": row.samples, "tokens": row.tokens}
    shown |= {"less_plain": less(PLAIN), "less_best": less(f"best {FUSED}")}
    return {name: triple(estimate_of(column)) for name, column in shown.items()}


if __name__ == "__main__":
    raise SystemExit(main())
