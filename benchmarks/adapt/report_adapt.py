"""``make report-adapt``: TTRL, two ways of keeping P(True) calibrated, and a reward that checks arithmetic.

The model is first calibrated jointly. From there, with the same samples of round 0, it adapts to the same unlabelled
questions by each method. ``--table`` writes the tables of what is in ``--folder``.
"""

import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.estimates import Measured, difference, mean_over_seeds
from shared.study import Options, Study
from shared.tables import show, table, triple
from shared.timing import measured_once

from selfcal_lightning.adaptation import evaluation, runs
from selfcal_lightning.adaptation.evaluation import SampledSet
from selfcal_lightning.adaptation.module import TestTimeTrainingModule
from selfcal_lightning.adaptation.runs import QuestionSlice, load_sets
from selfcal_lightning.commands.adapt import run_adapt
from selfcal_lightning.commands.pools import run_drop_rounds
from selfcal_lightning.commands.two_stages import write_settings
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.arrays import PASS_AT_1, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget
from selfcal_lightning.models.folders import config_path, read_manifest
from selfcal_lightning.models.lora import LoraSettings, read_adapter_state
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.training.rounds import adapter_folder

# The reward, and what P(True) learns meanwhile.
METHODS: dict[str, tuple[GroupReward, PoolTarget | None]] = {
    "TTRL": ("majority", None),
    "calibrated, anchor": ("majority", "anchor"),
    "calibrated, round": ("majority", "round"),
    "equations": ("equations", None),
}
PLAIN, ANCHOR, ROUND, EQUATIONS = METHODS
Found, Sets = Mapping[str, Any], Sequence[SampledSet]
ADAPTER: dict[str, Any] = {
    "r": 16, "alpha": 32, "dropout": 0.0, "activated": False,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
SETS = ("transductive", "inductive", "out_of_domain")
TOKENS = 120
PASS, GUARDED, PACKING = "pass@1", "guard-0", "packing.json"
GROUPS, REPEATS = 5, 3
# Of an adapter; weights all of which were tuned collapsed at 1e-3.
WRECKING_RATE, MOST_ROUNDS = 3e-2, 3
FIT_OPTIONS = {"model": {"lora": ADAPTER}, "data": {"max_length": 320}, "trainer": {"accelerator": "cpu"}}
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
    measured_once(sizes.output / PACKING, partial(measure_packing, sizes.output, start, sizes.samples))
    run_guarded(start, sizes)


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
        fit_options={**FIT_OPTIONS, "model": {"lora": ADAPTER, "warmup_steps": 2}},
    )  # fmt: skip
    if method == PLAIN and not first.exists():
        shutil.copytree(place / "samples", first)
        run_drop_rounds(str(first))


def run_folder(folder: Path, method: str, seed: int) -> Path:
    return folder / f"{method.replace(', ', '-')}-{seed}"


def run_guarded(start: Path, sizes: Options) -> None:
    folder, first = sizes.output / GUARDED, run_folder(sizes.output, PLAIN, 0) / "round-0"
    if read_manifest(folder / runs.ADAPTER) is not None:
        return
    if not (folder / runs.SAMPLES).exists():
        shutil.copytree(first, folder / runs.SAMPLES)
    one = runs.Adaptation(
        str(start), None, adapted_on(sizes), *METHODS[PLAIN], None, None, rounds=MOST_ROUNDS, lr=WRECKING_RATE,
        batch_size=sizes.batch_size, num_samples=sizes.samples, max_new_tokens=TOKENS, seed=0,
    )  # fmt: skip
    settings = runs.fit_settings(one, folder, engine=EngineSettings(max_batch=512), guard={}, options=FIT_OPTIONS)
    write_settings(folder / "config.yaml", settings)
    _step(["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", "last"])


class Clock(Callback):
    """Counts positions, rows and CPU seconds of forward and backward passes, rows that fill up a micro-batch too."""

    def __init__(self) -> None:
        self.positions = self.responses = 0
        self.seconds = self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.positions += batch.input_ids.numel()
        self.responses += len(batch.target)
        self._started = time.process_time()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.process_time() - self._started


