"""The jobs of ``make report``: per seed an activated and a joint adapter, and the responses that they are judged on.

Every job is a command that a user would type, and every one goes on where an interrupted one stopped. The training
samples of a seed serve both adapters. Test and calibration questions are answered once by the base model, whose
responses the activated adapter scores; only the joint model answers anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from shared.jobs import run

from selfcal_lightning.models.folders import config_path

TASK = "word_problems"
SPLITS = {"id": "test_id", "ood": "test_ood", "calibration": "calibration"}
TESTS = ("id", "ood")
BASE, ACTIVATED, JOINT = "nothing", "activated", "joint"
# The confidence that the activated adapter puts on the base model's responses.
AWAKE = "p_true_awake"
# What a linear probe of the prompts, fitted to the agreement of the training responses, says of a question.
PROBE = "probe"
CONFIGS = {ACTIVATED: "demo.yaml", JOINT: "demo-joint.yaml"}
# What each ablation of joint training changes: (section of the configuration, key, value).
ABLATIONS: dict[str, tuple[str, str, Any]] = {
    "hard consistency": ("data", "target", "consistency"),
    "raw P(True)": ("data", "target", "p_true"),
    "true labels": ("data", "target", "label"),
    "squared error": ("model", "loss", "squared"),
    "no generation loss": ("model", "generation_loss", False),
}


@dataclass(frozen=True)
class Plan:
    """What is run."""

    output: Path
    training: int
    questions: Mapping[str, int]
    num_samples: int
    asleep: int
    threads: int

    def folder(self, seed: int, name: str) -> Path:
        """Return where what belongs to ``name`` lies."""
        return self.output / f"seed-{seed}" / name.replace(" ", "_").replace("(", "").replace(")", "").lower()

    def responses(self, seed: int, name: str) -> Path:
        """Return the store of the test responses that ``name`` is judged on."""
        return self.folder(seed, BASE if name == ACTIVATED else name) / "own"


def run_seed(plan: Plan, seed: int) -> None:
    """Train both adapters of a seed, sample the test and calibration questions, and score them."""
    sample(plan, seed, BASE, model="bundled")
    calibrate(plan, seed, JOINT)
    sample(plan, seed, JOINT, model=str(plan.folder(seed, JOINT) / "calibrated"))
    calibrate(plan, seed, ACTIVATED)
    score_awake(plan, seed)
    probe(plan, seed)
    sample_asleep(plan, seed)


def run_ablation(plan: Plan, seed: int, name: str) -> None:
    """Train one variant of the joint adapter, and sample the in-domain questions from it."""
    calibrate(plan, seed, name)
    sample(plan, seed, name, model=str(plan.folder(seed, name) / "calibrated"), splits=("id",))


def calibrate(plan: Plan, seed: int, name: str) -> None:
    """Train an adapter; a joint one is merged as well."""
    folder = plan.folder(seed, name)
    if not (folder / "adapter" / "adapter_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration(plan, seed, name), sort_keys=False))
        run(folder / "log.txt", "fit", "--config", str(folder / "config.yaml"), threads=plan.threads)
    if name != ACTIVATED and not (folder / "calibrated" / "config.json").exists():
        places = ("--adapter", str(folder / "adapter"), "--output_dir", str(folder / "calibrated"))
        run(folder / "log.txt", "export", *places, threads=plan.threads)


def configuration(plan: Plan, seed: int, name: str) -> dict[str, Any]:
    """Return the demo's configuration with this seed and the report's sizes; an ablation has its one change."""
    config = yaml.safe_load(Path(config_path(CONFIGS.get(name, CONFIGS[JOINT]))).read_text())
    folder = plan.folder(seed, name)
    config["seed_everything"] = seed
    config["trainer"]["enable_progress_bar"] = False
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(folder)
    by_name = {entry["class_path"].rsplit(".", 1)[-1]: entry for entry in config["trainer"]["callbacks"]}
    by_name["SSCGeneration"]["init_args"]["seed"] = seed
    by_name["AdapterExport"]["init_args"]["output_dir"] = str(folder / "adapter")
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    model["seed"] = data["seed"] = seed
    data["store_dir"] = str(plan.folder(seed, "samples"))
    data["train"] = [{"task": TASK, "split": "train", "limit": plan.training}]
    if name != ACTIVATED:
        data["total_tuples"] = 10 * plan.training
    if name in ABLATIONS:
        section, key, value = ABLATIONS[name]
        {"data": data, "model": model}[section][key] = value
    return config


def sample(plan: Plan, seed: int, name: str, *, model: str, splits: tuple[str, ...] = tuple(SPLITS)) -> None:
    """Sample questions from a model; all splits lie in one store."""
    for split in splits:
        place = ("--model", model, "--store_dir", str(plan.responses(seed, name)))
        _generate(plan, seed, name, *place, split=split, limit=plan.questions[split])


def score_awake(plan: Plan, seed: int) -> None:
    """Put the activated confidence on the base model's responses."""
    folder, store = plan.folder(seed, ACTIVATED), plan.responses(seed, BASE)
    for split in SPLITS:
        run(
            folder / "log.txt", "score", "--estimator", "p_true", "--store_dir", str(store), "--model", "bundled",
            "--adapter", str(folder / "adapter"), "--name", AWAKE, "--split", split, "--engine.max_batch", "512",
            threads=plan.threads,
        )  # fmt: skip


def probe(plan: Plan, seed: int) -> None:
    """Fit a probe of the prompts to the training responses, without labels, and let it judge the test questions."""
    folder, store = plan.folder(seed, PROBE), plan.responses(seed, BASE)
    fitted = folder / "fitted"
    if not fitted.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pool = ("--pool", str(plan.folder(seed, "samples")), "--output", str(fitted), "--model", "bundled")
        run(folder / "log.txt", "fit-probe", *pool, threads=plan.threads)
    run(
        folder / "log.txt", "score-questions", "--probe", str(fitted), "--store_dir", str(store), "--model", "bundled",
        "--name", PROBE, threads=plan.threads,
    )  # fmt: skip


def sample_asleep(plan: Plan, seed: int) -> None:
    """Sample some in-domain questions again, the adapter loaded and asleep: their texts must be those of the base."""
    folder = plan.folder(seed, ACTIVATED)
    place = ("--model", "bundled", "--adapter", str(folder / "adapter"), "--store_dir", str(folder / "asleep"))
    _generate(plan, seed, ACTIVATED, *place, split="id", limit=plan.asleep)


def _generate(plan: Plan, seed: int, name: str, *place: str, split: str, limit: int) -> None:
    run(
        plan.folder(seed, name) / "log.txt", "generate", *place, "--task", f"[{TASK}]", "--split", SPLITS[split],
        "--store_split", split, "--limit", str(limit), "--num_samples", str(plan.num_samples),
        "--sampling.max_new_tokens", "120", "--engine.max_batch", "512", "--seed", str(1000 + seed),
        threads=plan.threads,
    )  # fmt: skip
