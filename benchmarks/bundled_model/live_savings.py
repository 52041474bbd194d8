"""What early stopping saves live: tokens and accuracy against plain votes, on both engines, queries counted.

    make demo && python benchmarks/bundled_model/live_savings.py

Each system's threshold, or its number of votes, is the cheapest one whose accuracy on the calibration questions is at
most .01 below that of eight plain votes. The test questions are then asked once, live. Intervals are paired over them.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared.jobs import run
from shared.study import TASK, Study, write_configuration
from shared.tables import machine, show, table, triple

from selfcal_lightning.commands.answer import AnswerSettings, answer_questions
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.thresholds import grid_outcome
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import estimate_of, resample_weights
from selfcal_lightning.records import SamplingSettings

VOTES, LOSS = 8, 0.01
SIZES = {"calibration": (300, "calibration questions"), "questions": (300, "test questions of each split")}
PLAIN = f"{VOTES} plain votes"
SAMPLING = SamplingSettings(max_new_tokens=120)  # that of the demo
SPLITS = {"test_id": "in domain", "test_ood": "out of domain"}


@dataclass(frozen=True)
class System:
    """A strategy with the confidence that it reads, and whether the model has the adapter."""

    strategy: str
    confidence: str | None = None
    has_adapter: bool = False
    settings: str = "{}"


SYSTEMS = {
    "plain votes, fewer": System("self_consistency"),
    "votes weighted by the likelihood": System("cisc", "mean_logprob", settings="{temperature: 1.0}"),
    "adaptive consistency": System("adaptive_consistency"),
    "early stopping, P(True) of the base model": System("early_stopping", "p_true"),
    "early stopping, activated adapter": System("early_stopping", "p_true", has_adapter=True),
}


def calibrate(folder: Path, adapter: Path, questions: int) -> dict[str, Path]:
    """Sample the calibration questions and fit each system; return the files of the thresholds."""
    write_configuration(folder / "sizes.yaml", {"calibration": questions})
    stores = {True: folder / "adapter", False: folder / "base"}
    for has_adapter, store in stores.items():
        named = ("--adapter", str(adapter)) if has_adapter else ()
        run(
            folder / "log.txt", "generate", "--model", "bundled", "--store_dir", str(store), "--task", TASK, "--split",
            "calibration", "--limit", str(questions), "--num_samples", str(VOTES), "--extend", "true",
            "--sampling.max_new_tokens", str(SAMPLING.max_new_tokens), *named,
        )  # fmt: skip
    pool = list(SampleStore(stores[False]).samples(split="calibration"))
    goal = float(grid_outcome(SelfConsistency(), pool, [VOTES]).correct.mean()) - LOSS
    fitted = {}
    for number, (name, system) in enumerate(SYSTEMS.items()):
        fitted[name] = folder / f"threshold_{number}.json"
        further = () if system.confidence is None else ("--confidence", system.confidence)
        run(
            folder / "log.txt", "fit-threshold", "--pool", str(stores[system.has_adapter]), "--output",
            str(fitted[name]), "--strategy", system.strategy, "--accuracy", f"{goal:.6f}", "--use_all", "--settings",
            system.settings, *further,
        )  # fmt: skip
    return fitted


def ask(engine: str, split: str, limit: int, adapter: Path | None, **settings: Any) -> Floats:
    """Answer test questions live; return right or not, tokens and samples [3, Q]."""
    questions = get_task(TASK).load(split, limit=limit)
    options = EngineOptions(name=engine, dtype="float32", adapter=None if adapter is None else str(adapter))
    chosen = AnswerSettings(engine=options, sampling=SAMPLING, seed=1, **settings)
    verdicts = [one.verdict for one in answer_questions("bundled", questions, chosen, on_answer=lambda answer: None)]
    return np.array([
        [bool(one.correct), one.tokens_generated or 0, one.samples_generated] for one in verdicts
    ], dtype=float).T  # fmt: skip


def measure(found: Floats, plain: Floats) -> dict[str, Any]:
    """Return accuracy, samples and tokens of a system, and both against plain votes."""
    weights = resample_weights(found.shape[1], num_resamples=1000)
    right, tokens, samples = found @ weights / weights.sum(axis=0)
    base_right, base_tokens, _ = plain @ weights / weights.sum(axis=0)
    return {
        "accuracy": triple(estimate_of(right)), "gain": triple(estimate_of(right - base_right)),
        "samples": float(samples[0]), "tokens": float(tokens[0]), "ratio": triple(estimate_of(tokens / base_tokens)),
    }  # fmt: skip


def as_markdown(report: dict[str, Any]) -> str:
    lines = [
        "# What early stopping saves, live", "", f"`{report['command']}`", "",
        f"Bundled model, {report['calibration']} calibration and {report['questions']} test questions of each split, "
        f"at most {VOTES} samples. Tokens are all that was generated, confidence queries and samples that came too "
        "late included.",
    ]  # fmt: skip
    heads = ["system", "accuracy", f"above {PLAIN}", "samples", "tokens", "ratio of tokens"]
    for name, systems in report["runs"].items():
        rows = [
            [label, show(row["accuracy"]), show(row["gain"], "+"), f"{row['samples']:.2f}", f"{row['tokens']:.0f}",
             show(row["ratio"])]
            for label, row in systems.items()
        ]  # fmt: skip
        lines += ["", f"## {name}", "", *table(heads, rows)]
    return "\n".join(lines) + "\n"


def assemble(options: argparse.Namespace) -> dict[str, Any]:
    fitted = calibrate(options.output, options.adapter, options.calibration)
    runs = {}
    for engine in options.engines:
        for split, title in SPLITS.items():
            plain = ask(engine, split, options.questions, None, strategy="self_consistency", max_samples=VOTES)
            found = {PLAIN: measure(plain, plain)}
            for name, system in SYSTEMS.items():
                adapter = options.adapter if system.has_adapter else None
                rows = ask(engine, split, options.questions, adapter, threshold_file=str(fitted[name]))
                found[name] = measure(rows, plain)
            runs[f"{title}, {engine}"] = found
    return {**options.sizes(*SIZES), "machine": machine(), "runs": runs}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", type=Path, default=Path("runs/demo/adapter"))
    parser.add_argument("--output", type=Path, default=Path("runs/live-savings"), help="samples, thresholds and log")
    parser.add_argument("--engines", nargs="+", default=["transformers", "vllm"])


STUDY = Study(
    "bundled_model/live_savings.py", SIZES, None, assemble, as_markdown, arguments=arguments, layout={"indent": 1}
)

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
