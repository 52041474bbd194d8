"""What a response and a confidence query cost in processor time, on the embedded engine with one thread."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch
from _report_jobs import ACTIVATED, BASE, JOINT, TASK

from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import ConfidenceQuery, Question, Request, SamplingSettings, sample_seed

TURNS = 3
QUESTIONS, SAMPLES = 16, 8
SAMPLING = SamplingSettings(temperature=0.8, edt_scale=0.8, edt_theta=1.0, max_new_tokens=120)


def measured_seconds(output: Path, activated: Path, joint: Path) -> dict[str, tuple[float, float]]:
    """Return what :func:`measure_seconds` measured for these models, now where it has not yet."""
    file = output / "seconds.json"
    if not file.exists():
        file.write_text(json.dumps(measure_seconds(activated, joint)))
    return {name: tuple(pair) for name, pair in json.loads(file.read_text()).items()}


def measure_seconds(activated: Path, joint: Path) -> dict[str, tuple[float, float]]:
    """Return the processor seconds of a response, and those that its confidence query adds, by what is trained.

    Medians over turns, the ways taking turns.
    """
    torch.set_num_threads(1)
    questions = get_task(TASK).load("calibration", limit=QUESTIONS)
    engines = {
        BASE: TransformersEngine("bundled", max_batch=QUESTIONS * SAMPLES),
        ACTIVATED: TransformersEngine("bundled", adapter=str(activated), max_batch=QUESTIONS * SAMPLES),
        JOINT: TransformersEngine(str(joint), max_batch=QUESTIONS * SAMPLES),
    }
    taken: dict[tuple[str, bool], list[float]] = {}
    for _ in range(TURNS):
        for name, engine in engines.items():
            for asks in (False, True):
                query = engine.chat.query if asks else None
                requests = _requests(questions, engine.chat, query)
                started = time.process_time()
                generate(engine, requests)
                taken.setdefault((name, asks), []).append((time.process_time() - started) / len(requests))
    for engine in engines.values():
        engine.close()
    plain = {name: statistics.median(taken[name, False]) for name in engines}
    return {name: (plain[name], max(0.0, statistics.median(taken[name, True]) - plain[name])) for name in engines}


def _requests(questions: list[Question], chat: ChatFormat, query: ConfidenceQuery | None) -> list[Request]:
    return [
        Request(f"{index}/{question.id}", chat.prompt_ids(question.messages), SAMPLING, own_seed, query)
        for question in questions
        for index in range(SAMPLES)
        for own_seed in [sample_seed(0, 0, question.id, index)]
    ]
