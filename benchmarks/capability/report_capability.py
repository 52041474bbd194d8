"""``make report-capability``: how well the bundled model's capability is known before it answers, over three seeds.

    python benchmarks/capability/report_capability.py

Every job is the command that a user would type; one that is done is not run again. A seed draws its own responses to
the same questions. Figures go to ``benchmarks/results/report_capability.{json,md}``. Exit status 1 where a target is
missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.jobs import run_once

RESULTS = Path(__file__).resolve().parents[1] / "results"
TASK = "word_problems"
SPLITS = {"id": "test_id", "ood": "test_ood", "calibration": "calibration"}
TARGETS = {"probe": "agreeing_pairs", "labelled": "label"}
ESTIMATE_SAMPLES = 5


@dataclass(frozen=True)
class Sizes:
    """Questions of each kind, and responses to each.

    Attributes:
        train: Training questions.
        train_samples: Responses to each.
        tests: Questions by split: id, ood, calibration.
        samples: Responses to each of these.
    """

    train: int
    train_samples: int
    tests: dict[str, int]
    samples: int


@dataclass(frozen=True)
class Check:
    """A target, and what was found: the mean over seeds."""

    what: str
    found: float
    held_to: str
    holds: bool


def main() -> int:
    """Run what is not done, and write the report."""
    options = _arguments()
    tests = {"id": options.id, "ood": options.ood, "calibration": options.calibration}
    sizes = Sizes(options.train, options.train_samples, tests, options.num_samples)
    for seed in options.seeds:
        run_seed(options.output / f"seed-{seed}", seed, sizes)
    found = [read_seed(options.output / f"seed-{seed}") for seed in options.seeds]
    checks = targets(found)
    report = {
        "command": " ".join(["python benchmarks/capability/report_capability.py", *sys.argv[1:]]),
        "seeds": options.seeds,
        "checks": [vars(check) for check in checks],
        "evaluations": found,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "report_capability.json").write_text(json.dumps(report) + "\n")
    text = as_markdown(checks, found, report["command"])
    (options.results / "report_capability.md").write_text(text)
    print(text)
    return 0 if all(check.holds for check in checks) else 1


def run_seed(folder: Path, seed: int, sizes: Sizes) -> None:
    """Sample, fit, score and evaluate a seed."""
    sampled = ["--task", TASK, "--sampling.max_new_tokens", "120", "--engine.max_batch", "512", "--seed", str(seed)]
    train, tests = str(folder / "train"), str(folder / "tests")
    run_once(folder, "generate", "--model", "bundled", "--store_dir", train, "--limit", str(sizes.train),
        "--num_samples", str(sizes.train_samples), *sampled)  # fmt: skip
    for name, split in SPLITS.items():
        run_once(folder, "generate", "--model", "bundled", "--store_dir", tests, "--split", split,
            "--store_split", name, "--limit", str(sizes.tests[name]), "--num_samples", str(sizes.samples),
            *sampled)  # fmt: skip
    for name, target in TARGETS.items():
        probe = str(folder / name)
        run_once(folder, "fit-probe", "--pool", train, "--output", probe, "--target", target)
        run_once(
            folder, "score-questions", "--probe", probe, "--store_dir", tests, "--name", name, "--overwrite", "true"
        )
    for name in ("id", "ood"):
        common = ["--pool", tests, "--split", name, "--calibration_split", "calibration"]
        run_once(folder, "evaluate-capability", *common, "--estimator", "[probe,labelled]",
            "--output_dir", str(folder / f"probes-{name}"))  # fmt: skip
        run_once(folder, "evaluate-capability", *common, "--estimator", "[agreeing_pairs,top_share]",
            "--estimate_samples", str(ESTIMATE_SAMPLES), "--output_dir", str(folder / f"responses-{name}"))  # fmt: skip


def read_seed(folder: Path) -> dict[str, Any]:
    """Return what the evaluations of a seed found, by kind and split."""
    names = [f"{kind}-{split}" for kind in ("probes", "responses") for split in ("id", "ood")]
    return {name: json.loads((folder / name / "capability.json").read_text()) for name in names}


def targets(found: Sequence[dict[str, Any]]) -> list[Check]:
    """Return the targets, each on the mean over seeds of a number or of an end of its interval."""

    def check(what: str, read: Callable[[dict[str, Any]], float], least_or_most: str, bound: float) -> Check:
        value = mean(read(one) for one in found)
        holds = {"<=": value <= bound, ">=": value >= bound, ">": value > bound}[least_or_most]
        return Check(what, value, f"{least_or_most} {bound:g}", holds)

    budgets = found[0]["probes-id"]["budgets"][0]["budgets"]
    last = len(budgets) - 1
    return [
        check("MSE of the label-free probe, ID", lambda f: row(f, "probes-id", "probe")["mse"]["value"], "<=", 0.090),
        check("its upper bound", lambda f: row(f, "probes-id", "probe")["mse"]["high"], "<=", 0.105),
        check("MSE of the label-free probe, OOD", lambda f: row(f, "probes-ood", "probe")["mse"]["value"], "<=", 0.075),
        check("its upper bound, OOD", lambda f: row(f, "probes-ood", "probe")["mse"]["high"], "<=", 0.09),
        check("its skill, ID", lambda f: row(f, "probes-id", "probe")["skill"]["value"], ">=", 0.45),
        check("its Spearman, ID", lambda f: row(f, "probes-id", "probe")["spearman"]["value"], ">=", 0.66),
        check("its ECE, ID", lambda f: row(f, "probes-id", "probe")["ece"]["value"], "<=", 0.07),
        check(
            "label-free less labelled MSE, ID, upper bound",
            lambda f: -row(f, "probes-id", "labelled")["difference"]["low"], "<=", 0.01,
        ),
        check(
            f"agreeing pairs less top share of {ESTIMATE_SAMPLES}, MSE, ID",
            lambda f: -row(f, "responses-id", "top_share")["difference"]["value"], "<=", -0.03,
        ),
        check(
            "its upper bound", lambda f: -row(f, "responses-id", "top_share")["difference"]["low"], "<=", 0.0,
        ),
        check("error of the pass@k curve by maps, ID", lambda f: curve(f, "a map for each k"), "<=", 0.03),
        check(
            "maps less 1 - (1 - p)^k, curve error",
            lambda f: curve(f, "a map for each k") - curve(f, "1 - (1 - p)^k"), "<=", 0.0,
        ),
        check(
            f"solved beyond an even share at {budgets[last]} samples, Beta gain, ID, lower bound",
            lambda f: next(
                each for each in f["probes-id"]["budgets"] if each["way"] == "probe, Beta gain"
            )["gain"][last]["low"], ">", 0.0,
        ),
    ]  # fmt: skip


def row(found: dict[str, Any], evaluation: str, name: str) -> dict[str, Any]:
    """Return the row of an estimate."""
    return next(each for each in found[evaluation]["comparison"]["rows"] if each["name"] == name)


def curve(found: dict[str, Any], way: str) -> float:
    """Return the error of the label-free probe's pass@k curve, in domain."""
    curves = found["probes-id"]["pass_at_k"]
    return next(each for each in curves if (each["name"], each["way"]) == ("probe", way))["curve_error"]["value"]