def measure_packing(folder: Path, model: Path, samples: int) -> dict[str, float]:
    """Return tokens and least CPU seconds of a response, in a packed group and in rows of their own."""
    store, passes = run_folder(folder, PLAIN, 0) / "round-0", {"packed": [], "apart": []}
    for _ in range(REPEATS):
        for name, way in (("packed", "shared_prefix"), ("apart", "off")):
            passes[name].append(_pass(str(model), str(store), samples, way))
    found = {f"{name}_tokens": clocks[0].positions / clocks[0].responses for name, clocks in passes.items()}
    seconds = {name: min(clock.seconds / clock.responses for clock in clocks) for name, clocks in passes.items()}
    return found | {f"{name}_seconds": least for name, least in seconds.items()}


def _pass(model: str, store: str, samples: int, packing: Any) -> Clock:
    clock, reward = Clock(), METHODS[PLAIN][0]
    lora = LoraSettings(**{**ADAPTER, "target_modules": tuple(ADAPTER["target_modules"])})
    module = TestTimeTrainingModule(model, lora=lora, reward=reward)
    settings = {"num_samples": samples, "reward": reward, "batch_size": GROUPS * samples, "max_length": 320}
    data = RolloutDataModule(model, store, packing=packing, **settings)
    # One optimiser step: the model that is updated sampled the round, and nothing is computed but what is learnt from.
    micro_steps = math.ceil(len(SampleStore(store).index(split="train", round=0)) / (GROUPS * samples))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=micro_steps, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, num_sanity_val_steps=0, use_distributed_sampler=False, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return clock


def read_guarded(folder: Path) -> dict[str, Any]:
    """Return before which round the guard stopped the run, why, and whether the last good adapter was left."""
    seen = json.loads((folder / runs.GUARD_FILE).read_text())
    stops = sorted(int(number) for number, row in seen.items() if row["problems"])
    if not stops:
        return {"rounds": None, "problems": [], "is_restored": False}
    left, round = read_adapter_state(folder / runs.ADAPTER), stops[0] - 1
    if round == 0:
        is_restored = not any(value.any() for name, value in left.items() if "lora_B" in name)
    else:
        good = read_adapter_state(adapter_folder(str(folder / runs.SAMPLES), round))
        is_restored = all(value.equal(good[name]) for name, value in left.items())
    return {"rounds": stops[0], "problems": seen[str(stops[0])]["problems"], "is_restored": is_restored}


def assemble(sizes: Options) -> dict[str, Any]:
    folder, seeds = sizes.output, range(sizes.seeds)
    files = {(m, seed): run_folder(folder, m, seed) / "adaptation.json" for m in METHODS for seed in seeds}
    needed = (*files.values(), folder / PACKING, folder / GUARDED / runs.GUARD_FILE)
    if lacking := [one for one in needed if not one.is_file()]:
        raise RunError(f"Expected all runs in {folder}, but there is no {lacking[0]}. Run without `--table`.")
    tables = {questions: compare(folder, questions, seeds) for questions in SETS}
    gain, guarded = rise_of_rounds(folder, seeds, sizes), read_guarded(folder / GUARDED)
    packing = json.loads((folder / PACKING).read_text())
    results = {key: json.loads(file.read_text()) for key, file in files.items()}
    for result in results.values():
        result["settings"]["base_model"] = Path(result["settings"]["base_model"]).name  # wherever it was made
    return {
        "sizes": sizes.sizes(*SIZES),
        "sets": tables,
        "start": {questions: untrained([results[PLAIN, seed] for seed in seeds], questions) for questions in SETS},
        "rounds_gain": gain,
        "packing": packing,
        "guarded": guarded,
        "targets": targets(tables, gain, packing, guarded),
        "runs": {f"{method}, seed {seed}": result for (method, seed), result in results.items()},
    }


