"""What one seed shows: columns [..., 1 + R] of a value and its resamples over questions, by key.

A calibration error is a value with bounds of its deviation instead, since it is above 0 by chance alone.

All seeds have the same questions, so that their resamples are the same too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from _capability_jobs import AWAKE, BEFORE, LABELLED, PROBE, TAUGHT, TESTS
from shared.estimates import Column

from selfcal_lightning.capability.budgets import UNIFORM, powers_of_two, solved_columns
from selfcal_lightning.capability.estimators import averaged_names
from selfcal_lightning.capability.evaluation import (
    ORACLE,
    TestQuestions,
    asked_questions,
    candidates,
    capability_spread,
    lost_column,
    resampled_column,
    share_error_bounds,
    test_questions,
)
from selfcal_lightning.capability.fitted_maps import fit_capability_maps
from selfcal_lightning.capability.inputs import load_capability_pool
from selfcal_lightning.capability.question_table import QuestionTable
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.bootstrap import resample_weights
from selfcal_lightning.metrics.capability import pass_at_k, pass_at_k_squared_errors, squared_errors
from selfcal_lightning.metrics.discrimination import spearman

RESAMPLES = 1000
READ = 5  # responses of a question that estimates from responses read
LEFT_OUT = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
SUBSETS = 50  # of half of the responses, for the debiased error
FROM_PROMPTS = (PROBE, LABELLED, BEFORE, TAUGHT)
FROM_RESPONSES = ("agreeing_pairs", "top_share", "mean_logprob", "p_true", AWAKE)
Columns = dict[str, Column]


def measure_seed(folder: Path, *, without: Sequence[str] = ()) -> Columns:
    """Return the columns of a seed, those of both test sets under "id/" and "ood/"."""
    found: Columns = {}
    for split in TESTS:
        own: Columns = {}
        weights: Floats | None = None
        for names, stop in ((FROM_PROMPTS, 0), (FROM_RESPONSES, READ)):
            wanted = [name for name in names if name not in without]
            test, calibration = (_read(folder / "tests", each, wanted, stop) for each in (split, "calibration"))
            weights = resample_weights(len(test.truth), num_resamples=RESAMPLES) if weights is None else weights
            own = estimate_columns(test, calibration, weights) | own  # a constant is judged by all responses
            if not stop:
                own |= application_columns(test, calibration, weights)
                own["half of the responses"] = half_gap(test.truth, test.estimates[PROBE])
        found |= {f"{split}/{key}": column for key, column in own.items()}
    return found


def estimate_columns(test: TestQuestions, calibration: TestQuestions, weights: Floats) -> Columns:
    """Return error, skill, rank correlation and calibration error of every estimate, mapped ones too."""
    truth, shares = test.truth, test.truth.expected_accuracy
    spread = capability_spread(truth.num_correct, truth.num_samples, weights)
    found: Columns = {"constant/mse": spread}
    single = shares * (1.0 - shares) * truth.num_samples / (truth.num_samples - 1)
    found["verdict/mse"] = single @ weights
    for name, values, _ in candidates(test, calibration):
        found[f"{name}/spearman"] = resampled_column(spearman, values, shares, weights)
        if ((values >= 0.0) & (values <= 1.0)).all():
            error = squared_errors(values, truth.num_correct, truth.num_samples) @ weights
            found[f"{name}/mse"] = error
            found[f"{name}/skill"] = 1.0 - error / spread
            found[f"{name}/ece"] = share_error_bounds(values, shares, weights)
    return found


def application_columns(test: TestQuestions, calibration: TestQuestions, weights: Floats) -> Columns:
    """Return pass@k, budgets and not asking by the probes."""
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
    few = _only(test, (PROBE, LABELLED)), _only(calibration, (PROBE, LABELLED))
    budgets, solved = solved_columns(*few, weights)
    found["budgets"] = np.repeat(np.array(budgets, dtype=np.float64)[:, None], weights.shape[1], axis=1)
    found |= {f"solved/{way}": column for way, column in solved.items()}
    found |= {f"gain/{way}": column - solved[UNIFORM] for way, column in solved.items()}
    for name, values in {**few[0].estimates, ORACLE: truth.expected_accuracy}.items():
        rows = [lost_column(truth.expected_accuracy, asked_questions(values, share), weights) for share in LEFT_OUT]
        found[f"lost/{name}"] = np.stack(rows)
    return found


def half_gap(truth: QuestionTable, values: Floats) -> Floats:
    """Return how far the debiased error from half of the responses is from that of all, as a mean over draws [1]."""
    rng = np.random.default_rng(0)
    half = truth.num_samples // 2
    right = truth.num_correct.astype(np.int64)
    drawn = [rng.hypergeometric(right, truth.num_samples - right, half) for _ in range(SUBSETS)]
    errors = np.mean([squared_errors(values, each, half).mean() for each in drawn])
    return np.array([abs(errors - squared_errors(values, right, truth.num_samples).mean())])


def _read(store: Path, split: str, names: Sequence[str], stop: int) -> TestQuestions:
    beside = averaged_names(store, names)
    read = load_capability_pool(str(store), split=split, task=None, confidences=beside)
    return test_questions(read, names, estimate_samples=stop)


def _only(test: TestQuestions, names: Sequence[str]) -> TestQuestions:
    kept: Mapping[str, Floats] = {name: test.estimates[name] for name in names}
    return replace(test, estimates=dict(kept))
