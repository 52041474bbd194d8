"""One generation round against two and three at equal cost, on the bundled model, with several seeds.

Every arm samples the same number of responses in all and trains on the same number of tuples in all, in the same
number of optimiser steps with the same schedule: one round of 12 responses a question, two of 6, three of 4. Later
rounds replace the earlier ones or are mixed with them. Every job is the command that a user would type and all are
resumable. Figures go to ``benchmarks/results/rounds_study.{json,md}``.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import yaml
from shared.estimates import question_values
from shared.jobs import run
from shared.tables import write_report

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.bootstrap import Estimate, question_bootstrap
from selfcal_lightning.models.folders import config_path
from selfcal_lightning.training.rounds import describe_round, describe_shift, question_targets

RESULTS = Path(__file__).resolve().parents[1] / "results"
ONE = "one round"
ARMS: dict[str, tuple[int, str]] = {
    ONE: (1, "replace"),
    "two, replace": (2, "replace"),
    "two, mix": (2, "mix"),
    "three, replace": (3, "replace"),
    "three, mix": (3, "mix"),
}
BASE = "base"
METRICS = {"ECE": "calibration/ECE", "AUROC": "discrimination/AUROC", "pass@1": "accuracy/PassAt1"}
DRIFT = {
    "mean shift": "shift/Mean",
    "mean abs. shift": "shift/MeanAbsolute",
    "Spearman": "shift/Spearman",
    "leader kept": "shift/LeaderKept",
    "unreadable": "rate/Unreadable",
    "ECE": "calibration/ECE",
    "pass@1": "accuracy/PassAt1",
}
RESAMPLES = 1000


def main() -> int:
    """Run all jobs that are not done yet, then print and write the figures."""
    options = parse_arguments()
    started = time.monotonic()
    with ThreadPoolExecutor(options.workers) as pool:
        # The first arm samples round 0 of its seed, whose first responses are round 0 of the other arms.
        list(pool.map(lambda seed: calibrate(options, ONE, seed), options.seeds))
        others = [(name, seed) for seed in options.seeds for name in ARMS if name != ONE]
        list(pool.map(lambda job: calibrate(options, *job), others))
        list(pool.map(lambda seed: sample_test(options, BASE, seed, "bundled"), options.seeds))
    publish(options, "rounds_study", assemble(options), started, as_markdown)
    return 0


def publish(
    options: argparse.Namespace,
    name: str,
    study: dict[str, Any],
    started: float,
    as_text: Callable[[dict[str, Any]], str],
) -> None:
    """Print a study and write it to ``name``.json and .md, with its command and the minutes since ``started``."""
    study["minutes"] = round((time.monotonic() - started) / 60, 1)
    study["command"] = f"python benchmarks/quality/{name}.py {' '.join(sys.argv[1:])}".strip()
    write_report(options.results, name, study, as_text(study), indent=1)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/rounds_study"), help="samples, models and logs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--questions", type=int, default=1000, help="training questions")
    parser.add_argument("--responses", type=int, default=12, help="responses a training question over all rounds")
    parser.add_argument("--tuples", type=int, default=7296, help="training tuples over all rounds")
    parser.add_argument("--test", type=int, default=1000, help="in-domain test questions")
    parser.add_argument("--num_samples", type=int, default=16, help="responses per test question")
    parser.add_argument(
        "--rules",
        nargs="+",
        choices=["replace", "mix"],
        default=["replace", "mix"],
        help="of the arms with more rounds",
    )
    parser.add_argument("--workers", type=int, default=2, help="jobs at a time, one core each")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one seed: whether it runs, not what comes out"
    )
    options = parser.parse_args()
    options.engine = "transformers"
    for name in [name for name, (_, rule) in ARMS.items() if name != ONE and rule not in options.rules]:
        del ARMS[name]
    if options.quick:
        options.seeds, options.questions, options.responses, options.tuples = [0], 48, 12, 192
        options.test, options.num_samples = 40, 4
    for rounds, _ in ARMS.values():
        if options.responses % rounds or options.tuples % (rounds * 32):
            parser.error("--responses must be a multiple of 6, and --tuples of 192, so that all arms cost the same")
    return options


def folder_of(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """Return where a job writes."""
    return options.output / arm.replace(", ", "_").replace(" ", "_") / f"seed-{seed}"


def calibrate(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Fit, export and sample the test questions of one arm with one seed."""
    folder = folder_of(options, arm, seed)
    merged = folder / "calibrated"
    settle(folder / "config.yaml", configuration(options, arm, seed))
    if not (merged / "config.json").exists():
        if arm != ONE and not (folder / "samples").exists():
            copy_atomically(folder_of(options, ONE, seed) / "samples", folder / "samples")
        run(folder / "log.txt", "fit", "--config", str(folder / "config.yaml"))
        run(folder / "log.txt", "export", "--adapter", str(folder / "adapter"), "--output_dir", str(merged))
    sample_test(options, arm, seed, str(merged))


