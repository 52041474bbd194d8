"""The jobs of ``make report-capability``: samples, probes and adapters of each seed, every one a user's own command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from shared.jobs import run_once

from selfcal_lightning.models.folders import config_path

TASK = "word_problems"
SPLITS = {"id": "test_id", "ood": "test_ood", "calibration": "calibration"}
TESTS = ("id", "ood")
PROBE, LABELLED, BEFORE, TAUGHT, AWAKE = "probe", "labelled", "p_true_before", "taught", "p_true_awake"
TARGETS = {PROBE: "agreeing_pairs", LABELLED: "label"}
CALIBRATED_ON = 700  # training questions of the demo
# Rows that the shipped configuration of a taught P(True) goes through; more questions take fewer epochs.
TAUGHT_ROWS = 7000


@dataclass(frozen=True)
class Plan:
    """What is run."""

    output: Path
    train: int
    train_samples: int
    questions: Mapping[str, int]
    samples: int
    taught_seeds: tuple[int, ...]
    awake_seeds: tuple[int, ...]

    def folder(self, seed: int) -> Path:
        """Return where all of a seed lies."""
        return self.output / f"seed-{seed}"


def run_seed(plan: Plan, seed: int) -> None:
    """Sample, fit and score what is not done yet of a seed."""
    folder = plan.folder(seed)
    train, tests = str(folder / "train"), str(folder / "tests")
    sampled = ["--task", TASK, "--sampling.max_new_tokens", "120", "--engine.max_batch", "512", "--seed", str(seed)]
    run_once(folder, "generate", "--model", "bundled", "--store_dir", train, "--limit", str(plan.train),
        "--num_samples", str(plan.train_samples), *sampled)  # fmt: skip
    for name, split in SPLITS.items():
        run_once(folder, "generate", "--model", "bundled", "--store_dir", tests, "--split", split, "--store_split",
            name, "--limit", str(plan.questions[name]), "--num_samples", str(plan.samples), *sampled)  # fmt: skip
    for name, target in TARGETS.items():
        probe = str(folder / name)
        run_once(folder, "fit-probe", "--pool", train, "--output", probe, "--target", target)
        run_once(
            folder, "score-questions", "--probe", probe, "--store_dir", tests, "--name", name, "--overwrite", "true"
        )
    run_once(folder, "score-questions", "--estimator", BEFORE, "--store_dir", tests)
    if seed in plan.taught_seeds:
        _teach(plan, seed)
    if seed in plan.awake_seeds:
        _calibrate(plan, seed)


def _teach(plan: Plan, seed: int) -> None:
    """Teach an activated adapter to answer before there is a response, without labels."""
    folder = plan.folder(seed)
    config = _configuration(plan, seed, "capability/taught.yaml", TAUGHT)
    epochs = max(round(TAUGHT_ROWS / plan.train), 1)
    config["trainer"] |= {"max_epochs": epochs, "check_val_every_n_epoch": epochs}
    config["data"]["init_args"]["num_samples"] = plan.train_samples
    _fit(folder, TAUGHT, config)
    run_once(folder, "score-questions", "--estimator", BEFORE, "--adapter", str(folder / TAUGHT / "adapter"),
        "--store_dir", str(folder / "tests"), "--name", TAUGHT)  # fmt: skip


def _calibrate(plan: Plan, seed: int) -> None:
    """Train the demo's activated adapter, on as many of the questions, and let it judge the test responses."""
    folder = plan.folder(seed)
    config = _configuration(plan, seed, "demo.yaml", AWAKE)
    callbacks = config["trainer"]["callbacks"]
    config["trainer"]["callbacks"] = [each for each in callbacks if not each["class_path"].endswith("SSCGeneration")]
    config["data"]["init_args"]["num_samples"] = plan.train_samples
    config["data"]["init_args"]["train"][0]["limit"] = min(CALIBRATED_ON, plan.train)
    _fit(folder, AWAKE, config)
    run_once(folder, "score", "--estimator", "p_true", "--store_dir", str(folder / "tests"), "--model", "bundled",
        "--adapter", str(folder / AWAKE / "adapter"), "--name", AWAKE, "--engine.max_batch", "512")  # fmt: skip


def _configuration(plan: Plan, seed: int, name: str, output: str) -> dict[str, Any]:
    """Return a shipped configuration with this seed, its samples and the report's sizes."""
    config: dict[str, Any] = yaml.safe_load(Path(config_path(name)).read_text())
    folder = plan.folder(seed)
    config["seed_everything"] = seed
    config["trainer"]["enable_progress_bar"] = False
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(folder / output)
    exports = [each for each in config["trainer"]["callbacks"] if each["class_path"].endswith("AdapterExport")]
    exports[0]["init_args"]["output_dir"] = str(folder / output / "adapter")
    data = config["data"]["init_args"]
    config["model"]["init_args"]["seed"] = data["seed"] = seed
    data["store_dir"] = str(folder / "train")
    data["train"] = [{"task": TASK, "split": "train", "limit": plan.train}]
    data["validation"] = []
    return config


def _fit(folder: Path, name: str, config: Mapping[str, Any]) -> None:
    place = folder / name / "config.yaml"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    run_once(folder, "fit", "--config", str(place))