def targets(tables: Found, rounds_gain: Found, packing: Found, guarded: Found) -> list[dict[str, str]]:
    sets = [tables[name] for name in ("transductive", "inductive")]
    both = [found["changes"]["anchor less start"] for found in sets]
    after = [found["levels"][ANCHOR]["ece"] for found in sets]
    ece = sets[1]["changes"]["anchor less TTRL"]["ece"]
    checked = [found["changes"]["equations less start"]["pass@1"] for found in sets]
    left = "the last good adapter was left" if guarded["is_restored"] else "another adapter was left"
    stopped = f"before round {guarded['rounds']}: {'; '.join(guarded['problems'])}; {left}"
    speed_up = packing["apart_seconds"] / packing["packed_seconds"]
    tokens = f"{packing['packed_tokens']:.0f} and {packing['apart_tokens']:.0f} tokens a response"
    rows = {
        "anchor less TTRL, inductive ECE: upper bound < -.03": (_cell(ece), ece["high"] < -0.03),
        "anchor, ECE after <= .12 and upper bound of its change < +.03, transductive and inductive": (
            "; ".join(f"{level:.3f}, {_cell(row['ece'])}" for level, row in zip(after, both, strict=True)),
            all(row["ece"]["high"] < 0.03 for row in both) and max(after) <= 0.12,
        ),
        "anchor, inductive pass@1: lower bound of its change > -.02": (
            _cell(both[1]["pass@1"]), both[1]["pass@1"]["low"] > -0.02,
        ),
        "anchor, pass@k: lower bounds of its change > -.10, transductive and inductive": (
            "; ".join(_cell(row["pass@k"]) for row in both), all(row["pass@k"]["low"] > -0.10 for row in both),
        ),
        "equations: pass@1, lower bounds > 0 transductive and > -.02 inductive": (
            "; ".join(map(_cell, checked)), checked[0]["low"] > 0.0 and checked[1]["low"] > -0.02,
        ),
        "TTRL: pass@1 at temperature 1 rises from the first round to the last, lower bound > 0": (
            _cell(rounds_gain), rounds_gain["low"] > 0.0,
        ),
        "a group packed against rows of their own: >= 1.4 x the responses a CPU second, forward and backward": (
            f"{speed_up:.2f} x; {tokens} (equal gradients: a test)", speed_up >= 1.4,
        ),
        f"the guard stops a run at a rate of {WRECKING_RATE:g} within {MOST_ROUNDS} rounds, and restores": (
            stopped if guarded["rounds"] else "it was not stopped", guarded["is_restored"],
        ),
    }  # fmt: skip
    words = {True: "met", False: "missed"}
    return [{"target": name, "found": found, "verdict": words[met]} for name, (found, met) in rows.items()]


def compare(folder: Path, name: str, seeds: Sequence[int]) -> dict[str, Any]:
    def read(suffix: str) -> dict[str, list[SampledSet]]:
        places = {"start": [folder / f"base-{seed}" / name / f"base{suffix}" for seed in seeds]}
        for m in METHODS:
            places[m] = [run_folder(folder, m, seed) / "evaluation" / name / f"adapted{suffix}" for seed in seeds]
        return {label: [evaluation.read_set(one) for one in found] for label, found in places.items()}

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
        },
        "verdicts": {method: judged(stores["start"], stores[method], greedy["start"]) for method in METHODS},
    }


def judged(before: Sets, after: Sets, greedy: Sets) -> str:
    def beyond(others: Sets) -> evaluation.Change:
        return evaluation.Change(
            None, None, mean_change(*([one.accuracy() for one in sets] for sets in (others, after)))
        )

    return evaluation.verdict({PASS: beyond(before), evaluation.BEYOND: beyond(greedy)})


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


def level(stores: Sets, greedy: Sets, size: int) -> dict[str, float]:
    rows = [evaluation.describe(one, likeliest, k=size, seed=0) for one, likeliest in zip(stores, greedy, strict=True)]
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def change(stores: tuple[Sets, ...], greedy: tuple[Sets, ...], size: int) -> dict[str, dict[str, float]]:
    before, after = ([Measured.of(one.scored()) for one in group] for group in stores)
    metrics = {PASS: PASS_AT_1, **evaluation.CALIBRATION}
    changes = {name: difference(after, before, metric) for name, metric in metrics.items()}
    changes["greedy"] = mean_change(*([one.accuracy() for one in group] for group in greedy))
    changes["majority"] = mean_change(*([one.majority(size) for one in group] for group in stores))
    changes["pass@k"] = mean_change(*([one.solved(size) for one in group] for group in stores))
    return {name: as_json(one) for name, one in changes.items()}


def round_accuracy(store_dir: str | Path, questions: Sequence[Question], *, round: int) -> Floats:
    """Return the share of right responses to each question in a round [Q], in the order of their ids."""
    store = SampleStore(store_dir)
    found = counted_samples(store, store.index(split="train", round=round), round=round)
    judged = evaluation.judged_entries(sorted(found, key=lambda one: one.question.id), questions)
    return np.array([np.mean([verdicts[sample.answer] for sample in entry.samples]) for entry, verdicts in judged])


