"""Test-time training on the bundled model: TTRL, two ways of keeping P(True) calibrated, and a reward that is checked.

    python benchmarks/adapt/report_adapt.py

First the model is calibrated jointly on questions of its training split, as what is to stay calibrated must be so to
begin with. From there, with the same samples of round 0, four adaptations to the same unlabelled questions: with the
majority's answer as the reward alone, with P(True) taught the votes of round 0 or of its own round besides, and with
checked equations as the reward. What is there in ``--folder`` is not done again. ``--table`` writes the tables of what
is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _adapt_tables import (
    ADAPTER,
    ANCHOR,
    EQUATIONS,
    METHODS,
    PLAIN,
    ROUND,
    markdown,
    measure_packing,
    read_guarded,
    read_packing,
    run_guarded,
    targets,
)
from shared.estimates import Measured, difference
from shared.tables import write_report

from selfcal_lightning.adaptation.evaluation import (
    BEYOND,
    CALIBRATION,
    Change,
    SampledSet,
    describe,
    read_set,
    round_accuracy,
    verdict,
)
from selfcal_lightning.adaptation.runs import QuestionSlice, load_sets
from selfcal_lightning.commands.adapt import run_adapt
from selfcal_lightning.commands.pools import run_drop_rounds
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.arrays import PASS_AT_1, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, mean_over_seeds, resample_weights
from selfcal_lightning.models.folders import config_path, read_manifest
from selfcal_lightning.records import SamplingSettings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SETS = ("transductive", "inductive", "out_of_domain")
TOKENS = 120
NAME, PASS, GUARDED = "report_adapt", "pass@1", "guard-0"
# At which the start is sampled besides, for what sharpening is worth without training.
TEMPERATURES = [1.0, 0.5]


@dataclass(frozen=True)
class Sizes:
    """How much is done; the sizes stand above the tables."""

    seeds: int = 3
    start_questions: int = 400
    questions: int = 200
    out_of_domain: int = 64
    samples: int = 8
    rounds: int = 4
    batch_size: int = 400
    lr: float = 4e-3


def main() -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=NAME, help="of the results under benchmarks/results")
    parser.add_argument("--folder", type=Path, help="where the runs lie; by default a folder of that name under runs/")
    parser.add_argument("--table", action="store_true", help="write the tables of what is there")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
    folder = options.folder or ROOT / "runs" / options.name.replace("_", "-")
    if not options.table:
        start = calibrated_start(folder, sizes)
        for seed in range(sizes.seeds):
            for method in METHODS:
                adapt(folder, start, method, seed, sizes)
        first = run_folder(folder, PLAIN, 0) / "round-0"
        measure_packing(folder, start, first, sizes.samples)
        run_guarded(
            folder / GUARDED, start, first, questions=adapted_on(sizes),
            sizes={
                "num_samples": sizes.samples, "batch_size": sizes.batch_size, "max_new_tokens": TOKENS, "seed": 0,
            },
        )  # fmt: skip
    write_tables(folder, sizes, options.name)


def adapted_on(sizes: Sizes) -> QuestionSlice:
    """Return the questions that are adapted on."""
    return QuestionSlice("word_problems", split="test_id", limit=sizes.questions)


def command_of(sizes: Sizes, name: str) -> str:
    """Return the command that makes a report, as it is typed in the project's folder."""
    given = {"name": name, **asdict(sizes)}
    usual = {"name": NAME, **asdict(Sizes())}
    changed = [f"--{key} {value}" for key, value in given.items() if value != usual[key]]
    return " ".join(["python benchmarks/adapt/report_adapt.py", *changed])


def calibrated_start(folder: Path, sizes: Sizes) -> Path:
    """Return the folder of the model that adaptations start from: calibrated jointly, and merged."""
    adapter, merged = folder / "start" / "adapter", folder / "start" / "merged"
    if read_manifest(adapter) is None:
        train = json.dumps([{"task": "word_problems", "split": "train", "limit": sizes.start_questions}])
        _step([
            "fit", "--config", config_path("demo-joint.yaml"),
            "--data.init_args.store_dir", str(folder / "start/samples"),
            "--data.init_args.train", train, "--data.init_args.validation", "[]", "--trainer.limit_val_batches", "0",
            "--data.init_args.num_samples", str(sizes.samples), "--trainer.callbacks.output_dir", str(adapter),
            "--data.init_args.total_tuples", str(2 * sizes.start_questions * sizes.samples),
            "--trainer.logger.init_args.save_dir", str(folder / "start"),
        ])  # fmt: skip
    if read_manifest(merged) is None:
        _step(["export", "--adapter", str(adapter), "--output_dir", str(merged)])
    return merged


