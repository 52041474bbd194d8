"""How many questions and responses a probe needs, the probe as a confidence in single responses, and what it costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from _capability_jobs import AWAKE, PROBE, TASK, TESTS
from _capability_measures import RESAMPLES, Columns

from selfcal_lightning.capability.features import PromptModel
from selfcal_lightning.capability.inputs import CapabilityPool, feature_folder, load_capability_pool, states_of
from selfcal_lightning.capability.probe import LEAST_QUESTIONS, fit_probe, with_question_confidence
from selfcal_lightning.capability.question_table import question_table
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.data.store.annotations import question_values
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.hidden_states import LevelSettings, PromptReader, PromptStates
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, Floats
from selfcal_lightning.metrics.bootstrap import (
    bootstrap_interval,
    calibration_error_bounds,
    question_bootstrap,
    resample_weights,
)
from selfcal_lightning.metrics.capability import squared_errors
from selfcal_lightning.records import QuestionSamples, Request, SamplingSettings, sample_seed

PARTS = 10  # that the training questions are dealt into, each with all of its responses
MEASURES = (AUROC, BRIER)
TIMED_QUESTIONS, TURNS = 128, 3
SAMPLING = SamplingSettings(temperature=0.8, edt_scale=0.8, edt_theta=1.0, max_new_tokens=120)


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
        "one response": [(rows, _response(entries, at)) for at in range(min(len(one.samples) for one in entries))],
        "few questions": [(rows[part::parts], entries[part::parts]) for part in range(parts)],
    }
    found: Columns = {}
    for kind, draws in kinds.items():
        probes = [fit_probe(_rows(own, at), some, target="label", origin={}, sampling=None) for at, some in draws]
        for split, pool in tests.items():
            table = question_table(pool.pool.entries)
            weights = resample_weights(len(table), num_resamples=RESAMPLES)
            errors = [
                squared_errors(probe.predict(states[split]), table.num_correct, table.num_samples) for probe in probes
            ]
            found[f"{split}/size/{kind}"] = np.mean(errors, axis=0) @ weights
    return found


def confidence_columns(folder: Path, *, without: Sequence[str] = ()) -> Columns:
    """Return how well the probe, and P(True) before and after calibration, know about single responses."""
    found: Columns = {}
    beside = [name for name in (AWAKE,) if name not in without]
    for split in TESTS:
        pool = load_capability_pool(str(folder / "tests"), split=split, task=None, confidences=beside)
        keys = [(question.id, question_digest(question)) for question in pool.questions]
        values = [float(value or 0.0) for value in question_values(pool.path, PROBE, keys)]
        entries = with_question_confidence(pool.pool.entries, values, name=PROBE)
        for name in (PROBE, "p_true", *beside):
            scored = scored_responses(entries, name=name)
            columns = (scored.confidence, scored.correct, scored.question_index)
            plain = bootstrap_interval(*columns, metrics=MEASURES, num_resamples=1)
            drawn = question_bootstrap(*columns, metrics=MEASURES, num_resamples=RESAMPLES)
            for measure in MEASURES:
                value = plain[measure].value
                found[f"{split}/response/{name}/{measure}"] = np.append(
                    np.nan if value is None else value, drawn[measure]
                )
            found[f"{split}/response/{name}/{ECE}"] = calibration_error_bounds(*columns, num_resamples=RESAMPLES)
    return found


def processor_seconds() -> tuple[float, float]:
    """Return the processor seconds of reading a prompt's states, and of a response to it: medians over turns."""
    torch.set_num_threads(1)
    questions = get_task(TASK).load("calibration", limit=TIMED_QUESTIONS)
    engine = TransformersEngine("bundled", max_batch=TIMED_QUESTIONS)
    prompts = [engine.chat.prompt_ids(question.messages) for question in questions]
    requests = [
        Request(question.id, prompt, SAMPLING, sample_seed(0, 0, question.id, 0), None)
        for question, prompt in zip(questions, prompts, strict=True)
    ]
    reading, answering = [], []
    for _ in range(TURNS):
        started = time.process_time()
        cast("PromptReader", engine).prompt_states(prompts, LevelSettings())
        between = time.process_time()
        generate(engine, requests)
        reading.append((between - started) / len(prompts))
        answering.append((time.process_time() - between) / len(prompts))
    engine.close()
    return statistics.median(reading), statistics.median(answering)


def _states(pool: CapabilityPool, store: Path) -> PromptStates:
    """Return the hidden states that `fit-probe` and `score-questions` have put beside a store."""
    levels = LevelSettings()
    with PromptModel(ModelSettings("bundled", None, EngineOptions()), pool.fingerprint) as model:
        return states_of(model, pool.questions, levels, feature_folder(model, levels, store=store, given=None))[0]


def _rows(states: PromptStates, rows: Floats) -> PromptStates:
    return PromptStates(states.last_token[rows], states.token_mean[rows])


def _response(entries: Sequence[QuestionSamples], at: int) -> list[QuestionSamples]:
    return [replace(entry, samples=entry.samples[at : at + 1]) for entry in entries]
