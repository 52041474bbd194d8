"""The stages of making the bundled model, each kept on disk once it is done, so that a run that broke off can go on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bundled_model_data import Schedule
from bundled_model_verification import Lesson
from transformers import LlamaForCausalLM

RECORD = "stage.json"


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    settings: Schedule | Lesson
    run: Callable[[LlamaForCausalLM], LlamaForCausalLM]


@dataclass(frozen=True, slots=True)
class StageRecord:
    name: str
    seed: int
    settings: dict[str, Any]
    minutes: float
    processor_minutes: float
    taken_over: bool = False


def run_stages(
    stages: Sequence[Stage], model: LlamaForCausalLM, *, folder: Path, seed: int, resume: bool
) -> tuple[LlamaForCausalLM, list[StageRecord]]:
    """Run ``stages`` in turn, each on the model of the one before, and keep their float32 weights in ``folder``."""
    records: list[StageRecord] = []
    for stage in stages:
        kept = load_record(folder / stage.name) if resume else None
        resume = kept is not None and (kept.seed, kept.settings) == (seed, asdict(stage.settings))
        if kept is not None and resume:
            print(f"{stage.name}: taken over from {folder / stage.name}", flush=True)
            model = LlamaForCausalLM.from_pretrained(folder / stage.name, dtype=torch.float32, use_safetensors=True)
            records.append(replace(kept, taken_over=True))
            continue
        started, processor_started = time.perf_counter(), time.process_time()
        model = stage.run(model)
        minutes = (time.perf_counter() - started) / 60
        processor_minutes = (time.process_time() - processor_started) / 60
        records.append(
            StageRecord(stage.name, seed, asdict(stage.settings), round(minutes, 1), round(processor_minutes, 1))
        )
        keep_stage(folder / stage.name, model, records[-1])
    return model, records


def keep_stage(folder: Path, model: LlamaForCausalLM, record: StageRecord) -> None:
    """Write the weights, and the record last: a folder without it is not finished."""
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=2) + "\n")


def load_record(folder: Path) -> StageRecord | None:
    """Return the record of a finished stage, None where there is none."""
    path = folder / RECORD
    return StageRecord(**json.loads(path.read_text())) if path.exists() else None
