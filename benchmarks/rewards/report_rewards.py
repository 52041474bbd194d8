"""``make report-rewards``: reward models on the bundled model, what they know and what they buy, over three seeds.

    python benchmarks/rewards/report_rewards.py [--small]

Six models learn from outcomes, votes, success rates and hard labels. Their scores are held against rollouts at every
step, and against P(True), the likelihood and votes at the end; answers are chosen by votes, best-of-N, adaptive N,
stopping and searches over steps, always beside a uniform N at the same tokens. Every job is the command that a user
would type, and an interrupted report goes on where it stopped. Figures go to
``benchmarks/results/report_rewards.{json,md,png}``. Exit status 1 where a demand is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _reward_jobs import MODELS, TESTS, Plan, run_seed
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
from shared.tables import triple, write_report

from selfcal_lightning.data.steps import POSITIONS
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import estimate_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
COLLECT = "--collect"
SEARCHED = {
    "beam": "beam search",
    "beam_km": "beam search, width and number by the scores",
    "trees": "diverse tree search",
    "particles": "particle filtering",
}
SMALL = {"training": 120, "rolled": 20, "id": 30, "ood": 30, "calibration": 20, "rolled_responses": 4, "searched": 15}


def main() -> int:
    """Run all jobs that are not done yet, then print and write the report."""
    options = parse_arguments()
    questions = {"id": options.id, "ood": options.ood, "calibration": options.calibration}
    plan = Plan(
        options.output, options.training, options.rolled, questions, options.num_samples, options.rolled_responses,
        options.num_rollouts, options.searched,
    )  # fmt: skip
    if not options.collect:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
            list(pool.map(partial(run_seed, plan), options.seeds))
    report = assemble(plan, options.seeds)
    given = [argument for argument in sys.argv[1:] if argument != COLLECT]
    report["command"] = f"python benchmarks/rewards/report_rewards.py {' '.join(given)}" if given else FULL
    write_report(options.results, "report_rewards", report, as_markdown(report), picture=figure(report), dpi=110)
    return 1 if any(row["met"] is False for row in report["criteria"]) else 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/report-rewards"), help="samples, models, logs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--training", type=int, default=1500, help="training questions without rollouts, x 8")
    parser.add_argument("--rolled", type=int, default=250, help="training questions with rollouts, x 8")
    parser.add_argument("--id", type=int, default=300, help="in-domain test questions")
    parser.add_argument("--ood", type=int, default=300, help="out-of-domain test questions")
    parser.add_argument("--calibration", type=int, default=60, help="questions for what is fitted to labels")
    parser.add_argument("--num_samples", type=int, default=16, help="responses to each of these, at least 8")
    parser.add_argument("--rolled_responses", type=int, default=8, help="how many of them are rolled out")
    parser.add_argument("--num_rollouts", type=int, default=8)
    parser.add_argument("--searched", type=int, default=100, help="questions that are searched live")
    parser.add_argument("--workers", type=int, default=2, help="seeds at a time, one thread each")
    parser.add_argument("--small", action="store_true", help=f"sizes of a few CPU minutes a seed: {SMALL}")
    parser.add_argument(COLLECT, action="store_true", help="run nothing, only collect what is there")
    options = parser.parse_args()
    if options.small:
        parser.set_defaults(**SMALL)
        options = parser.parse_args()
    if options.num_samples < 8:
        parser.error(f"Expected --num_samples to be at least 8, but got {options.num_samples}.")
    return options


def assemble(plan: Plan, seeds: Sequence[int]) -> dict[str, Any]:
    """Compute every figure of the report from the stores."""
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
    sizes = {name: getattr(plan, name) for name in ("training", "rolled", "num_samples", "rolled_responses",
                                                    "num_rollouts", "searched")}  # fmt: skip
    return {
        "sizes": {**sizes, **plan.questions},
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
