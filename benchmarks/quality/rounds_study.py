"""One generation round against two and three, with the same number of responses, tuples and optimiser steps."""

import argparse
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared import study as shared
from shared.estimates import RESAMPLES, metric_columns
from shared.jobs import replace_folder, run
from shared.study import SAMPLED, Options, Study, train_on, write_configuration
from shared.tables import show, table

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.training.rounds import describe_round, describe_shift, question_targets

ONE = "one round"
ARMS = {ONE: 1, "two, replace": 2, "three, replace": 3}  # rounds
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
SIZES = {
    "questions": (1000, "training questions"),
    "responses": (12, "responses a training question over all rounds"),
    "tuples": (7296, "training tuples over all rounds"),
    "test": (1000, "in-domain test questions"),
    "num_samples": (16, "responses per test question"),
    "workers": (2, "jobs at a time, one core each"),
}
QUICK = {"seeds": [0], "questions": 48, "responses": 12, "tuples": 192, "test": 40, "num_samples": 4}


def run_arms(
    options: argparse.Namespace, first: str, arms: Mapping[str, Any], calibrate: Callable[[Any, str, int], None]
) -> None:
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda seed: calibrate(options, first, seed), options.seeds))
        others = [(name, seed) for seed in options.seeds for name in arms if name != first]
        list(pool.map(lambda job: calibrate(options, *job), others))
        list(pool.map(lambda seed: sample_test(options, BASE, seed, "bundled"), options.seeds))


def complete(parser: argparse.ArgumentParser, options: Options) -> None:
    if options.responses % 6 or options.tuples % 192:
        parser.error("--responses must be a multiple of 6, and --tuples of 192, so that all arms cost the same")


def folder_of(options: argparse.Namespace, arm: str, seed: int) -> Path:
    return options.output / arm.replace(", ", "_").replace(" ", "_") / f"seed-{seed}"


def calibrate(options: argparse.Namespace, arm: str, seed: int) -> None:
    fit_arm(options, ONE, arm, seed, configuration(options, arm, seed))


def fit_arm(options: argparse.Namespace, first: str, arm: str, seed: int, config: dict[str, Any]) -> None:
    folder = folder_of(options, arm, seed)
    merged = folder / "calibrated"
    write_configuration(folder / "config.yaml", config)
    if not (merged / "config.json").exists():
        if arm != first and not (folder / "samples").exists():
            replace_folder(folder_of(options, first, seed) / "samples", folder / "samples")
        run(folder / "log.txt", "fit", "--config", str(folder / "config.yaml"))
        run(folder / "log.txt", "export", "--adapter", str(folder / "adapter"), "--output_dir", str(merged))
    sample_test(options, arm, seed, str(merged))