def rise_of_rounds(folder: Path, seeds: Sequence[int], sizes: Options) -> dict[str, float]:
    questions = load_sets({"adapted": adapted_on(sizes)})["adapted"]
    stores = [run_folder(folder, PLAIN, seed) / "samples" for seed in seeds]
    last = sizes.rounds - 1
    return as_json(mean_change(*([round_accuracy(one, questions, round=r) for one in stores] for r in (0, last))))


def as_json(one: Estimate) -> dict[str, float]:
    return dict(zip(("change", "low", "high"), triple(one, digits=6), strict=True))


def mean_change(before: Sequence[Floats], after: Sequence[Floats]) -> Estimate:
    differences = np.array(after) - np.array(before)
    return estimate_of(mean_over_seeds(differences @ resample_weights(differences.shape[1])))


def _step(arguments: list[str]) -> None:
    if status := run_step(arguments):
        raise RunError(f"Expected every step to succeed, but `selfcal {arguments[0]}` ended with status {status}.")


def markdown(content: Mapping[str, Any]) -> str:
    sizes, sets = content["sizes"], content["sets"]
    over = "questions and seeds" if sizes["seeds"] > 1 else "questions"
    updates = -(-sizes["questions"] * sizes["samples"] // sizes["batch_size"]) * sizes["rounds"]
    lines = [
        f"Command: `{content['command']}`.",
        "",
        f"Sizes: {sizes['seeds']} seed(s); start calibrated on {sizes['start_questions']} questions x "
        f"{sizes['samples']}; adapted on {sizes['questions']} x {sizes['samples']}, {sizes['rounds']} rounds, "
        f"{updates} updates of {sizes['batch_size']} responses, LoRA of rank 16, peak learning rate {sizes['lr']:g}; "
        f"{sizes['questions']} other and {sizes['out_of_domain']} out-of-domain questions x {sizes['samples']} at the "
        f"usual sampling (EDT .8). Intervals: 95 %, paired, over {over}; those that exclude 0 in bold.",
        "",
    ]
    levels, changes = ({name: found[key] for name, found in sets.items()} for key in ("levels", "changes"))
    columns = ("pass@1", "greedy", "majority", "pass@k", "distinct", "tokens", "ece", "brier", "auroc")
    lines += _rows(["questions", "model", *columns], columns, levels)
    columns = ("pass@1", "majority", "pass@k", "distinct", "samples")
    ways = content["start"].items()
    start = {name: {way.replace("base", "start", 1): row for way, row in rows.items()} for name, rows in ways}
    lines += _rows(["questions", "without training", *columns], columns, start)
    columns = ("pass@1", "greedy", "majority", "pass@k", "ece", "brier", "auroc")
    lines += _rows(["questions", "change", *columns], columns, changes)
    rows = [[one, *(found["verdicts"][one] for found in sets.values())] for one in METHODS]
    lines += [*table(["what pass@1 comes to", *sets], rows, left=4), ""]
    rows = [[row["target"], row["found"], row["verdict"]] for row in content["targets"]]
    lines += ["| target | found | |", *table(["", "", ""], rows, left=3)[1:], ""]
    heads = ["run", "round", "pass@1 at T = 1", "label accuracy", "reward accuracy", "agreement", "votes", "lost log p"]
    keys = ("pass@1", "label_accuracy", "reward_accuracy", "agreement", "vote_share", "logprob_fall")
    return "\n".join([*lines, *_rows(heads, keys, {run: result["rounds"] for run, result in content["runs"].items()})])


def _rows(heads: list[str], columns: Sequence[str], groups: Mapping[str, Any]) -> list[str]:
    def cell(row: Mapping[str, Any], column: str) -> str:
        value, digits = row.get(column), 0 if column == "samples" else 3
        return _cell(value) if isinstance(value, dict) else "-" if value is None else f"{value:.{digits}f}"

    members = ((name, label, row) for name, group in groups.items() for label, row in group.items())
    rows = [[name, label, *(cell(row, column) for column in columns)] for name, label, row in members]
    return [*table(heads, rows, left=len(heads)), ""]


def _cell(found: Mapping[str, float | None]) -> str:
    text, (_, low, high) = show(found, "+", missing="-"), found.values()
    return f"**{text}**" if low is not None and (low > 0 or high < 0) else text


STUDY = Study("adapt/report_adapt.py", SIZES, run_jobs, assemble, markdown, collect="--table", layout={"indent": 1})

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
