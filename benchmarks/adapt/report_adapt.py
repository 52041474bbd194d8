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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import RunError
from selfcal_lightning.evaluation.adaptation.comparison import CALIBRATION, describe
from selfcal_lightning.evaluation.adaptation.questions import QuestionSlice
from selfcal_lightning.evaluation.adaptation.samples import SampledSet, read_set
from selfcal_lightning.functional.base import PASS_AT_1
from selfcal_lightning.functional.bootstrap import paired_bootstrap, resample_counts
from selfcal_lightning.functional.estimates import Estimate, ScoredResponses
from selfcal_lightning.functional.rewards import GroupReward, PoolTarget
from selfcal_lightning.model_files.locations import config_path
from selfcal_lightning.model_files.manifests import read_manifest
from selfcal_lightning.pipelines.adaptation.adapt import run_adapt
from selfcal_lightning.pipelines.drop_rounds import run_drop_rounds
from selfcal_lightning.records import SamplingSettings
from selfcal_lightning.runtime.step_process import run_step

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# The reward, and what P(True) learns meanwhile.
METHODS: dict[str, tuple[GroupReward, PoolTarget | None]] = {
    "TTRL": ("majority", None),
    "calibrated, anchor": ("majority", "anchor"),
    "calibrated, round": ("majority", "round"),
    "equations": ("equations", None),
}
PLAIN, ANCHOR, ROUND, EQUATIONS = METHODS
SETS = ("transductive", "inductive", "out_of_domain")
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = 120


@dataclass(frozen=True)
class Sizes:
    """How much is done; the sizes stand above the tables.

    Attributes:
        seeds: Adaptations of each kind, each with a seed of its own.
        start_questions: Questions that the model is calibrated on first.
        questions: Questions adapted on, and as many others.
        out_of_domain: Questions of the other split.
        samples: Responses to a question, in rounds and in the evaluation.
        rounds: Rounds.
        batch_size: Responses of an optimiser step.
        lr: Peak learning rate of the adaptation.
    """

    seeds: int = 3
    start_questions: int = 700
    questions: int = 300
    out_of_domain: int = 100
    samples: int = 8
    rounds: int = 2
    batch_size: int = 200
    lr: float = 1e-3


def main() -> None:
    """Run what is missing, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "report-adapt")
    parser.add_argument("--name", default="report_adapt", help="of the results under benchmarks/results")
    parser.add_argument("--table", action="store_true", help="write the tables of what is there")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    options = parser.parse_args()
    sizes = Sizes(**{name: getattr(options, name) for name in asdict(Sizes())})
    if not options.table:
        start = calibrated_start(options.folder, sizes)
        for seed in range(sizes.seeds):
            for method in METHODS:
                adapt(options.folder, start, method, seed, sizes)
    write_tables(options.folder, sizes, options.name)


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
    lora = {"r": 16, "alpha": 32, "dropout": 0.0, "target_modules": LAYERS, "activated": False}
    run_adapt(
        QuestionSlice("word_problems", split="test_id", limit=sizes.questions), str(place), base_model=str(start),
        inductive=QuestionSlice("word_problems", split="test_id", limit=sizes.questions, offset=sizes.questions),
        out_of_domain=QuestionSlice("word_problems", split="test_ood", limit=sizes.out_of_domain),
        reward=METHODS[method][0], target=METHODS[method][1], rounds=sizes.rounds, num_samples=sizes.samples,
        batch_size=sizes.batch_size, lr=sizes.lr, sampling=SamplingSettings(max_new_tokens=TOKENS), temperatures=[],
        evaluation_samples=sizes.samples, base_samples=str(folder / f"base-{seed}"), seed=seed,
        engine=EngineSettings(max_batch=512), guard={"agreement": 1.0, "unreadable": 1.0, "logprob_fall": 10.0},
        fit_options={
            "model": {"lora": lora, "warmup_steps": 2}, "data": {"max_length": 320}, "trainer": {"accelerator": "cpu"}
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
    results = {
        (method, seed): json.loads((run_folder(folder, method, seed) / "adaptation.json").read_text())
        for method in methods
        for seed in seeds
    }
    for result in results.values():
        result["settings"]["base_model"] = Path(result["settings"]["base_model"]).name  # wherever it was made
    content = {
        "sizes": {**asdict(sizes), "seeds_done": len(seeds)},
        "not_measured": [method for method in METHODS if method not in methods],
        "sets": tables,
        "targets": targets(tables),
        "runs": {f"{method}, seed {seed}": result for (method, seed), result in results.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown(content))


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
    """Return the paired changes with 95 % intervals over questions."""
    found = paired_bootstrap(_pooled(before), _pooled(after), metrics=[PASS_AT_1, *CALIBRATION.values()])
    names = {"pass@1": PASS_AT_1, **CALIBRATION}
    changes = {name: found[key].change for name, key in names.items()}
    changes["greedy"] = _mean_change([g.accuracy() for g in greedy_before], [g.accuracy() for g in greedy_after])
    changes["majority"] = _mean_change([g.majority(size) for g in before], [g.majority(size) for g in after])
    changes["pass@k"] = _mean_change([g.solved(size) for g in before], [g.solved(size) for g in after])
    return {name: {"change": one.value, "low": one.low, "high": one.high} for name, one in changes.items()}


def _pooled(stores: Sequence[SampledSet]) -> ScoredResponses:
    """Return the responses of all seeds; those of one question stay together."""
    parts = [one.scored() for one in stores]
    known = [part for part in parts if part is not None]
    columns = ("confidence", "correct", "question_index")
    columns = ("confidence", "correct", "question_index")
    return ScoredResponses(*(np.concatenate([getattr(part, name) for part in known]) for name in columns))


def _mean_change(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> Estimate:
    difference = np.mean(after, axis=0) - np.mean(before, axis=0)
    drawn = np.concatenate([block @ difference for block in resample_counts(len(difference))]) / len(difference)
    return Estimate.from_resamples(float(difference.mean()), drawn)


def targets(tables: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what was asked of the figures, what came out, and whether that is met, missed or not measured."""
    trans, ind = tables["transductive"], tables["inductive"]
    ece = ind["changes"]["anchor less TTRL"]["ece"]
    gained = {name: table["changes"]["anchor less start"] for name, table in (("trans", trans), ("ind", ind))}
    after = {name: table["levels"][ANCHOR]["ece"] for name, table in (("trans", trans), ("ind", ind))}
    rows: list[tuple[str, str, bool | None]] = [
        ("anchor less TTRL, inductive ECE: upper bound < -.03", _cell(ece), ece["high"] < -0.03),
        (
            "anchor, ECE after <= .12 and upper bound of its change < +.03, transductive and inductive",
            "; ".join(f"{after[name]:.3f}, {_cell(gained[name]['ece'])}" for name in gained),
            all(gained[name]["ece"]["high"] < 0.03 and after[name] <= 0.12 for name in gained),
        ),
        (
            "anchor, inductive pass@1: lower bound of its change > -.02",
            _cell(gained["ind"]["pass@1"]),
            gained["ind"]["pass@1"]["low"] > -0.02,
        ),
        (
            "anchor, pass@k: lower bounds of its change > -.10, transductive and inductive",
            "; ".join(_cell(gained[name]["pass@k"]) for name in gained),
            all(gained[name]["pass@k"]["low"] > -0.10 for name in gained),
        ),
        _equations_target(trans, ind),
        ("TTRL: pass@1 at temperature 1 rises, lower bound > 0", "the rounds below have no interval", None),
        ("the guard stops a run of too high a rate within three rounds", "a test holds it, on six questions", None),
    ]
    words = {True: "met", False: "missed", None: "not measured at this size"}
    return [{"target": name, "found": found, "verdict": words[met]} for name, found, met in rows]


