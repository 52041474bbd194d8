"""What an activated adapter should learn: targets, a teacher, a ranking loss and a learned token.

All variants train side by side on the same rows and score the same responses of the base model. The default is chosen
on calibration questions.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import _targets_training as targets_training
import numpy as np
from rounds_study import estimate, plain, settle
from shared.estimates import RESAMPLES, mean_bounds, metric_columns
from shared.jobs import run
from shared.study import SAMPLED, Options, Study
from shared.tables import show, table

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import Estimate, calibration_error_bounds
from selfcal_lightning.records import Sample

SPLITS = {"calibration": "calibration", "in-domain test": "test_id", "out-of-domain test": "test_ood"}
METRICS = {"Brier": BRIER, "ECE": ECE, "AUROC": AUROC, "within-question AUROC": WITHIN_QUESTION_AUROC}
BASE, TAUGHT_BY = "nothing (the base's P(True))", "the teacher itself"
WITH_LABELS = ("true labels",)
# What every variant is held against: the one of the presets, and what the paper trains joint models on.
AGAINST = {"minus_first": targets_training.FIRST_VARIANT, "minus_ssc": "SSC"}
CRITERION = "Brier"
SIZES = {
    "questions": (160, "training questions"),
    "responses": (10, "responses a training question"),
    "calibration": (150, "calibration questions"),
    "num_samples": (8, "responses per judged question"),
}
QUICK = {"seeds": [0], "questions": 16, "responses": 4, "calibration": 12, "test": [12, 12], "num_samples": 4}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", help="folder or name of the model")
    parser.add_argument("--test", type=int, nargs=2, default=[200, 100], help="test questions in and out of domain")


def complete(parser: argparse.ArgumentParser, options: Options) -> None:
    options.splits = dict(zip(SPLITS.values(), [options.calibration, *options.test], strict=True))


def run_jobs(options: Options) -> None:
    for job in (sample, train):
        for seed in options.seeds:
            job(options, seed)


def sample(options: Options, seed: int) -> None:
    folder = options.folder(seed)
    jobs = [("samples", "train", options.questions, options.responses, seed)]
    jobs += [("judged", split, limit, options.num_samples, 1000 + seed) for split, limit in options.splits.items()]
    for name, split, limit, responses, number in jobs:
        store = folder / name
        known = len(SampleStore(store).question_ids(split=split)) if (store / "manifest.json").exists() else 0
        if known < limit:
            run(
                folder / "log.txt", "generate", "--model", options.model, "--store_dir", str(store),
                "--task", "[word_problems]", "--split", split, "--limit", str(limit), "--seed", str(number),
                "--num_samples", str(responses), *SAMPLED, "--engine.dtype", "float32",
            )  # fmt: skip


def train(options: Options, seed: int) -> None:
    folder = options.folder(seed)
    targets_training.fit_teacher(options, seed)
    settle(folder / "config.yaml", targets_training.configuration(options, seed))
    if not (folder / "scores.npz").exists():
        if not (folder / f"adapter-v{len(targets_training.VARIANTS) - 1}").exists():
            run(folder / "log.txt", "fit", "--config", str(folder / "config.yaml"))
        keep(folder / "scores.npz", targets_training.score_variants(options, seed))
    if not (folder / "learned_token.npz").exists():
        keep(folder / "learned_token.npz", targets_training.train_learned_token(options, seed))


def keep(path: Path, scores: targets_training.Scores) -> None:
    fresh = path.with_suffix(".tmp.npz")
    np.savez(fresh, **dict(scores))
    fresh.rename(path)


def read_scores(options: Options, seed: int) -> dict[str, np.ndarray]:
    """Return the confidences of all variants, of the base and of the teacher, [N] each."""
    folder = options.folder(seed)
    found: dict[str, np.ndarray] = {}
    for name in ("scores.npz", "learned_token.npz"):
        with np.load(folder / name) as scores:
            found |= {variant: scores[variant] for variant in scores.files}
    samples = [sample for split in options.splits for sample in judged(options, seed, split)]
    teacher = targets_training.fit_teacher(options, seed)
    found[BASE] = np.array([one.p_true for one in samples], dtype=float)
    found[TAUGHT_BY] = np.array([teacher.score_sample(one) for one in samples], dtype=float)
    return {name: found[name] for name in (BASE, TAUGHT_BY, *targets_training.VARIANTS, targets_training.LEARNED_TOKEN)}


def judged(options: Options, seed: int, split: str) -> list[Sample]:
    entries = islice(SampleStore(options.folder(seed) / "judged").samples(split=split), options.splits[split])
    return [sample for entry in entries for sample in entry.samples]


def assemble(options: Options) -> dict[str, Any]:
    scores = {seed: read_scores(options, seed) for seed in options.seeds}
    tables = {title: table_of(options, split, scores) for title, split in SPLITS.items()}
    return {
        "sizes": options.sizes("questions", "responses", "calibration", "test", "num_samples", "seeds"),
        "learning_rate": targets_training.LEARNING_RATE,
        "criterion": CRITERION,
        "first": targets_training.FIRST_VARIANT,
        "tables": tables,
        "chosen": choose(tables["calibration"]),
        "minutes": options.minutes,
    }


def table_of(options: Options, split: str, scores: Mapping[int, targets_training.Scores]) -> dict[str, dict[str, Any]]:
    """Return each variant's values on a split, and what they differ by from those that it is held against."""
    parts = [columns_of(options, split, seed, scores[seed]) for seed in options.seeds]
    rows = {}
    for variant in parts[0]:
        mine = [part[variant] for part in parts]
        rows[variant] = {"values": estimates(mine)}
        rows[variant] |= {name: estimates(mine, [part[other] for part in parts]) for name, other in AGAINST.items()}
    return rows


