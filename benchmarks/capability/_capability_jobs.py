"""The jobs of ``make report-capability``: samples, probes and adapters of each seed, every one a user's own command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.jobs import run_once
from shared.study import SAMPLED, SPLITS, TASK, Study, configuration, train_on, write_configuration

PROBE, LABELLED, BEFORE, TAUGHT, AWAKE = "probe", "labelled", "p_true_before", "taught", "p_true_awake"
TARGETS = {PROBE: "agreeing_pairs", LABELLED: "label"}
CALIBRATED_ON = 700  # training questions of the demo
# Rows that the shipped configuration of a taught P(True) goes through; more questions take fewer epochs.
TAUGHT_ROWS = 7000


def run_seed(plan: Study, seed: int) -> None:
    """Sample, fit and score what is not done yet of a seed."""
    folder = plan.folder(seed)
    train, tests = str(folder / "train"), str(folder / "tests")
    sampled = ["--task", TASK, *SAMPLED, "--seed", str(seed)]
    run_once(folder, "generate", "--model", "bundled", "--store_dir", train, "--limit", str(plan.train),
        "--num_samples", str(plan.train_samples), *sampled)  # fmt: skip
    for name, split in SPLITS.items():
        run_once(folder, "generate", "--model", "bundled", "--store_dir", tests, "--split", split, "--store_split",
            name, "--limit", str(plan.parts[name]), "--num_samples", str(plan.num_samples), *sampled)  # fmt: skip
    for name, target in TARGETS.items():
        probe = str(folder / name)
        run_once(folder, "fit-probe", "--pool", train, "--output", probe, "--target", target)
        run_once(
            folder, "score-questions", "--probe", probe, "--store_dir", tests, "--name", name, "--overwrite", "true"
        )
    run_once(folder, "score-questions", "--estimator", BEFORE, "--store_dir", tests)
    if seed in plan.taught_seeds:
        _teach(plan, folder, seed)
    if seed in plan.awake_seeds:
        _calibrate(plan, folder, seed)


def _teach(plan: Study, folder: Path, seed: int) -> None:
    """Teach an activated adapter to answer before there is a response, without labels."""
    epochs = max(round(TAUGHT_ROWS / plan.train), 1)
    trainer = {"max_epochs": epochs, "check_val_every_n_epoch": epochs}
    _fit(plan, folder, seed, TAUGHT, "capability/taught.yaml", limit=plan.train, trainer=trainer)
    run_once(folder, "score-questions", "--estimator", BEFORE, "--adapter", str(folder / TAUGHT / "adapter"),
        "--store_dir", str(folder / "tests"), "--name", TAUGHT)  # fmt: skip


def _calibrate(plan: Study, folder: Path, seed: int) -> None:
    """Train the demo's activated adapter, on as many of the questions, and let it judge the test responses."""
    _fit(plan, folder, seed, AWAKE, "demo.yaml", limit=min(CALIBRATED_ON, plan.train), trainer={})
    run_once(folder, "score", "--estimator", "p_true", "--store_dir", str(folder / "tests"), "--model", "bundled",
        "--adapter", str(folder / AWAKE / "adapter"), "--name", AWAKE, "--engine.max_batch", "512")  # fmt: skip


def _fit(plan: Study, folder: Path, seed: int, name: str, source: str, *, limit: int, trainer: dict[str, Any]) -> None:
    """Train by a shipped configuration on the training responses of the seed, which are all there."""
    place, keep = folder / name, {"CalibrationCurve", "AdapterExport"}
    config = configuration(source, seed=seed, folder=place, adapter=place / "adapter", keep=keep)
    config["trainer"] |= trainer
    data = train_on(config, folder / "train", limit=limit)
    data |= {"validation": [], "num_samples": plan.train_samples}
    run_once(folder, "fit", "--config", str(write_configuration(place / "config.yaml", config)))
