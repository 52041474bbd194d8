"""``make report-capability``: how well the bundled model's capability is known before it answers, over three seeds.

    python benchmarks/capability/report_capability.py

Every job is the command that a user would type; one that is done is not run again. A seed draws its own responses to
the same questions. Figures go to ``benchmarks/results/report_capability.{json,md,png}``. Exit status 1 where a target
is missed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _capability_jobs import AWAKE, TAUGHT, run_seed
from _capability_measures import Columns, confidence_columns, measure_seed, processor_seconds, size_columns, targets
from _capability_tables import as_markdown, figure
from shared.estimates import Column, column_over_seeds, estimated
from shared.jobs import seconds_of
from shared.study import IMAGES, RESULTS, Study, command_line, study_parser
from shared.tables import triple

from selfcal_lightning.evaluation.figures import save_figure
from selfcal_lightning.metrics.calibration import ErrorBounds

# Seconds of a prompt's pass are small numbers.
DIGITS = 5
SIZES = {
    "train": (2000, "training questions"),
    "train_samples": (10, "responses to each"),
    "id": (300, "test questions in domain"),
    "ood": (150, "test questions out of domain"),
    "calibration": (200, "labelled questions for maps"),
    "num_samples": (16, "responses to test and calibration questions"),
}


def main() -> int:
    """Run what is not done, and write the report."""
    parser = study_parser(__doc__, "runs/report-capability", SIZES)
    parser.add_argument("--taught_seeds", type=int, nargs="*", default=[0, 1, 2], help="whose P(True) before is taught")
    parser.add_argument("--awake_seeds", type=int, nargs="*", default=[0, 1, 2], help="whose P(True) after is trained")
    plan = parser.parse_args(namespace=Study())
    plan.taught_seeds, plan.awake_seeds = (
        [seed for seed in plan.seeds if seed in wanted] for wanted in (plan.taught_seeds, plan.awake_seeds)
    )
    for seed in plan.seeds:
        run_seed(plan, seed)
    columns = over_seeds([_measured(plan, seed) for seed in plan.seeds])
    seconds = _timed(plan)
    checks = targets(columns, seconds=seconds)
    report = {
        "command": command_line("capability/report_capability.py"),
        **plan.sizes("seeds", "taught_seeds", "awake_seeds"),
        "sizes": {**plan.sizes("train", "train_samples"), "samples": plan.num_samples, **plan.parts},
        "processor_minutes": sum(sum(seconds_of(plan.folder(seed)).values()) for seed in plan.seeds) / 60.0,
        "seconds": {"a prompt's states": seconds[0], "a response": seconds[1]},
        "checks": [{**asdict(check), "found": triple(check.found, digits=DIGITS)} for check in checks],
        "measured": {key: _plain(column) for key, column in columns.items()},
    }
    picture = figure(report["measured"])
    plan.publish("report_capability", report, as_markdown(report), picture=picture)
    if plan.results == RESULTS:
        save_figure(picture, IMAGES / "report_capability.png", dpi=120)
    return 0 if all(check.holds for check in checks) else 1


def over_seeds(found: Sequence[Columns]) -> Columns:
    """Return the mean of each column over the seeds that have it; intervals are over questions and seeds."""
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: column_over_seeds([one[key] for one in found if key in one]) for key in keys}


def _measured(plan: Study, seed: int) -> Columns:
    folder = plan.folder(seed)
    trained = {TAUGHT: plan.taught_seeds, AWAKE: plan.awake_seeds}
    without = [name for name, seeds in trained.items() if seed not in seeds]
    return measure_seed(folder, without=without) | size_columns(folder) | confidence_columns(folder, without=without)


def _timed(plan: Study) -> tuple[float, float]:
    """Return the processor seconds that were measured, now where they have not yet."""
    file = plan.output / "seconds.json"
    if not file.exists():
        file.write_text(json.dumps(processor_seconds()))
    reading, answering = json.loads(file.read_text())
    return reading, answering


def _plain(column: Column) -> Any:
    if not isinstance(column, ErrorBounds) and column.ndim > 1:
        return [_plain(row) for row in column]
    return triple(estimated(column), digits=DIGITS)


if __name__ == "__main__":
    sys.exit(main())