def estimates(
    mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, float | None]]:
    """Return the metrics of a variant over its seeds, or what they differ by from those of others."""
    found = {}
    for short, metric in METRICS.items():
        columns, theirs = ([one[metric] for one in side] for side in (mine, others))
        if metric == ECE:
            errors = mean_bounds(columns).minus(mean_bounds(theirs)) if theirs else mean_bounds(columns)
            found[short] = plain(Estimate.from_bounds(errors, least=-1.0 if theirs else 0.0, most=1.0))
        else:
            found[short] = estimate(np.stack(columns) - (np.stack(theirs) if theirs else 0.0))
    return found


def columns_of(options: Options, split: str, seed: int, scores: targets_training.Scores) -> dict[str, dict[str, Any]]:
    names = list(options.splits)
    start = sum(len(judged(options, seed, name)) for name in names[: names.index(split)])
    samples = judged(options, seed, split)
    correct, question = np.array([bool(one.correct) for one in samples]), np.array([one.question_id for one in samples])
    wanted = [metric for metric in METRICS.values() if metric != ECE]
    found = {}
    for variant, values in scores.items():
        columns = values[start : start + len(samples)].clip(0.0, 1.0), correct, question
        errors = calibration_error_bounds(*columns, num_resamples=RESAMPLES)
        found[variant] = {**metric_columns(columns, wanted, num_resamples=RESAMPLES), ECE: errors}
    return found


def choose(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the variant without labels that is best by the criterion, and what it is clearly better than.

    The read-out of a learned token takes part in the table alone: no engine reads it.
    """
    free = [name for name in targets_training.VARIANTS if name not in WITH_LABELS]
    best = min(free, key=lambda name: table[name]["values"][CRITERION]["value"])
    changes = {name: table[best][name][CRITERION] for name in AGAINST}
    clearly = {name: best != other and changes[name]["high"] < 0.0 for name, other in AGAINST.items()}
    return {"variant": best, **changes, "clearly": clearly}


def as_markdown(study: Mapping[str, Any]) -> str:
    sizes, chosen = study["sizes"], study["chosen"]
    verdicts = [
        f"{show(chosen[name])} from {other}, {'clearly' if chosen['clearly'][name] else 'not clearly'} better"
        for name, other in AGAINST.items()
    ]
    lines = [
        f"Command: `{study['command']}` ({study['minutes']} minutes for the jobs that were not done before). Seeds "
        f"{sizes['seeds']}; {sizes['questions']} training questions x {sizes['responses']} responses, one epoch, 32 to "
        f"a step, learning rate {study['learning_rate']}; {sizes['calibration']} calibration questions, "
        f"{sizes['test'][0]} test questions in and {sizes['test'][1]} out of domain x {sizes['num_samples']} responses "
        "of the base model, the same in all rows of a table. Means over the seeds; 95 % intervals over questions and "
        "seeds, of the ECE over questions. The "
        "teacher is a fusion of P(True) and log-probabilities, fitted without labels to the vote share of the training "
        "responses; where it is mixed in, it makes half of the target.",
        "",
        f"Chosen on the calibration questions by {CRITERION} among what needs no labels: **{chosen['variant']}**, "
        f"{'; '.join(verdicts)}.",
    ]
    heads = ["trained on", *METRICS]
    differences = [f"{CRITERION} minus {other}" for other in AGAINST.values()]
    for title, entries in study["tables"].items():
        rows = [
            [variant, *map(show, entry["values"].values()), *(show(entry[name][CRITERION]) for name in AGAINST)]
            for variant, entry in entries.items()
        ]
        lines += ["", f"### {title.capitalize()} questions", "", *table([*heads, *differences], rows)]
    rows = [
        [variant, *map(show, entry["minus_first"].values())]
        for variant, entry in study["tables"]["in-domain test"].items()
        if variant != study["first"]
    ]
    lines += ["", f"### What the others differ by from {study['first']}, in domain", "", *table(heads, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    study = Study(
        "quality/targets_study.py", SIZES, run_jobs, assemble, as_markdown, arguments=arguments, quick=QUICK,
        complete=complete, layout={"indent": 1},
    )  # fmt: skip
    raise SystemExit(study.main())
