"""The jobs of ``make report-rewards``: per seed six reward models, and the responses and rollouts that judge them.

Every job is a command that a user would type, and one that was done is not run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from shared.jobs import run_once
from shared.study import SAMPLED, SPLITS, TASK, TESTS, Study, configuration, train_on, write_configuration

from selfcal_lightning.data.store.sample_store import SampleStore

# The confidence that the activated adapter puts on the test responses.
AWAKE = "p_true_awake"
WIDTH, KEEP, TREES = 8, 2, 4
KEPT = {"SSCGeneration", "AdapterExport"}  # callbacks of a training


class Trained(NamedTuple):
    """A reward model: what it learns at every step, and of which training questions."""

    target: str
    is_rolled: bool


OUTCOME, VOTES, HARD, RATES = "outcome", "vote_share", "hard", "success_rate"
FEW_OUTCOME, FEW_VOTES = "outcome_few", "vote_share_few"
MODELS = {
    OUTCOME: Trained("outcome", is_rolled=False),
    VOTES: Trained("vote_share", is_rolled=False),
    FEW_OUTCOME: Trained("outcome", is_rolled=True),
    FEW_VOTES: Trained("vote_share", is_rolled=True),
    RATES: Trained("success_rate", is_rolled=True),
    HARD: Trained("hard", is_rolled=True),
}
# Which of them score the responses in the store, and by which estimators.
SCORED = {OUTCOME: ("prm", "prm_lower", "prm_min", "prm_prod"), VOTES: ("prm",), HARD: ("prm",)}
SEARCHES: dict[str, tuple[str, ...]] = {
    "beam": ("--strategy", "beam_search", "--strategy_args.width", str(WIDTH), "--strategy_args.keep", str(KEEP)),
    "beam_km": (
        "--strategy", "beam_search", "--strategy_args.width", str(WIDTH), "--strategy_args.keep", str(KEEP),
        "--strategy_args.adaptive", "km",
    ),
    "trees": (
        "--strategy", "diverse_tree_search", "--strategy_args.width", str(WIDTH), "--strategy_args.trees", str(TREES),
    ),
    "particles": ("--strategy", "particle_filtering", "--strategy_args.particles", str(WIDTH)),
}  # fmt: skip


class Plan(Study):
    def samples(self, seed: int, *, is_rolled: bool) -> Path:
        return self.folder(seed) / ("samples_few" if is_rolled else "samples")

    def tests(self, seed: int) -> Path:
        return self.folder(seed) / "tests"

    def rollouts(self, seed: int, split: str) -> Path:
        """Return the store of the rollouts of a split; "train" is that of the models that learn from rollouts."""
        return self.folder(seed) / f"rollouts_{split}"

    def model(self, seed: int, name: str) -> Path:
        return self.folder(seed) / name / "model"

    def answers(self, seed: int, search: str) -> Path:
        return self.folder(seed) / f"{search}.jsonl"


def run_seed(plan: Plan, seed: int) -> None:
    sample_tests(plan, seed)
    for split in TESTS:
        roll_out(plan, seed, plan.tests(seed), split, limit=plan.parts[split], responses=plan.rolled_responses)
    for name, trained in MODELS.items():
        if name == RATES:
            roll_out(plan, seed, plan.samples(seed, is_rolled=True), "train", limit=plan.rolled, responses=8)
        fit(plan, seed, name, reward_configuration(plan, seed, name, trained))
    fit(plan, seed, AWAKE, awake_configuration(plan, seed))
    score(plan, seed)
    search(plan, seed)


def sample_tests(plan: Plan, seed: int) -> None:
    """Sample test and calibration questions from the bundled model, all into one store."""
    for split, source in SPLITS.items():
        _run(
            plan, seed, "generate", "--model", "bundled", "--store_dir", str(plan.tests(seed)), "--task", TASK,
            "--split", source, "--store_split", split, "--limit", str(plan.parts[split]),
            "--num_samples", str(plan.num_samples), *SAMPLED, "--seed", str(1000 + seed),
        )  # fmt: skip


def roll_out(plan: Plan, seed: int, samples: Path, split: str, *, limit: int, responses: int) -> None:
    _run(
        plan, seed, "rollout", "--samples_dir", str(samples), "--store_dir", str(plan.rollouts(seed, split)),
        "--split", split, "--limit", str(limit), "--responses", str(responses), "--steps", "sentence",
        "--num_rollouts", str(plan.num_rollouts), "--engine.max_batch", "512", "--seed", str(2000 + seed),
    )  # fmt: skip


def fit(plan: Plan, seed: int, name: str, config: dict[str, Any]) -> None:
    """Train a reward model, or the activated adapter; training samples that are not there are drawn on the way."""
    config["trainer"]["limit_val_batches"] = 0
    for unused in ("validation", "test"):
        config["data"]["init_args"].pop(unused, None)
    _run(plan, seed, "fit", "--config", str(write_configuration(plan.folder(seed) / name / "config.yaml", config)))


def reward_configuration(plan: Plan, seed: int, name: str, trained: Trained) -> dict[str, Any]:
    """Return the demo's configuration of a reward model with this seed, target and size."""
    config = configuration(
        "rewards/demo.yaml", seed=seed, folder=plan.folder(seed) / name, adapter=plan.model(seed, name), keep=KEPT
    )
    config["model"]["init_args"]["target"] = trained.target
    limit = plan.rolled if trained.is_rolled else plan.training
    data = train_on(config, plan.samples(seed, is_rolled=trained.is_rolled), limit=limit)
    if trained.target in ("hard", "success_rate"):
        data["rollouts"] = str(plan.rollouts(seed, "train"))
    return config