def settle(path: Path, config: dict[str, Any]) -> None:
    """Write a job's configuration, or stop where what lies there was made with another one."""
    text = yaml.safe_dump(config, sort_keys=False)
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"Expected {path} to be what this study trains with, but it differs. Name a new --output.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a folder so that it is there as a whole or not at all."""
    fresh = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    fresh.rename(target)


def configuration(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Return the demo's configuration with this seed, the study's sizes and the arm's rounds."""
    config = yaml.safe_load(Path(config_path("demo-joint.yaml")).read_text())
    folder, (rounds, rule) = folder_of(options, arm, seed), ARMS.get(arm, (1, "replace"))
    config["seed_everything"] = seed
    config["trainer"] |= {"enable_progress_bar": False, "max_epochs": rounds, "reload_dataloaders_every_n_epochs": 1}
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(folder)
    by_name = {entry["class_path"].rsplit(".", 1)[-1]: entry for entry in config["trainer"]["callbacks"]}
    by_name["SSCGeneration"]["init_args"] |= {"seed": seed, "shard_by_shard": True}
    by_name["AdapterExport"]["init_args"]["output_dir"] = str(folder / "adapter")
    config["trainer"]["callbacks"] = [by_name["SSCGeneration"], by_name["AdapterExport"]]
    config["model"]["init_args"]["seed"] = seed
    config["data"]["init_args"] |= {
        "seed": seed,
        "store_dir": str(folder / "samples"),
        "num_samples": options.responses // rounds,
        "total_tuples": options.tuples // rounds,
        "regenerate_every_n_epochs": 1 if rounds > 1 else None,
        "round_rule": rule,
        "train": [{"task": "word_problems", "split": "train", "limit": options.questions}],
        "validation": [],
    }
    return config


def sample_test(options: argparse.Namespace, arm: str, seed: int, model: str) -> None:
    """Sample the in-domain test questions from a model."""
    folder = folder_of(options, arm, seed)
    run(
        folder / "log.txt", "generate", "--model", model, "--store_dir", str(folder / "own"),
        "--task", "[word_problems]", "--split", "test_id", "--store_split", "id", "--limit", str(options.test),
        "--num_samples", str(options.num_samples), "--sampling.max_new_tokens", "120", "--engine.max_batch", "512",
        "--seed", str(1000 + seed),
    )  # fmt: skip


def assemble(options: argparse.Namespace) -> dict[str, Any]:
    """Compute every figure from the stores."""
    columns = {arm: np.stack([test_values(options, arm, seed) for seed in options.seeds]) for arm in (BASE, *ARMS)}
    draws = np.random.default_rng(0).integers(len(options.seeds), size=(RESAMPLES, len(options.seeds)))
    arms = {}
    for arm, values in columns.items():
        arms[arm] = {
            "values": {name: estimate(values[:, i], draws) for i, name in enumerate(METRICS)},
            "by_seed": {name: values[:, i, 0].tolist() for i, name in enumerate(METRICS)},
        }
        if arm in ARMS:
            difference = values - columns[ONE]
            arms[arm]["minus_one_round"] = {name: estimate(difference[:, i], draws) for i, name in enumerate(METRICS)}
            arms[arm]["cost"] = cost_of(options, arm)
            arms[arm]["rounds"] = [drift(options, arm, number) for number in range(ARMS[arm][0])]
    names = ("questions", "responses", "tuples", "test", "num_samples", "seeds", "rules")
    sizes = {name: getattr(options, name) for name in names}
    return {"sizes": sizes, "training": training_of(configuration(options, ONE, options.seeds[0])), "arms": arms}


def training_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide how rows are drawn and computed."""
    data = config["data"]["init_args"]
    return {"precision": config["trainer"]["precision"], **{name: data[name] for name in ("packing", "group_size")}}


def test_values(options: argparse.Namespace, arm: str, seed: int) -> np.ndarray:
    """Return each metric of a model's own test samples, on all questions and on resamples, [metric, 1 + R]."""
    scored = scored_responses(list(SampleStore(folder_of(options, arm, seed) / "own").samples(split="id")))
    columns = scored.confidence, scored.correct, scored.question_index
    values = question_values(*columns)
    resampled = question_bootstrap(*columns, metrics=list(METRICS.values()), num_resamples=RESAMPLES)
    return np.stack([np.concatenate([[values[key]], resampled[key]]) for key in METRICS.values()])


def estimate(columns: np.ndarray, draws: np.ndarray) -> dict[str, float | None]:
    """Return the mean over seeds and its 95 % interval over resampled questions and resampled seeds."""
    resampled = columns[:, 1:][draws.T, np.arange(columns.shape[1] - 1)].mean(axis=0)
    entry = Estimate.from_resamples(float(columns[:, 0].mean()), resampled)
    return {"value": entry.value, "low": entry.low, "high": entry.high}


def cost_of(options: argparse.Namespace, arm: str) -> dict[str, int]:
    """Return what an arm sampled and trained on in the first seed, counted in its store where it can be."""
    rounds = ARMS[arm][0]
    store = SampleStore(folder_of(options, arm, options.seeds[0]) / "samples", num_samples=options.responses // rounds)
    responses = sum(len(store.index(split="train", round=number)) for number in range(rounds))
    return {"responses": responses, "tuples": options.tuples // rounds * rounds}


def drift(options: argparse.Namespace, arm: str, number: int) -> dict[str, float]:
    """Return what a round is like and how far its targets moved, means over the seeds."""
    rows = []
    for seed in options.seeds:
        store = SampleStore(
            folder_of(options, arm, seed) / "samples", num_samples=options.responses // ARMS[arm][0]
        )  # fmt: skip
        index = store.index(split="train", round=number)
        values = describe_round(index)
        if number:
            earlier = store.index(split="train", round=number - 1)
            values |= describe_shift(question_targets(earlier), question_targets(index))
        rows.append(values)
    return {name: float(np.mean([row[key] for row in rows])) for name, key in DRIFT.items() if key in rows[0]}


def as_markdown(study: Mapping[str, Any]) -> str:
    """Write the study as Markdown."""
    sizes, arms = study["sizes"], study["arms"]
    lines = [
        f"Command: `{study['command']}` ({study['minutes']} minutes for the jobs that were not done before). "
        f"{sizes['questions']} training questions, {describe_training(study)}; {sizes['test']} in-domain questions "
        f"x {sizes['num_samples']} responses, each model on its own samples; means over seeds {sizes['seeds']}, 95 % "
        "intervals over questions and seeds.",
        "",
        "| arm | responses sampled | tuples | " + " | ".join(METRICS) + " |",
        "|---|---:|---:|" + "---:|" * len(METRICS),
    ]
    for arm, entry in arms.items():
        cost = entry.get("cost", {"responses": 0, "tuples": 0})
        cells = " | ".join(show(value) for value in entry["values"].values())
        lines.append(f"| {arm} | {cost['responses']:,} | {cost['tuples']:,} | {cells} |")
    lines += ["", f"| minus {ONE} | " + " | ".join(METRICS) + " |", "|---|" + "---:|" * len(METRICS)]
    for arm in ARMS:
        if arm != ONE:
            lines.append(
                f"| {arm} | " + " | ".join(show(value) for value in arms[arm]["minus_one_round"].values()) + " |"
            )
    lines += ["", "| arm | round | " + " | ".join(DRIFT) + " |", "|---|---:|" + "---:|" * len(DRIFT)]
    for arm in ARMS:
        for number, values in enumerate(arms[arm]["rounds"]):
            cells = " | ".join(f"{values[name]:.3f}" if name in values else "" for name in DRIFT)
            lines.append(f"| {arm} | {number} | {cells} |")
    return "\n".join(lines) + "\n"


def describe_training(study: Mapping[str, Any]) -> str:
    """Return the training settings in words."""
    return ", ".join(f"`{name}: {value}`" for name, value in study["training"].items())


def show(entry: Mapping[str, float | None]) -> str:
    """Return a value with its interval."""
    if entry["value"] is None:
        return "-"
    return f"{entry['value']:.3f} [{entry['low']:.3f}, {entry['high']:.3f}]"


if __name__ == "__main__":
    raise SystemExit(main())
