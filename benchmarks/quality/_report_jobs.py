"""The jobs of ``make report``: per seed an activated and a joint adapter, and the responses that they are judged on.

Every job is a command that a user would type, and every one goes on where an interrupted one stopped. The training
samples of a seed serve both adapters. Test and calibration questions are answered once by the base model, whose
responses the activated adapter scores; only the joint model answers anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.jobs import run
from shared.study import SAMPLED, SPLITS, TASK, Study, configuration, train_on, write_configuration

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


class Plan(Study):
    def place(self, seed: int, name: str) -> Path:
        """Return where what belongs to ``name`` lies."""
        return self.folder(seed) / name.replace(" ", "_").replace("(", "").replace(")", "").lower()

    def responses(self, seed: int, name: str) -> Path:
        """Return the store of the test responses that ``name`` is judged on."""
        return self.place(seed, BASE if name == ACTIVATED else name) / "own"


def run_seed(plan: Plan, seed: int) -> None:
    """Train both adapters of a seed, sample the test and calibration questions, and score them."""
    sample(plan, seed, BASE, model="bundled")
    calibrate(plan, seed, JOINT)
    sample(plan, seed, JOINT, model=str(plan.place(seed, JOINT) / "calibrated"))
    calibrate(plan, seed, ACTIVATED)
    score_awake(plan, seed)
    probe(plan, seed)
    sample_asleep(plan, seed)


def run_ablation(plan: Plan, seed: int, name: str) -> None:
    """Train one variant of the joint adapter, and sample the in-domain questions from it."""
    calibrate(plan, seed, name)
    sample(plan, seed, name, model=str(plan.place(seed, name) / "calibrated"), splits=("id",))


def calibrate(plan: Plan, seed: int, name: str) -> None:
    """Train an adapter; a joint one is merged as well."""
    folder = plan.place(seed, name)
    if not (folder / "adapter" / "adapter_config.json").exists():
        config = write_configuration(folder / "config.yaml", configuration_of(plan, seed, name))
        run(folder / "log.txt", "fit", "--config", str(config), threads=plan.threads)
    if name != ACTIVATED and not (folder / "calibrated" / "config.json").exists():
        places = ("--adapter", str(folder / "adapter"), "--output_dir", str(folder / "calibrated"))
        run(folder / "log.txt", "export", *places, threads=plan.threads)


def configuration_of(plan: Plan, seed: int, name: str) -> dict[str, Any]:
    """Return the demo's configuration with this seed and the report's sizes; an ablation has its one change."""
    folder = plan.place(seed, name)
    config = configuration(CONFIGS.get(name, CONFIGS[JOINT]), seed=seed, folder=folder, adapter=folder / "adapter")
    data = train_on(config, plan.place(seed, "samples"), limit=plan.training)
    if name != ACTIVATED:
        data["total_tuples"] = 10 * plan.training
    if name in ABLATIONS:
        section, key, value = ABLATIONS[name]
        config[section]["init_args"][key] = value
    return config


def sample(plan: Plan, seed: int, name: str, *, model: str, splits: tuple[str, ...] = tuple(SPLITS)) -> None:
    """Sample questions from a model; all splits lie in one store."""
    for split in splits:
        place = ("--model", model, "--store_dir", str(plan.responses(seed, name)))
        _generate(plan, seed, name, *place, split=split, limit=plan.parts[split])


def score_awake(plan: Plan, seed: int) -> None:
    folder, store = plan.place(seed, ACTIVATED), plan.responses(seed, BASE)
    for split in SPLITS:
        run(
            folder / "log.txt", "score", "--estimator", "p_true", "--store_dir", str(store), "--model", "bundled",
            "--adapter", str(folder / "adapter"), "--name", AWAKE, "--split", split, "--engine.max_batch", "512",
            threads=plan.threads,
        )  # fmt: skip


def probe(plan: Plan, seed: int) -> None:
    """Fit a probe of the prompts to the training responses, without labels, and let it judge the test questions."""
    folder, store = plan.place(seed, PROBE), plan.responses(seed, BASE)
    fitted = folder / "fitted"
    if not fitted.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pool = ("--pool", str(plan.place(seed, "samples")), "--output", str(fitted), "--model", "bundled")
        run(folder / "log.txt", "fit-probe", *pool, threads=plan.threads)
    run(
        folder / "log.txt", "score-questions", "--probe", str(fitted), "--store_dir", str(store), "--model", "bundled",
        "--name", PROBE, threads=plan.threads,
    )  # fmt: skip


def sample_asleep(plan: Plan, seed: int) -> None:
    """Sample some in-domain questions again, the adapter loaded and asleep: their texts must be those of the base."""
    folder = plan.place(seed, ACTIVATED)
    place = ("--model", "bundled", "--adapter", str(folder / "adapter"), "--store_dir", str(folder / "asleep"))
    _generate(plan, seed, ACTIVATED, *place, split="id", limit=plan.asleep)


def _generate(plan: Plan, seed: int, name: str, *place: str, split: str, limit: int) -> None:
    run(
        plan.place(seed, name) / "log.txt", "generate", *place, "--task", f"[{TASK}]", "--split", SPLITS[split],
        "--store_split", split, "--limit", str(limit), "--num_samples", str(plan.num_samples),
        *SAMPLED, "--seed", str(1000 + seed),
        threads=plan.threads,
    )  # fmt: skip
