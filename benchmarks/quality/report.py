"""``make report``: nothing, activated and joint on the bundled model, and what a sceptic would use instead.

    python benchmarks/quality/report.py [--ablations]

Every job is the command that a user would type, and an interrupted report goes on where it stopped. The base model's
responses are sampled once a seed and serve the activated confidence too; only the joint model is sampled anew. Figures
go to ``benchmarks/results/report.{json,md,png}``. Exit status 1 where a criterion is missed.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _report_confidences import (
    CONTENDERS,
    Saving,
    fit_on,
    mean_tokens,
    measured_seconds,
    over_seeds,
    read_pool,
    savings,
    vote_curves,
    with_fitted,
)
from _report_jobs import ABLATIONS, ACTIVATED, BASE, JOINT, Plan, run_ablation, run_seed
from _report_tables import FULL, SIZES_OF_VOTES, as_markdown, criteria, figure
from shared.estimates import Measured, summary
from shared.study import COLLECT, TESTS, command_line, study_parser
from shared.tables import triple

from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.curves import powers_of_two
from selfcal_lightning.evaluation.metrics import scored_responses
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


def main() -> int:
    """Run all jobs that are not done yet, then print and write the report."""
    parser = study_parser(__doc__, "runs/report", SIZES)
    parser.add_argument("--ablations", action="store_true", help="joint training with one change each, too")
    parser.add_argument(COLLECT, action="store_true", help="run no job: the figures of what lies in --output")
    plan = parser.parse_args(namespace=Plan())
    if plan.num_samples < max(SIZES_OF_VOTES):
        parser.error(f"Expected --num_samples to be at least {max(SIZES_OF_VOTES)}, but got {plan.num_samples}.")
    started = time.monotonic()
    plan.output.mkdir(parents=True, exist_ok=True)
    ablations = tuple(ABLATIONS) if plan.ablations else ()
    if not plan.collect:
        with ThreadPoolExecutor(plan.workers) as pool:
            list(pool.map(lambda seed: run_seed(plan, seed), plan.seeds))
            list(pool.map(lambda name: run_ablation(plan, plan.seeds[0], name), ablations))
    report = assemble(plan, plan.seeds, ablations)
    report["minutes"] = round((time.monotonic() - started) / 60, 1)
    report["command"] = command_line("quality/report.py", alone=FULL)
    plan.publish("report", report, as_markdown(report), picture=figure(report))
    return 0 if all(row["met"] for row in report["criteria"]) else 1


def assemble(plan: Plan, seeds: list[int], ablations: tuple[str, ...]) -> dict[str, Any]:
    pools = {(seed, test): read_fitted(plan, seed, test) for seed in seeds for test in TESTS}
    rows = {
        test: {
            contender.key: [measure(pools[seed, test][contender.generator], contender.confidence) for seed in seeds]
            for contender in CONTENDERS
        }
        for test in TESTS
    }
    curves = {test: over_seeds([vote_curves(pools[seed, test]) for seed in seeds]) for test in TESTS}
    first = {kind: plan.place(seeds[0], kind) for kind in (ACTIVATED, JOINT)}
    seconds = measured_seconds(plan.output, first[ACTIVATED] / "adapter", first[JOINT] / "calibrated")
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
        "savings": {
            test: {key: [saving(row) for row in rows]
                   for key, rows in savings(curves[test], targets, tokens[test], seconds).items()}
            for test in TESTS
        },
        "ablations": {name: ablation(plan, seeds[0], name) for name in ablations},
    }  # fmt: skip


def read_fitted(plan: Plan, seed: int, test: str) -> dict[str, RecordedPool]:
    """Return the responses to a test set by generator, with what the seed's calibration questions fit."""
    fitted = {name: fit_on(read_pool(plan, seed, name, "calibration").entries, name) for name in (BASE, JOINT)}
    wanted = {name: read_pool(plan, seed, name, test) for name in (BASE, JOINT)}
    return {name: with_fitted(pool, fitted[name]) for name, pool in wanted.items()}


def measure(pool: RecordedPool, confidence: str) -> Measured:
    return Measured.of(scored_responses(pool.entries, name=confidence))


def saving(row: Saving) -> dict[str, Any]:
    tokens, seconds = (None if one is None else round(one, k) for one, k in ((row.tokens, 1), (row.seconds, 5)))
    return {"target": row.target, "samples": triple(row.samples), "tokens": tokens, "seconds": seconds}


def changed_texts(plan: Plan, seeds: list[int]) -> tuple[int, int]:
    """Return how many texts differ with the sleeping adapter loaded, and how many were compared."""
    pairs: list[tuple[str, str]] = []
    for seed in seeds:
        awake = SampleStore(plan.responses(seed, BASE)).samples(split="id")
        texts = {entry.question.id: [sample.text for sample in entry.samples] for entry in awake}
        for entry in SampleStore(plan.place(seed, ACTIVATED) / "asleep").samples(split="id"):
            pairs += zip((sample.text for sample in entry.samples), texts[entry.question.id], strict=True)
    return sum(one != other for one, other in pairs), len(pairs)


def ablation(plan: Plan, seed: int, name: str) -> dict[str, list[float | None]]:
    pool = read_pool(plan, seed, name, "id")
    return {metric: triple(value) for metric, value in summary([measure(pool, "p_true")]).items()}


if __name__ == "__main__":
    raise SystemExit(main())
