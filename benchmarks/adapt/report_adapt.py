"""``make report-adapt``: TTRL, two ways of keeping P(True) calibrated, and a reward that checks arithmetic.

The model is first calibrated jointly. From there, with the same samples of round 0, it adapts to the same unlabelled
questions by each method. ``--table`` writes the tables of what is in ``--folder``.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
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
from shared.estimates import Measured, difference, mean_over_seeds
from shared.study import Options, Study
from shared.tables import triple

from selfcal_lightning.adaptation.evaluation import (
    BEYOND,
    CALIBRATION,
    Change,
    SampledSet,
    describe,
    judged_entries,
    read_set,
    verdict,
)
from selfcal_lightning.adaptation.runs import QuestionSlice, load_sets
from selfcal_lightning.commands.adapt import run_adapt
from selfcal_lightning.commands.pools import run_drop_rounds
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.arrays import PASS_AT_1, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.models.folders import config_path, read_manifest
from selfcal_lightning.records import Question, SamplingSettings

SETS = ("transductive", "inductive", "out_of_domain")
TOKENS = 120
PASS, GUARDED = "pass@1", "guard-0"
# Temperatures at which the start is sampled too: what sharpening is worth without training.
TEMPERATURES = [1.0, 0.5]


SIZES = {
    "seeds": (3, "adaptations by each method"),
    "start_questions": (400, "on which the start is calibrated"),
    "questions": (200, "adapted on, and as many others to judge"),
    "out_of_domain": (64, "questions out of domain"),
    "samples": (8, "responses to a question"),
    "rounds": (4, "rounds of sampling and training"),
    "batch_size": (400, "responses to an update"),
    "lr": (4e-3, "peak learning rate"),
}


def run_jobs(sizes: Options) -> None:
    start = calibrated_start(sizes)
    for seed in range(sizes.seeds):
        for method in METHODS:
            adapt(start, method, seed, sizes)
    first = run_folder(sizes.output, PLAIN, 0) / "round-0"
    measure_packing(sizes.output, start, first, sizes.samples)
    run_guarded(
        sizes.output / GUARDED, start, first, questions=adapted_on(sizes),
        sizes={**sizes.sizes("batch_size"), "num_samples": sizes.samples, "max_new_tokens": TOKENS, "seed": 0},
    )  # fmt: skip


def adapted_on(sizes: Options) -> QuestionSlice:
    return QuestionSlice("word_problems", split="test_id", limit=sizes.questions)


def calibrated_start(sizes: Options) -> Path:
    folder = sizes.output
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


def adapt(start: Path, method: str, seed: int, sizes: Options) -> None:
    """Adapt by one method with one seed; all methods of a seed share the samples of round 0 and of the base model."""
    folder = sizes.output
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
    return folder / f"{method.replace(', ', '-')}-{seed}"


def assemble(sizes: Options) -> dict[str, Any]:
    folder = sizes.output
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
    return {
        "sizes": {**sizes.sizes(*SIZES), "seeds_done": len(seeds)},
        "not_measured": [method for method in METHODS if method not in methods],
        "sets": tables,
        "start": {questions: untrained([results[PLAIN, seed] for seed in seeds], questions) for questions in SETS},
        "rounds_gain": gain,
        "packing": None if packing is None else asdict(packing),
        "guarded": None if guarded is None else asdict(guarded),
        "targets": targets(tables, gain, packing, guarded),
        "runs": {f"{method}, seed {seed}": result for (method, seed), result in results.items()},
    }


def compare(folder: Path, name: str, seeds: Sequence[int], methods: Sequence[str]) -> dict[str, Any]:
    def read(suffix: str) -> dict[str, list[SampledSet]]:
        start = [read_set(folder / f"base-{seed}" / name / f"base{suffix}") for seed in seeds]
        places = {m: [run_folder(folder, m, seed) / "evaluation" / name for seed in seeds] for m in methods}
        return {
            "start": start, **{m: [read_set(one / f"adapted{suffix}") for one in found] for m, found in places.items()}
        }  # fmt: skip

    stores, greedy = read(""), read("-greedy")
    size = min(one.num_samples for group in stores.values() for one in group)
    stores = {label: [one.first(size) for one in group] for label, group in stores.items()}
    pairs = {
        "TTRL less start": ("start", PLAIN), "round less start": ("start", ROUND),
        "anchor less start": ("start", ANCHOR), "anchor less TTRL": (PLAIN, ANCHOR),
        "anchor less round": (ROUND, ANCHOR), "equations less start": ("start", EQUATIONS),
    }  # fmt: skip
    return {
        "levels": {label: level(stores[label], greedy[label], size) for label in stores},
        "changes": {
            label: change((stores[one], stores[other]), (greedy[one], greedy[other]), size)
            for label, (one, other) in pairs.items()
            if {one, other} <= stores.keys()
        },
        "verdicts": {method: judged(stores["start"], stores[method], greedy["start"]) for method in methods},
    }


def judged(before: Sequence[SampledSet], after: Sequence[SampledSet], greedy: Sequence[SampledSet]) -> str:
    adapted = [one.accuracy() for one in after]
    found = {
        name: Change(None, None, mean_change([one.accuracy() for one in others], adapted))
        for name, others in ((PASS, before), (BEYOND, greedy))
    }
    return verdict(found)


def untrained(results: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, float]]:
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
    rows = [describe(one, likeliest, k=size, seed=0) for one, likeliest in zip(stores, greedy, strict=True)]
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def change(
    stores: tuple[Sequence[SampledSet], ...], greedy: tuple[Sequence[SampledSet], ...], size: int
) -> dict[str, dict[str, float | None]]:
    before, after = ([_measured(one) for one in group] for group in stores)
    changes = {name: difference(after, before, metric) for name, metric in {PASS: PASS_AT_1, **CALIBRATION}.items()}
    changes["greedy"] = mean_change(*([one.accuracy() for one in group] for group in greedy))
    changes["majority"] = mean_change(*([one.majority(size) for one in group] for group in stores))
    changes["pass@k"] = mean_change(*([one.solved(size) for one in group] for group in stores))
    return {name: as_json(one) for name, one in changes.items()}


def round_accuracy(store_dir: str | Path, questions: Sequence[Question], *, round: int) -> Floats:
    """Return the share of right responses to each question in a round [Q], in the order of their ids."""
    store = SampleStore(store_dir)
    found = counted_samples(store, store.index(split="train", round=round), round=round)
    entries = sorted(found, key=lambda one: one.question.id)
    shares = [
        sum(verdicts[sample.answer] for sample in entry.samples) / len(entry.samples)
        for entry, verdicts in judged_entries(entries, questions)
    ]
    return np.array(shares, dtype=np.float64)


def rise_of_rounds(folder: Path, seeds: Sequence[int], sizes: Options) -> dict[str, float | None] | None:
    if sizes.rounds < 2:
        return None
    questions = load_sets({"adapted": adapted_on(sizes)})["adapted"]
    stores = [run_folder(folder, PLAIN, seed) / "samples" for seed in seeds]
    last = sizes.rounds - 1
    return as_json(mean_change(*([round_accuracy(one, questions, round=r) for one in stores] for r in (0, last))))


def as_json(one: Estimate) -> dict[str, float | None]:
    return dict(zip(("change", "low", "high"), triple(one, digits=6), strict=True))


def mean_change(before: Sequence[Floats], after: Sequence[Floats]) -> Estimate:
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


STUDY = Study("adapt/report_adapt.py", SIZES, run_jobs, assemble, markdown, collect="--table", layout={"indent": 1})

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
