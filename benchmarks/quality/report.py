"""``make report``: nothing, activated and joint on the bundled model, and what a sceptic would use instead.

    python benchmarks/quality/report.py [--ablations]

Every job is the command that a user would type, and an interrupted report goes on where it stopped. The base model's
responses are sampled once a seed and serve the activated confidence too; only the joint model is sampled anew. Figures
go to ``benchmarks/results/report.{json,md,png}``. Exit status 1 where a criterion is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _report_confidences import (
    CONTENDERS,
    fit_on,
    mean_tokens,
    measured_seconds,
    over_seeds,
    read_pool,
    savings,
    vote_curves,
    with_fitted,
)
from _report_jobs import ABLATIONS, ACTIVATED, BASE, JOINT, TESTS, Plan, run_ablation, run_seed
from _report_tables import FULL, SIZES_OF_VOTES, as_markdown, criteria, figure
from shared.estimates import Measured, summary
from shared.tables import triple, write_report

from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.calibration import powers_of_two
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import estimate_of

COLLECT = "--collect"
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> int:
    """Run all jobs that are not done yet, then print and write the report."""
    options = parse_arguments()
    questions = {"id": options.id, "ood": options.ood, "calibration": options.calibration}
    plan = Plan(options.output, options.training, questions, options.num_samples, options.asleep, options.threads)
    started = time.monotonic()
    plan.output.mkdir(parents=True, exist_ok=True)
    ablations = tuple(ABLATIONS) if options.ablations else ()
    if not options.collect:
        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(lambda seed: run_seed(plan, seed), options.seeds))
            list(pool.map(lambda name: run_ablation(plan, options.seeds[0], name), ablations))
    report = assemble(plan, options.seeds, ablations)
    report["minutes"] = round((time.monotonic() - started) / 60, 1)
    given = [argument for argument in sys.argv[1:] if argument != COLLECT]
    report["command"] = f"python benchmarks/quality/report.py {' '.join(given)}" if given else FULL
    write_report(options.results, "report", report, as_markdown(report), picture=figure(report))
    return 0 if all(row["met"] for row in report["criteria"]) else 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/report"), help="samples, models and logs go here")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--training", type=int, default=1000, help="training questions, 10 responses each")
    parser.add_argument("--id", type=int, default=1000, help="in-domain test questions")
    parser.add_argument("--ood", type=int, default=500, help="out-of-domain test questions")
    parser.add_argument("--calibration", type=int, default=200, help="questions for what is fitted to labels")
    parser.add_argument("--num_samples", type=int, default=16, help="responses per test question, at least 8")
    parser.add_argument("--asleep", type=int, default=50, help="questions sampled again with the sleeping adapter")
    parser.add_argument("--ablations", action="store_true", help="joint training with one change each, too")
    parser.add_argument(COLLECT, action="store_true", help="run no job: the figures of what lies in --output")
    parser.add_argument("--workers", type=int, default=2, help="jobs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of a job")
    options = parser.parse_args()
    if options.num_samples < max(SIZES_OF_VOTES):
        parser.error(f"Expected --num_samples to be at least {max(SIZES_OF_VOTES)}, but got {options.num_samples}.")
    return options


def assemble(plan: Plan, seeds: list[int], ablations: tuple[str, ...]) -> dict[str, Any]:
    """Compute every figure of the report from the stores."""
    pools = {(seed, test): read_fitted(plan, seed, test) for seed in seeds for test in TESTS}
    rows = {
        test: {
            contender.key: [measure(pools[seed, test][contender.generator], contender.confidence) for seed in seeds]
            for contender in CONTENDERS
        }
        for test in TESTS
    }
    curves = {test: over_seeds([vote_curves(pools[seed, test]) for seed in seeds]) for test in TESTS}
    first = {kind: plan.folder(seeds[0], kind) for kind in (ACTIVATED, JOINT)}
    seconds = measured_seconds(plan.output, first[ACTIVATED] / "adapter", first[JOINT] / "calibrated")
    sizes = powers_of_two(plan.num_samples)
    targets = [size for size in (4, 8, 16) if size <= plan.num_samples]
    tokens = {
        test: {name: mean_tokens(found[JOINT if name == JOINT else BASE]) for name in (BASE, ACTIVATED, JOINT)}
        for test, found in ((test, pools[seeds[0], test]) for test in TESTS)
    }
    unequal, compared = changed_texts(plan, seeds)
    return {
        "sizes": {"training": plan.training, "num_samples": plan.num_samples, **plan.questions},
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
        "savings": {test: savings_rows(curves[test], targets, tokens[test], seconds) for test in TESTS},
        "ablations": {name: ablation(plan, seeds[0], name) for name in ablations},
    }  # fmt: skip


def read_fitted(plan: Plan, seed: int, test: str) -> dict[str, RecordedPool]:
    """Return the responses to a test set by generator, with what the seed's calibration questions fit."""
    fitted = {name: fit_on(read_pool(plan, seed, name, "calibration").entries, name) for name in (BASE, JOINT)}
    wanted = {name: read_pool(plan, seed, name, test) for name in (BASE, JOINT)}
    return {name: with_fitted(pool, fitted[name]) for name, pool in wanted.items()}


def measure(pool: RecordedPool, confidence: str) -> Measured:
    """Measure one confidence on the responses of one seed."""
    return Measured.of(scored_responses(pool.entries, name=confidence))


def savings_rows(
    curves: Mapping[str, Floats],
    targets: list[int],
    tokens: Mapping[str, tuple[float, int]],
    seconds: Mapping[str, tuple[float, float]],
) -> dict[str, list[dict[str, Any]]]:
    """Return what each weighing needs at equal accuracy, as plain JSON types."""
    found = savings(curves, targets, tokens, seconds)
    return {
        key: [
            {
                "target": row.target,
                "samples": triple(row.samples),
                "tokens": None if row.tokens is None else round(row.tokens, 1),
                "seconds": None if row.seconds is None else round(row.seconds, 5),
            }
            for row in rows
        ]
        for key, rows in found.items()
    }


def changed_texts(plan: Plan, seeds: list[int]) -> tuple[int, int]:
    """Return how many texts differ with the sleeping adapter loaded, and how many were compared."""
    unequal = compared = 0
    for seed in seeds:
        asleep = SampleStore(plan.folder(seed, ACTIVATED) / "asleep").samples(split="id")
        texts = {
            entry.question.id: [sample.text for sample in entry.samples]
            for entry in SampleStore(plan.responses(seed, BASE)).samples(split="id")
        }
        pairs = [
            (sample.text, text)
            for entry in asleep
            for sample, text in zip(entry.samples, texts[entry.question.id], strict=True)
        ]
        unequal += sum(one != other for one, other in pairs)
        compared += len(pairs)
    return unequal, compared


def ablation(plan: Plan, seed: int, name: str) -> dict[str, list[float | None]]:
    """Return the metrics of one variant of joint training."""
    pool = read_pool(plan, seed, name, "id")
    return {metric: triple(value) for metric, value in summary([measure(pool, "p_true")]).items()}


if __name__ == "__main__":
    raise SystemExit(main())