def _equations_target(trans: Mapping[str, Any], ind: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    name, label = "equations: pass@1, lower bounds > 0 transductive and > -.02 inductive", "equations less start"
    if label not in trans["changes"]:
        return name, "-", None
    first, second = (table["changes"][label]["pass@1"] for table in (trans, ind))
    return name, f"{_cell(first)}; {_cell(second)}", first["low"] > 0.0 and second["low"] > -0.02


def markdown(content: Mapping[str, Any]) -> str:
    """Return the tables."""
    sizes = content["sizes"]
    updates = -(-sizes["questions"] * sizes["samples"] // sizes["batch_size"]) * sizes["rounds"]
    lines = [
        f"Sizes: {sizes['seeds_done']} seed(s); start calibrated on {sizes['start_questions']} questions x "
        f"{sizes['samples']}; adapted on {sizes['questions']} x {sizes['samples']}, {sizes['rounds']} rounds, "
        f"{updates} updates of {sizes['batch_size']} responses, LoRA of rank 16, peak learning rate {sizes['lr']:g}; "
        f"{sizes['questions']} other and {sizes['out_of_domain']} out-of-domain questions x {sizes['samples']} at the "
        "usual sampling (EDT .8). Intervals: 95 %, paired, over questions; those that exclude 0 in bold.",
        "",
    ]
    columns = ("pass@1", "greedy", "majority", "pass@k", "distinct", "tokens", "ece", "brier", "auroc")
    lines += [f"| questions | model | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, table in content["sets"].items():
        for label, row in table["levels"].items():
            lines.append(f"| {name} | {label} | {' | '.join(f'{row[column]:.3f}' for column in columns)} |")
    changed = ("pass@1", "greedy", "majority", "pass@k", "ece", "brier", "auroc")
    lines += ["", f"| questions | change | {' | '.join(changed)} |", "|---|---|" + "---|" * len(changed)]
    for name, table in content["sets"].items():
        for label, row in table["changes"].items():
            lines.append(f"| {name} | {label} | {' | '.join(_cell(row[column]) for column in changed)} |")
    if content["not_measured"]:
        lines += ["", f"Not measured at this size: {', '.join(content['not_measured'])}."]
    lines += ["", "| target | found | |", "|---|---|---|"]
    lines += [f"| {row['target']} | {row['found']} | {row['verdict']} |" for row in content["targets"]]
    heads = ("run", "round", "pass@1 at T = 1", "label accuracy", "reward accuracy", "agreement", "votes", "lost log p")
    lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    keys = ("pass@1", "label_accuracy", "reward_accuracy", "agreement", "vote_share", "logprob_fall")
    for run, result in content["runs"].items():
        for number, row in result["rounds"].items():
            cells = ["-" if row.get(key) is None else f"{row[key]:.3f}" for key in keys]
            lines.append(f"| {run} | {number} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(found: Mapping[str, float | None]) -> str:
    value, low, high = found["change"], found["low"], found["high"]
    if value is None or low is None or high is None:
        return "-"
    text = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _step(arguments: list[str]) -> None:
    if status := run_step(arguments):
        raise RunError(f"Expected every step to succeed, but `selfcal {arguments[0]}` ended with status {status}.")


if __name__ == "__main__":
    main()