def as_markdown(checks: Sequence[Check], found: Sequence[dict[str, Any]], command: str) -> str:
    """Return the report."""
    lines = [
        "# Capability of the bundled model",
        f"\n`{command}`\n",
        "| target (mean over seeds) | found | held to | holds |",
        "|---|---:|---:|---|",
    ]
    lines += [f"| {c.what} | {c.found:.4f} | {c.held_to} | {'yes' if c.holds else 'no'} |" for c in checks]
    for split, words in (("id", "in domain"), ("ood", "out of domain")):
        lines += [
            f"\n## Estimates, {words}\n",
            "| estimate | labels | MSE by seed | Spearman by seed |",
            "|---|---|---|---|",
        ]
        for evaluation in (f"probes-{split}", f"responses-{split}"):
            for position, first in enumerate(found[0][evaluation]["comparison"]["rows"]):
                rows = [one[evaluation]["comparison"]["rows"][position] for one in found]
                errors = ", ".join(_interval(each["mse"]) for each in rows)
                orders = ", ".join(_interval(each["spearman"]) for each in rows)
                needs = "yes" if first["needs_labels"] or first["name"].startswith("labelled") else "no"
                lines.append(f"| {first['name']} | {needs} | {errors} | {orders} |")
    return "\n".join(lines) + "\n"


def _interval(estimate: dict[str, Any] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return ""
    ends = "" if estimate["low"] is None else f" [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    return f"{estimate['value']:.3f}{ends}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/report-capability"), help="stores, probes, logs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the report goes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train", type=int, default=2000, help="training questions")
    parser.add_argument("--train_samples", type=int, default=10)
    parser.add_argument("--id", type=int, default=300, help="test questions in domain")
    parser.add_argument("--ood", type=int, default=150, help="test questions out of domain")
    parser.add_argument("--calibration", type=int, default=200)
    parser.add_argument("--num_samples", type=int, default=16, help="responses to test and calibration questions")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
