"""``make report-capability``: how well the bundled model's capability is known before it answers, over three seeds.

    python benchmarks/capability/report_capability.py

Every job is the command that a user would type; one that is done is not run again. A seed draws its own responses to
the same questions. Figures go to ``benchmarks/results/report_capability.{json,md,png}``. Exit status 1 where a target
is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _capability_jobs import AWAKE, TAUGHT, Plan, run_seed
from _capability_measures import Columns, confidence_columns, measure_seed, processor_seconds, size_columns, targets
from _capability_tables import as_markdown, figure
from shared.estimates import Column, column_over_seeds, estimated
from shared.jobs import seconds_of
from shared.tables import triple, write_report

from selfcal_lightning.evaluation.figures import save_figure
from selfcal_lightning.metrics.calibration import ErrorBounds

RESULTS = Path(__file__).resolve().parents[1] / "results"
IMAGES = RESULTS.parents[1] / "docs" / "images"
# Seconds of a prompt's pass are small numbers.
DIGITS = 5


def main() -> int:
    """Run what is not done, and write the report."""
    options = _arguments()
    plan = Plan(
        options.output, options.train, options.train_samples,
        {"id": options.id, "ood": options.ood, "calibration": options.calibration}, options.num_samples,
        tuple(seed for seed in options.seeds if seed in options.taught_seeds),
        tuple(seed for seed in options.seeds if seed in options.awake_seeds),
    )  # fmt: skip
    for seed in options.seeds:
        run_seed(plan, seed)
    columns = over_seeds([_measured(plan, seed) for seed in options.seeds])
    seconds = _timed(plan)
    checks = targets(columns, seconds=seconds)
    given = " ".join(["python benchmarks/capability/report_capability.py", *sys.argv[1:]])
    report = {
        "command": given,
        "seeds": options.seeds,
        "taught_seeds": plan.taught_seeds,
        "awake_seeds": plan.awake_seeds,
        "sizes": {"train": plan.train, "train_samples": plan.train_samples, "samples": plan.samples, **plan.questions},
        "processor_minutes": sum(sum(seconds_of(plan.folder(seed)).values()) for seed in options.seeds) / 60.0,
        "seconds": {"a prompt's states": seconds[0], "a response": seconds[1]},
    }
    report["checks"] = [{**asdict(check), "found": triple(check.found, digits=DIGITS)} for check in checks]
    report["measured"] = {key: _plain(column) for key, column in columns.items()}
    _write(options.results, report)
    return 0 if all(check.holds for check in checks) else 1


def over_seeds(found: Sequence[Columns]) -> Columns:
    """Return the mean of each column over the seeds that have it; intervals are over questions and seeds."""
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: column_over_seeds([one[key] for one in found if key in one]) for key in keys}


def _measured(plan: Plan, seed: int) -> Columns:
    """Return all columns of a seed."""
    folder = plan.folder(seed)
    trained = {TAUGHT: plan.taught_seeds, AWAKE: plan.awake_seeds}
    without = [name for name, seeds in trained.items() if seed not in seeds]
    return measure_seed(folder, without=without) | size_columns(folder) | confidence_columns(folder, without=without)


def _timed(plan: Plan) -> tuple[float, float]:
    """Return the processor seconds that were measured, now where they have not yet."""
    file = plan.output / "seconds.json"
    if not file.exists():
        file.write_text(json.dumps(processor_seconds()))
    reading, answering = json.loads(file.read_text())
    return reading, answering


def _write(results: Path, report: Mapping[str, Any]) -> None:
    picture = figure(report["measured"])
    write_report(results, "report_capability", report, as_markdown(report), picture=picture)
    if results == RESULTS:
        save_figure(picture, IMAGES / "report_capability.png", dpi=120)


def _plain(column: Column) -> Any:
    """Return value and ends of each column."""
    if not isinstance(column, ErrorBounds) and column.ndim > 1:
        return [_plain(row) for row in column]
    return triple(estimated(column), digits=DIGITS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/report-capability"), help="stores, probes, logs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--taught_seeds", type=int, nargs="*", default=[0, 1, 2], help="whose P(True) before is taught")
    parser.add_argument("--awake_seeds", type=int, nargs="*", default=[0, 1, 2], help="whose P(True) after is trained")
    parser.add_argument("--train", type=int, default=2000, help="training questions")
    parser.add_argument("--train_samples", type=int, default=10)
    parser.add_argument("--id", type=int, default=300, help="test questions in domain")
    parser.add_argument("--ood", type=int, default=150, help="test questions out of domain")
    parser.add_argument("--calibration", type=int, default=200)
    parser.add_argument("--num_samples", type=int, default=16, help="responses to test and calibration questions")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