def adapt(folder: Path, start: Path, method: str, seed: int, sizes: Sizes) -> None:
    """Adapt by one method with one seed; all methods of a seed share the samples of round 0 and of the base model."""
    place = run_folder(folder, method, seed)
    if (place / "adaptation.json").exists():
        return
    first = run_folder(folder, PLAIN, seed) / "round-0"
    if first.exists() and not (place / "samples").exists():
        shutil.copytree(first, place / "samples")
    run_adapt(
        adapted_on(sizes), str(place), base_model=str(start),
        inductive=QuestionSlice("word_problems", split="test_id", limit=sizes.questions, offset=sizes.questions),
        out_of_domain=QuestionSlice("word_problems", split="test_ood", limit=sizes.out_of_domain),
        reward=METHODS[method][0], target=METHODS[method][1], rounds=sizes.rounds, num_samples=sizes.samples,
        batch_size=sizes.batch_size, lr=sizes.lr, sampling=SamplingSettings(max_new_tokens=TOKENS),
        temperatures=TEMPERATURES if method == PLAIN else [],
        evaluation_samples=sizes.samples, base_samples=str(folder / f"base-{seed}"), seed=seed,
        engine=EngineSettings(max_batch=512), guard={"agreement": 1.0, "unreadable": 1.0, "logprob_fall": 10.0},
        fit_options={
            "model": {"lora": ADAPTER, "warmup_steps": 2}, "data": {"max_length": 320},
            "trainer": {"accelerator": "cpu"},
        },
    )  # fmt: skip
    if method == PLAIN and not first.exists():
        shutil.copytree(place / "samples", first)
        run_drop_rounds(str(first))


def run_folder(folder: Path, method: str, seed: int) -> Path:
    """Return where an adaptation lies."""
    return folder / f"{method.replace(', ', '-')}-{seed}"


def write_tables(folder: Path, sizes: Sizes, name: str) -> None:
    """Write the results of what is there."""
    done = {
        method: [seed for seed in range(sizes.seeds) if (run_folder(folder, method, seed) / "adaptation.json").exists()]
        for method in METHODS
    }
    seeds = [seed for seed in range(sizes.seeds) if all(seed in done[method] for method in (PLAIN, ANCHOR))]
    if not seeds:
        raise RunError(f"Expected {PLAIN} and {ANCHOR} of a seed in {folder}, but got {done}. Run without `--table`.")
    methods = [method for method in METHODS if set(seeds) <= set(done[method])]
    tables = {questions: compare(folder, questions, seeds, methods) for questions in SETS}
    gain, packing, guarded = rise_of_rounds(folder, seeds, sizes), read_packing(folder), read_guarded(folder / GUARDED)
    results = {
        (method, seed): json.loads((run_folder(folder, method, seed) / "adaptation.json").read_text())
        for method in methods
        for seed in seeds
    }
    for result in results.values():
        result["settings"]["base_model"] = Path(result["settings"]["base_model"]).name  # wherever it was made
    content = {
        "command": command_of(sizes, name),
        "sizes": {**asdict(sizes), "seeds_done": len(seeds)},
        "not_measured": [method for method in METHODS if method not in methods],
        "sets": tables,
        "start": {questions: untrained([results[PLAIN, seed] for seed in seeds], questions) for questions in SETS},
        "rounds_gain": gain,
        "packing": None if packing is None else asdict(packing),
        "guarded": None if guarded is None else asdict(guarded),
        "targets": targets(tables, gain, packing, guarded),
        "runs": {f"{method}, seed {seed}": result for (method, seed), result in results.items()},
    }
    write_report(RESULTS, name, content, markdown(content), indent=1)


def compare(folder: Path, name: str, seeds: Sequence[int], methods: Sequence[str]) -> dict[str, Any]:
    """Return levels and paired changes of one set, pooled over seeds; a question is drawn with all its seeds."""
    stores: dict[str, list[SampledSet]] = {
        "start": [read_set(folder / f"base-{seed}" / name / "base") for seed in seeds],
        **{m: [read_set(run_folder(folder, m, s) / "evaluation" / name / "adapted") for s in seeds] for m in methods},
    }
    size = min(one.num_samples for group in stores.values() for one in group)
    stores = {label: [one.first(size) for one in group] for label, group in stores.items()}
    greedy = {
        "start": [read_set(folder / f"base-{seed}" / name / "base-greedy") for seed in seeds],
        **{
            m: [read_set(run_folder(folder, m, s) / "evaluation" / name / "adapted-greedy") for s in seeds]
            for m in methods
        },
    }
    pairs = {
        "TTRL less start": ("start", PLAIN),
        "round less start": ("start", ROUND),
        "anchor less start": ("start", ANCHOR),
        "anchor less TTRL": (PLAIN, ANCHOR),
        "anchor less round": (ROUND, ANCHOR),
        "equations less start": ("start", EQUATIONS),
    }
    return {
        "levels": {label: level(stores[label], greedy[label], size) for label in stores},
        "changes": {
            label: change(stores[one], stores[other], greedy[one], greedy[other], size)
            for label, (one, other) in pairs.items()
            if {one, other} <= stores.keys()
        },
        "verdicts": {method: judged(stores["start"], stores[method], greedy["start"]) for method in methods},
    }


