"""Jobs of a seed, and what it shows: columns [..., 1 + R] of a value and its resamples over questions, by key.

A calibration error has bounds instead, since it is above 0 by chance. All seeds have the same questions and resamples.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shared.estimates import RESAMPLES, Column, Measured, column_over_seeds, estimated, with_question_confidence
from shared.jobs import run_once, seconds_of
from shared.study import SAMPLED, SPLITS, TASK, TESTS, Options, configuration, train_on, write_configuration
from shared.tables import End, holds, triple
from shared.timing import SAMPLING, measured_once, requests_of, timed

from selfcal_lightning.capability import evaluation
from selfcal_lightning.capability.budgets import SEQUENTIAL, UNIFORM, solved_columns
from selfcal_lightning.capability.estimators import averaged_names
from selfcal_lightning.capability.features import PromptModel, open_features, read_features
from selfcal_lightning.capability.fitted_maps import fit_capability_maps
from selfcal_lightning.capability.probe import LEAST_QUESTIONS, fit_probe
from selfcal_lightning.capability.question_table import QuestionTable, load_capability_pool, question_table
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.data.store.annotations import question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.settings import EngineOptions, LevelSettings, PromptStates
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.evaluation.curves import powers_of_two
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, Array, Floats
from selfcal_lightning.metrics.bootstrap import resample_weights
from selfcal_lightning.metrics.calibration import ErrorBounds
from selfcal_lightning.metrics.capability import pass_at_k, squared_errors
from selfcal_lightning.metrics.discrimination import spearman

PROBE, LABELLED, BEFORE, TAUGHT, AWAKE = "probe", "labelled", "p_true_before", "taught", "p_true_awake"
TARGETS = {PROBE: "agreeing_pairs", LABELLED: "label"}
CALIBRATED_ON = 700  # training questions of the adapter that P(True) after a response is read with
# Rows that the shipped configuration of a taught P(True) goes through; more questions take fewer epochs.
TAUGHT_ROWS = 7000


def run_seed(plan: Options, seed: int) -> None:
    folder = plan.folder(seed)
    train, tests = str(folder / "train"), str(folder / "tests")
    sampled = ["--task", TASK, *SAMPLED, "--seed", str(seed)]
    run_once(folder, "generate", "--model", "bundled", "--store_dir", train, "--limit", str(plan.train),
        "--num_samples", str(plan.train_samples), *sampled)  # fmt: skip
    for name, split in SPLITS.items():
        run_once(folder, "generate", "--model", "bundled", "--store_dir", tests, "--split", split, "--store_split",
            name, "--limit", str(plan.parts[name]), "--num_samples", str(plan.num_samples), *sampled)  # fmt: skip
    for name, target in TARGETS.items():
        probe = str(folder / name)
        run_once(folder, "fit-probe", "--pool", train, "--output", probe, "--target", target)
        stored = "--store_dir", tests, "--name", name, "--overwrite", "true"
        run_once(folder, "score-questions", "--probe", probe, *stored)
    run_once(folder, "score-questions", "--estimator", BEFORE, "--store_dir", tests)
    epochs = max(round(TAUGHT_ROWS / plan.train), 1)
    trainer = {"max_epochs": epochs, "check_val_every_n_epoch": epochs}
    _fit(plan, seed, TAUGHT, "capability/taught.yaml", limit=plan.train, trainer=trainer)
    run_once(folder, "score-questions", "--estimator", BEFORE, "--adapter", str(folder / TAUGHT / "adapter"),
        "--store_dir", tests, "--name", TAUGHT)  # fmt: skip
    _fit(plan, seed, AWAKE, "demo.yaml", limit=min(CALIBRATED_ON, plan.train), trainer={})
    run_once(folder, "score", "--estimator", "p_true", "--store_dir", tests, "--model", "bundled",
        "--adapter", str(folder / AWAKE / "adapter"), "--name", AWAKE, "--engine.max_batch", "512")  # fmt: skip


def _fit(plan: Options, seed: int, name: str, source: str, *, limit: int, trainer: dict[str, Any]) -> None:
    folder, keep = plan.folder(seed), {"CalibrationCurve", "AdapterExport"}
    place = folder / name
    config = configuration(source, seed=seed, folder=place, adapter=place / "adapter", keep=keep)
    config["trainer"] |= trainer
    data = train_on(config, folder / "train", limit=limit)
    data |= {"validation": [], "num_samples": plan.train_samples}
    run_once(folder, "fit", "--config", str(write_configuration(place / "config.yaml", config)))


READ = 5  # responses of a question that estimates from responses read
LEFT_OUT = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
SUBSETS = 50  # of half of the responses, for the debiased error
FROM_PROMPTS = (PROBE, LABELLED, BEFORE, TAUGHT)
FROM_RESPONSES = ("agreeing_pairs", "top_share", "mean_logprob", "p_true", AWAKE)
Columns, Questions = dict[str, Column], evaluation.TestQuestions


def measure_seed(folder: Path) -> Columns:
    found: Columns = {}
    for split in TESTS:
        own: Columns = {}
        weights: Floats | None = None
        for names, stop in ((FROM_PROMPTS, 0), (FROM_RESPONSES, READ)):
            beside, store = averaged_names(folder / "tests", names), str(folder / "tests")
            pools = (load_capability_pool(store, split=each, task=None, confidences=beside)
                     for each in (split, "calibration"))  # fmt: skip
            test, calibration = (evaluation.test_questions(pool, names, estimate_samples=stop) for pool in pools)
            weights = resample_weights(len(test.truth), num_resamples=RESAMPLES) if weights is None else weights
            own = estimate_columns(test, calibration, weights) | own  # a constant is judged by all responses
            if not stop:
                own |= application_columns(test, calibration, weights)
                own["half of the responses"] = half_gap(test.truth, test.estimates[PROBE])
        found |= {f"{split}/{key}": column for key, column in own.items()}
    return found


def estimate_columns(test: Questions, calibration: Questions, weights: Floats) -> Columns:
    truth, shares = test.truth, test.truth.expected_accuracy
    spread = evaluation.capability_spread(truth.num_correct, truth.num_samples, weights)
    found: Columns = {"constant/mse": spread}
    single = shares * (1.0 - shares) * truth.num_samples / (truth.num_samples - 1)
    found["verdict/mse"] = single @ weights
    for name, values, _ in evaluation.candidates(test, calibration):
        found[f"{name}/spearman"] = evaluation.resampled_column(spearman, values, shares, weights)
        if ((values >= 0.0) & (values <= 1.0)).all():
            error = squared_errors(values, truth.num_correct, truth.num_samples) @ weights
            found[f"{name}/mse"] = error
            found[f"{name}/skill"] = 1.0 - error / spread
            found[f"{name}/ece"] = evaluation.share_error_bounds(values, shares, weights)
    return found


def pass_at_k_squared_errors(predicted: Floats, num_samples: Array, num_correct: Array, k: int) -> Floats:
    """Compute the squared error of the predicted pass@k of each question, without sampling noise.

    ``p^2 - 2 p (1 - f_k) + 1 - 2 f_k + f_2k`` with ``f_k = C(n - c, k) / C(n, k)``, the unbiased estimate of
    ``(1 - c*)^k``. It has the expectation ``(p - pass@k)^2``; that of a single question may be negative.
    """
    once, twice = (1.0 - pass_at_k(num_samples, num_correct, size) for size in (k, 2 * k))
    return predicted**2 - 2.0 * predicted * (1.0 - once) + 1.0 - 2.0 * once + twice


def application_columns(test: Questions, calibration: Questions, weights: Floats) -> Columns:
    truth = test.truth
    least = int(min(truth.num_samples.min(), calibration.truth.num_samples.min()))
    ks = powers_of_two(least)
    half = powers_of_two(least // 2)[-1]  # the error of a larger k cannot be told from the noise of the responses
    actual = np.stack([pass_at_k(truth.num_samples, truth.num_correct, k) for k in ks])
    found: Columns = {"pass@k/shown": actual @ weights}
    for name in (PROBE, LABELLED):
        counts = calibration.truth.num_correct, calibration.truth.num_samples
        maps = fit_capability_maps(calibration.estimates[name], *counts, ks=ks)
        for way, predicted in maps.pass_at_k(test.estimates[name], ks).items():
            found[f"{name}/pass@k/{way}"] = predicted @ weights
            found[f"{name}/curve error/{way}"] = np.abs((predicted - actual) @ weights).mean(axis=0)
            errors = pass_at_k_squared_errors(predicted[ks.index(half)], truth.num_samples, truth.num_correct, half)
            found[f"{name}/pass@half/{way}"] = errors @ weights
    few = [replace(one, estimates={name: one.estimates[name] for name in (PROBE, LABELLED)})
           for one in (test, calibration)]  # fmt: skip
    budgets, solved = solved_columns(*few, weights)
    found["budgets"] = np.repeat(np.array(budgets, dtype=np.float64)[:, None], weights.shape[1], axis=1)
    found |= {f"solved/{way}": column for way, column in solved.items()}
    found |= {f"gain/{way}": column - solved[UNIFORM] for way, column in solved.items()}
    shares = truth.expected_accuracy
    for name, values in {**few[0].estimates, evaluation.ORACLE: shares}.items():
        asked = (evaluation.asked_questions(values, share) for share in LEFT_OUT)
        found[f"lost/{name}"] = np.stack([evaluation.lost_column(shares, one, weights) for one in asked])
    return found


def half_gap(truth: QuestionTable, values: Floats) -> Floats:
    """Return how far the debiased error from half of the responses is from that of all, as a mean over draws [1]."""
    rng = np.random.default_rng(0)
    half = truth.num_samples // 2
    right = truth.num_correct.astype(np.int64)
    drawn = [rng.hypergeometric(right, truth.num_samples - right, half) for _ in range(SUBSETS)]
    errors = np.mean([squared_errors(values, each, half).mean() for each in drawn])
    return np.array([abs(errors - squared_errors(values, right, truth.num_samples).mean())])


PARTS = 10  # that the training questions are dealt into, each with all of its responses
TIMED_QUESTIONS, TURNS = 128, 3


def size_columns(folder: Path) -> Columns:
    """Return the errors of labelled probes of all questions and responses, of one response each, and of few questions.

    The latter two are means over the responses in turn, and over the parts of the questions.
    """
    train = load_capability_pool(str(folder / "train"), split="train", task=None)
    tests = {split: load_capability_pool(str(folder / "tests"), split=split, task=None) for split in TESTS}
    states = {split: _states(pool, folder / "tests") for split, pool in tests.items()}
    entries, own = train.pool.entries, _states(train, folder / "train")
    rows, parts = np.arange(len(entries)), min(PARTS, len(entries) // LEAST_QUESTIONS)
    kinds = {
        "all": [(rows, entries)],
        "one response": [
            (rows, [replace(entry, samples=entry.samples[at : at + 1]) for entry in entries])
            for at in range(min(len(one.samples) for one in entries))
        ],
        "few questions": [(rows[part::parts], entries[part::parts]) for part in range(parts)],
    }
    found: Columns = {}
    for kind, draws in kinds.items():
        read = ((PromptStates(own.last_token[at], own.token_mean[at]), some) for at, some in draws)
        probes = [fit_probe(*one, target="label", origin={}, sampling=None) for one in read]
        for split, pool in tests.items():
            truth = question_table(pool.pool.entries)
            weights = resample_weights(len(truth), num_resamples=RESAMPLES)
            counts = truth.num_correct, truth.num_samples
            errors = [squared_errors(probe.predict(states[split]), *counts) for probe in probes]
            found[f"{split}/size/{kind}"] = np.mean(errors, axis=0) @ weights
    return found


def confidence_columns(folder: Path) -> Columns:
    found: Columns = {}
    for split in TESTS:
        pool = load_capability_pool(str(folder / "tests"), split=split, task=None, confidences=[AWAKE])
        keys = [(question.id, question_digest(question)) for question in pool.questions]
        values = [float(value or 0.0) for value in question_values(pool.path, PROBE, keys)]
        entries = with_question_confidence(pool.pool.entries, values, name=PROBE)
        for name in (PROBE, "p_true", AWAKE):
            one = Measured.of(scored_responses(entries, name=name))
            found |= {f"{split}/response/{name}/{metric}": one.values[metric] for metric in (AUROC, BRIER)}
            found[f"{split}/response/{name}/{ECE}"] = one.errors
    return found


def processor_seconds() -> tuple[float, float]:
    torch.set_num_threads(1)
    questions = get_task(TASK).load("calibration", limit=TIMED_QUESTIONS)
    engine = TransformersEngine("bundled", max_batch=TIMED_QUESTIONS)
    prompts = [engine.chat.prompt_ids(question.messages) for question in questions]
    requests = requests_of(questions, engine.chat, SAMPLING)
    reading, answering = [], []
    for _ in range(TURNS):
        reading.append(timed(lambda: engine.prompt_states(prompts, LevelSettings()))[1] / len(prompts))
        answering.append(timed(lambda: generate(engine, requests))[1] / len(prompts))
    engine.close()
    return statistics.median(reading), statistics.median(answering)


def _states(pool: Any, store: Path) -> PromptStates:
    """Return the hidden states that `fit-probe` and `score-questions` have put beside a store."""
    levels = LevelSettings()
    with PromptModel(ModelSettings("bundled", None, EngineOptions()), pool.fingerprint) as model:
        folder = open_features(model, levels, store=store, given=None)
        return read_features(model, pool.questions, folder, levels)


ENDS: Mapping[str, End] = {"": "value", "lower": "low", "upper": "high"}
BUDGETS = (8, 4)  # of the plan, and one at a time
LOST_AT = 0.2
DIGITS = 5  # seconds of a prompt's pass are small numbers


def check(what: str, column: Column, held_to: str) -> dict[str, Any]:
    """Hold a column [1 + R] or a calibration error, or an end of its interval, to a bound."""
    found, (*words, sign, limit) = estimated(column), held_to.split()
    met = holds(found, ENDS["".join(words[:1])], sign, float(limit))
    return {"what": what, "found": triple(found, digits=DIGITS), "held_to": held_to, "holds": met}


def targets(columns: Columns, *, seconds: Sequence[float]) -> list[dict[str, Any]]:
    probe, far = columns[f"id/{PROBE}/mse"], columns[f"ood/{PROBE}/mse"]
    agreeing = columns["id/agreeing_pairs/mse"] - columns["id/top_share/mse"]
    whole, one, few = (columns[f"id/size/{kind}"] for kind in ("all", "one response", "few questions"))
    curve, powers = (columns[f"id/{PROBE}/curve error/{way}"] for way in ("maps", "power"))
    half, half_powers = (columns[f"id/{PROBE}/pass@half/{way}"] for way in ("maps", "power"))
    budgets = columns["id/budgets"][:, 0].astype(int).tolist()
    plan, sequential = (min(budget, budgets[-1]) for budget in BUDGETS)
    gain = columns[f"id/gain/{PROBE}, Beta gain"][budgets.index(plan)]
    solved = columns[f"id/solved/{SEQUENTIAL}"][budgets.index(sequential)]
    lost = {split: columns[f"{split}/lost/{PROBE}"][LEFT_OUT.index(LOST_AT)] for split in TESTS}
    left_out = f"right responses lost where the probe leaves {LOST_AT:.0%} of the questions out"
    checks = [
        ("MSE of the label-free probe, in domain", probe, "<= 0.09"),
        ("", probe, "upper end <= 0.105"),
        ("MSE of the label-free probe, out of domain", far, "<= 0.075"),
        ("", far, "upper end <= 0.09"),
        ("its skill, in domain", columns[f"id/{PROBE}/skill"], ">= 0.45"),
        ("its Spearman, in domain", columns[f"id/{PROBE}/spearman"], ">= 0.66"),
        ("its ECE, in domain", columns[f"id/{PROBE}/ece"], "<= 0.07"),
        ("MSE without labels less that with labels, in domain", probe - columns[f"id/{LABELLED}/mse"],
         "upper end <= 0.01"),
        (f"MSE of agreeing pairs less top share, {READ} responses", agreeing, "<= -0.03"),
        ("", agreeing, "upper end <= 0"),
        ("MSE with one labelled response a question less with all", one - whole, "<= 0.01"),
        ("MSE of a tenth of the questions with all responses less all questions with one", few - one, ">= 0.005"),
        ("error of the pass@k curve by maps, in domain", curve, "<= 0.03"),
        ("that error less that of 1 - (1 - p)^k, the curve", curve - powers, "upper end <= 0"),
        ("error of a question's pass@k by maps, at half of the responses", half, "<= 0.115"),
        ("that error less that of 1 - (1 - p)^k, the question", half - half_powers, "upper end <= 0"),
        (f"solved by a plan of {plan} samples a question beyond a uniform allocation", gain, "lower end > 0"),
        (f"solved one at a time with a verifier, {sequential} samples a question", solved, ">= 0.67"),
        (f"{left_out}, in domain", lost["id"], "<= 0.05"),
        (f"{left_out}, out of domain", lost["ood"], "<= 0.05"),
        ("MSE of P(True) before answering, taught, in domain", columns.get(f"id/{TAUGHT}/mse"), "<= 0.095"),
        ("debiased MSE of half of the responses off that of all", columns["id/half of the responses"], "<= 0.005"),
        ("processor time of the probe over that of one response", np.array([seconds[0] / seconds[1]]), "<= 0.4"),
    ]  # fmt: skip
    return [check(what, column, held_to) for what, column, held_to in checks if column is not None]


def assemble(plan: Options) -> dict[str, Any]:
    folders = [plan.folder(seed) for seed in plan.seeds]
    columns = over_seeds([measure_seed(one) | size_columns(one) | confidence_columns(one) for one in folders])
    seconds = measured_once(plan.output / "seconds.json", processor_seconds)
    return {
        "seeds": plan.seeds,
        "sizes": {**plan.sizes("train", "train_samples"), "samples": plan.num_samples, **plan.parts},
        "processor_minutes": sum(sum(seconds_of(folder).values()) for folder in folders) / 60.0,
        "seconds": {"a prompt's states": seconds[0], "a response": seconds[1]},
        "checks": targets(columns, seconds=seconds),
        "measured": {key: as_json(column) for key, column in columns.items()},
    }


def over_seeds(found: Sequence[Columns]) -> Columns:
    keys = dict.fromkeys(key for one in found for key in one)
    return {key: column_over_seeds([one[key] for one in found if key in one]) for key in keys}


def as_json(column: Column) -> Any:
    if not isinstance(column, ErrorBounds) and column.ndim > 1:
        return [as_json(row) for row in column]
    return triple(estimated(column), digits=DIGITS)
