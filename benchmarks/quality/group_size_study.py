"""What ``group_size`` costs in quality: responses drawn one by one against groups of a question, on the bundled model.

    python benchmarks/quality/group_size_study.py [--quick]

Every arm of a seed trains on the same samples, on the same tuples in another order, in as many optimiser steps; each
model answers the same test questions. Packing changes no figure (tests/models/test_shared_prefix.py), so it is off: the
demo's settings, a micro-batch of 32 being a step. Every job is a command of the user's, and is resumed. Figures go to
``benchmarks/results/group_size_study.{json,md}``.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rounds_study import (
    BASE,
    METRICS,
    RESAMPLES,
    RESULTS,
    configuration,
    copy_atomically,
    describe_training,
    estimate,
    folder_of,
    publish,
    sample_test,
    settle,
    show,
    test_values,
    training_of,
)
from shared.jobs import run

ARMS = {"one by one": 1, "groups of 4": 4, "groups of 8": 8}
FIRST = next(iter(ARMS))


def main() -> int:
    """Run all jobs that are not done yet, then print and write the figures."""
    options = parse_arguments()
    started = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda seed: calibrate(options, FIRST, seed), options.seeds))
        others = [(arm, seed) for seed in options.seeds for arm in ARMS if arm != FIRST]
        list(pool.map(lambda job: calibrate(options, *job), others))
        list(pool.map(lambda seed: sample_test(options, BASE, seed, "bundled"), options.seeds))
    publish(options, "group_size_study", assemble(options), started, as_markdown)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/group_size_study"), help="samples, models and logs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=700, help="training questions")
    parser.add_argument("--responses", type=int, default=10, help="responses a training question")
    parser.add_argument("--tuples", type=int, default=7000, help="training tuples")
    parser.add_argument("--test", type=int, default=600, help="in-domain test questions")
    parser.add_argument("--num_samples", type=int, default=8, help="responses per test question")
    parser.add_argument("--workers", type=int, default=2, help="jobs at a time, one core each")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one seed: whether it runs")
    options = parser.parse_args()
    options.engine = "transformers"
    if options.quick:
        options.seeds, options.questions, options.responses, options.tuples = [0], 24, 8, 96
        options.test, options.num_samples = 20, 4
    return options


def calibrate(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Fit, export and sample the test questions of one arm with one seed."""
    folder = folder_of(options, arm, seed)
    merged = folder / "calibrated"
    config = configuration(options, arm, seed)
    config["data"]["init_args"] |= {"packing": "off", "group_size": ARMS[arm]}
    settle(folder / "config.yaml", config)
    if not (merged / "config.json").exists():
        if arm != FIRST and not (folder / "samples").exists():
            copy_atomically(folder_of(options, FIRST, seed) / "samples", folder / "samples")
        run(folder / "log.txt", "fit", "--config", str(folder / "config.yaml"))
        run(folder / "log.txt", "export", "--adapter", str(folder / "adapter"), "--output_dir", str(merged))
    sample_test(options, arm, seed, str(merged))


def assemble(options: argparse.Namespace) -> dict[str, Any]:
    """Compute every figure from the stores."""
    columns = {arm: np.stack([test_values(options, arm, seed) for seed in options.seeds]) for arm in (BASE, *ARMS)}
    draws = np.random.default_rng(0).integers(len(options.seeds), size=(RESAMPLES, len(options.seeds)))
    arms: dict[str, Any] = {}
    for arm, values in columns.items():
        arms[arm] = {
            "values": {name: estimate(values[:, i], draws) for i, name in enumerate(METRICS)},
            "by_seed": {name: values[:, i, 0].tolist() for i, name in enumerate(METRICS)},
        }
        if arm not in (BASE, FIRST):
            difference = values - columns[FIRST]
            arms[arm]["difference"] = {name: estimate(difference[:, i], draws) for i, name in enumerate(METRICS)}
    names = ("questions", "responses", "tuples", "test", "num_samples", "seeds")
    sizes = {name: getattr(options, name) for name in names}
    training = training_of(configuration(options, FIRST, options.seeds[0]))
    return {"sizes": sizes, "training": {**training, "group_size": list(ARMS.values())}, "arms": arms}


def as_markdown(study: dict[str, Any]) -> str:
    """Write the study as Markdown."""
    sizes, arms = study["sizes"], study["arms"]
    rule = "|---|" + "---:|" * len(METRICS)
    lines = [
        f"Command: `{study['command']}` ({study['minutes']} minutes for the jobs that were not done before). "
        f"{sizes['questions']} training questions x {sizes['responses']} responses, {sizes['tuples']:,} tuples, 32 "
        f"to a step, {describe_training(study)}; {sizes['test']} in-domain test questions x {sizes['num_samples']} "
        f"responses, each model on its own samples; means over seeds {sizes['seeds']}, 95 % intervals over questions "
        "and seeds.",
        "",
        "| training rows | " + " | ".join(METRICS) + " |",
        rule,
        *(f"| {arm} | " + " | ".join(map(show, entry["values"].values())) + " |" for arm, entry in arms.items()),
        "",
        f"| minus {FIRST} | " + " | ".join(METRICS) + " |",
        rule,
    ]
    for arm, entry in arms.items():
        if "difference" in entry:
            lines.append(f"| {arm} | " + " | ".join(map(show, entry["difference"].values())) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