def judged(before: Sequence[SampledSet], after: Sequence[SampledSet], greedy: Sequence[SampledSet]) -> str:
    """Return what the change of pass@1 comes to beside the greedy response of the start, as `selfcal adapt` says it."""
    adapted = [one.accuracy() for one in after]
    found = {
        name: Change(None, None, mean_change([one.accuracy() for one in others], adapted))
        for name, others in ((PASS, before), (BEYOND, greedy))
    }
    return verdict(found)


def untrained(results: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """Return what the start does in each way of sampling it, in the mean over seeds."""
    rows = [result["sets"][name]["rows"] for result in results]
    return {
        way: {
            column: float(np.mean([row[way][column] for row in rows]))
            for column, value in found.items()
            if value is not None
        }
        for way, found in rows[0].items()
        if way != "adapted"
    }


def level(stores: Sequence[SampledSet], greedy: Sequence[SampledSet], size: int) -> dict[str, float]:
    """Return the numbers of a model, in the mean over seeds."""
    rows = [describe(one, likeliest, k=size, seed=0) for one, likeliest in zip(stores, greedy, strict=True)]
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def change(
    before: Sequence[SampledSet],
    after: Sequence[SampledSet],
    greedy_before: Sequence[SampledSet],
    greedy_after: Sequence[SampledSet],
    size: int,
) -> dict[str, dict[str, float | None]]:
    """Return the paired changes with 95 % intervals over questions and seeds."""
    measured = [[_measured(one) for one in group] for group in (after, before)]
    changes = {name: difference(*measured, metric) for name, metric in {PASS: PASS_AT_1, **CALIBRATION}.items()}
    each: dict[str, Callable[[SampledSet], Floats]] = {
        "majority": lambda one: one.majority(size), "pass@k": lambda one: one.solved(size),
    }  # fmt: skip
    changes["greedy"] = mean_change(*([one.accuracy() for one in group] for group in (greedy_before, greedy_after)))
    for name, value in each.items():
        changes[name] = mean_change(*([value(one) for one in group] for group in (before, after)))
    return {name: as_json(one) for name, one in changes.items()}


def rise_of_rounds(folder: Path, seeds: Sequence[int], sizes: Sizes) -> dict[str, float | None] | None:
    """Return how pass@1 of the rounds, which are drawn at temperature 1, changes from the first to the last of TTRL."""
    if sizes.rounds < 2:
        return None
    questions = load_sets({"adapted": QuestionSlice("word_problems", split="test_id", limit=sizes.questions)})[
        "adapted"
    ]
    found = [
        [
            round_accuracy(run_folder(folder, PLAIN, seed) / "samples", questions, round=round)
            for seed in seeds
        ]
        for round in (0, sizes.rounds - 1)
    ]  # fmt: skip
    return as_json(mean_change(*found))


def as_json(one: Estimate) -> dict[str, float | None]:
    """Return plain types, without the last digits, which are rounding: a 0 is one."""
    return {
        name: None if value is None else round(value, 6)
        for name, value in {"change": one.value, "low": one.low, "high": one.high}.items()
    }


def mean_change(before: Sequence[Floats], after: Sequence[Floats]) -> Estimate:
    """Return by how much a mean over questions and seeds changed, from values a question [S][Q]."""
    differences = np.array(after) - np.array(before)
    return estimate_of(mean_over_seeds(differences @ resample_weights(differences.shape[1])))


def _measured(one: SampledSet) -> Measured:
    scored = one.scored()
    if scored is None:
        raise RunError("Expected P(True) of all responses, but some have none. Sample them with the confidence query.")
    return Measured.of(scored)


def _step(arguments: list[str]) -> None:
    if status := run_step(arguments):
        raise RunError(f"Expected every step to succeed, but `selfcal {arguments[0]}` ended with status {status}.")


if __name__ == "__main__":
    main()