def configuration(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    folder, rounds = folder_of(options, arm, seed), ARMS.get(arm, 1)
    keep = {"SSCGeneration", "AdapterExport"}
    config = shared.configuration("demo-joint.yaml", seed=seed, folder=folder, adapter=folder / "adapter", keep=keep)
    config["trainer"] |= {"max_epochs": rounds, "reload_dataloaders_every_n_epochs": 1}
    config["trainer"]["callbacks"][0]["init_args"]["shard_by_shard"] = True
    data = train_on(config, folder / "samples", limit=options.questions)
    data |= {
        "num_samples": options.responses // rounds,
        "total_tuples": options.tuples // rounds,
        "regenerate_every_n_epochs": 1 if rounds > 1 else None,
        "round_rule": "replace",
        "validation": [],
    }
    return config


def sample_test(options: argparse.Namespace, arm: str, seed: int, model: str) -> None:
    folder = folder_of(options, arm, seed)
    run(
        folder / "log.txt", "generate", "--model", model, "--store_dir", str(folder / "own"),
        "--task", "[word_problems]", "--split", "test_id", "--store_split", "id", "--limit", str(options.test),
        "--num_samples", str(options.num_samples), *SAMPLED, "--seed", str(1000 + seed),
    )  # fmt: skip


def assemble(options: Options) -> dict[str, Any]:
    arms = arm_values(options, ONE, ARMS, "minus_one_round")
    for arm, rounds in ARMS.items():
        store = samples_of(options, arm, options.seeds[0])  # what was sampled is counted there, in the first seed
        responses = sum(len(store.index(split="train", round=number)) for number in range(rounds))
        cost = {"responses": responses, "tuples": options.tuples // rounds * rounds}
        arms[arm] |= {"cost": cost, "rounds": [drift(options, arm, one) for one in range(rounds)]}
    return {
        "sizes": options.sizes("questions", "responses", "tuples", "test", "num_samples", "seeds"),
        "training": training_of(configuration(options, ONE, options.seeds[0])),
        "arms": arms,
        "minutes": options.minutes,
    }


def arm_values(options: Options, first: str, arms: Mapping[str, Any], difference: str) -> dict[str, dict[str, Any]]:
    columns = {arm: np.stack([test_values(options, arm, seed) for seed in options.seeds]) for arm in (BASE, *arms)}

    def estimates(values: np.ndarray) -> dict[str, Any]:
        return {name: estimate(values[:, i]) for i, name in enumerate(METRICS)}

    found: dict[str, dict[str, Any]] = {}
    for arm, values in columns.items():
        by_seed = {name: values[:, i, 0].tolist() for i, name in enumerate(METRICS)}
        found[arm] = {"values": estimates(values), "by_seed": by_seed}
        if arm != BASE:
            found[arm][difference] = estimates(values - columns[first])
    return found


def training_of(config: Mapping[str, Any]) -> dict[str, Any]:
    data = config["data"]["init_args"]
    return {"precision": config["trainer"]["precision"], **{name: data[name] for name in ("packing", "group_size")}}


def test_values(options: argparse.Namespace, arm: str, seed: int) -> np.ndarray:
    scored = scored_responses(list(SampleStore(folder_of(options, arm, seed) / "own").samples(split="id")))
    columns = scored.confidence, scored.correct, scored.question_index
    return np.stack(list(metric_columns(columns, list(METRICS.values()), num_resamples=RESAMPLES).values()))


def estimate(columns: np.ndarray) -> dict[str, float | None]:
    """Return the mean over seeds and its 95 % interval over resampled questions and resampled seeds."""
    draws = np.random.default_rng(0).integers(len(columns), size=(RESAMPLES, len(columns)))
    resampled = columns[:, 1:][draws.T, np.arange(columns.shape[1] - 1)].mean(axis=0)
    return plain(Estimate.from_resamples(float(columns[:, 0].mean()), resampled))


def plain(entry: Estimate) -> dict[str, float | None]:
    return {"value": entry.value, "low": entry.low, "high": entry.high}


def samples_of(options: argparse.Namespace, arm: str, seed: int) -> SampleStore:
    return SampleStore(folder_of(options, arm, seed) / "samples", num_samples=options.responses // ARMS[arm])


def drift(options: argparse.Namespace, arm: str, number: int) -> dict[str, float]:
    rows = []
    for seed in options.seeds:
        store = samples_of(options, arm, seed)
        index = store.index(split="train", round=number)
        values = describe_round(index)
        if number:
            earlier = store.index(split="train", round=number - 1)
            values |= describe_shift(question_targets(earlier), question_targets(index))
        rows.append(values)
    return {name: float(np.mean([row[key] for row in rows])) for name, key in DRIFT.items() if key in rows[0]}


def as_markdown(study: Mapping[str, Any]) -> str:
    sizes, arms = study["sizes"], study["arms"]
    trained = [arm for arm in arms if arm != BASE]
    lines = [
        f"Command: `{study['command']}` ({study['minutes']} minutes for the jobs that were not done before). "
        f"{sizes['questions']} training questions, {describe_training(study)}; {sizes['test']} in-domain questions "
        f"x {sizes['num_samples']} responses, each model on its own samples; means over seeds {sizes['seeds']}, 95 % "
        "intervals over questions and seeds.",
        "",
    ]
    rows = []
    for arm, entry in arms.items():
        costs = [f"{entry.get('cost', {}).get(name, 0):,}" for name in ("responses", "tuples")]
        rows.append([arm, *costs, *map(show, entry["values"].values())])
    lines += table(["arm", "responses sampled", "tuples", *METRICS], rows)
    rows = [[arm, *map(show, arms[arm]["minus_one_round"].values())] for arm in trained if arm != ONE]
    lines += ["", *table([f"minus {ONE}", *METRICS], rows), ""]
    rows = [
        [arm, str(number), *(f"{values[name]:.3f}" if name in values else "" for name in DRIFT)]
        for arm in trained
        for number, values in enumerate(arms[arm]["rounds"])
    ]
    return "\n".join([*lines, *table(["arm", "round", *DRIFT], rows)]) + "\n"


def describe_training(study: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}: {value}`" for name, value in study["training"].items())


if __name__ == "__main__":
    study = Study(
        "quality/rounds_study.py", SIZES, lambda options: run_arms(options, ONE, ARMS, calibrate), assemble,
        as_markdown, quick=QUICK, complete=complete, layout={"indent": 1},
    )  # fmt: skip
    raise SystemExit(study.main())