def awake_configuration(plan: Plan, seed: int) -> dict[str, Any]:
    folder = plan.folder(seed) / AWAKE
    config = configuration("demo.yaml", seed=seed, folder=folder, adapter=folder / "adapter", keep=KEPT)
    train_on(config, plan.samples(seed, is_rolled=False), limit=plan.training)["num_samples"] = 8
    return config


def score(plan: Plan, seed: int) -> None:
    """Put the scores of reward models and the activated confidence on the test and calibration responses."""
    tests = str(plan.tests(seed))
    for name, estimators in SCORED.items():
        model = ("--store_dir", tests, "--reward.model", str(plan.model(seed, name)))
        if name == OUTCOME:
            _run(plan, seed, "score", "--estimator", f"[{','.join(estimators)}]", *model)
        else:
            _run(plan, seed, "score", "--estimator", *estimators, "--name", score_name(name), *model)
    adapter = str(plan.folder(seed) / AWAKE / "adapter")
    _run(
        plan, seed, "score", "--estimator", "p_true", "--store_dir", tests, "--model", "bundled", "--adapter", adapter,
        "--name", AWAKE, "--engine.max_batch", "512",
    )  # fmt: skip


def score_name(name: str) -> str:
    return "prm" if name == OUTCOME else f"prm_{name}"


def search(plan: Plan, seed: int) -> None:
    """Search the first in-domain questions live, steered by the model that was trained on outcomes."""
    asked = plan.folder(seed) / "searched.jsonl"
    entries = sorted(SampleStore(plan.tests(seed)).samples(split="id"), key=lambda entry: entry.question.id)
    lines = (
        {"id": one.question.id, "question": one.question.text, "answer": one.question.reference, "task": TASK}
        for one in entries[: plan.searched]
    )
    asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, options in SEARCHES.items():
        _run(
            plan, seed, "answer", "--model", "bundled", "--questions", str(asked), *options,
            "--reward.model", str(plan.model(seed, OUTCOME)), "--sampling.max_new_tokens", "120",
            "--seed", str(1000 + seed), "--json", "true", output=plan.answers(seed, name),
        )  # fmt: skip


def _run(plan: Plan, seed: int, *arguments: str, output: Path | None = None) -> None:
    run_once(plan.folder(seed), *arguments, output=output)
