"""The guard at a rate that wrecks the policy: when it stops, and what it gives back."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _adapt_methods import ADAPTER, METHODS, PLAIN

from selfcal_lightning.adaptation import runs as fitting
from selfcal_lightning.adaptation.runs import QuestionSlice
from selfcal_lightning.commands.two_stages import write_settings
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import read_adapter_state
from selfcal_lightning.training.rounds import adapter_folder

# Of an adapter; weights all of which were tuned collapsed at 1e-3.
WRECKING_RATE, MOST_ROUNDS = 3e-2, 3


@dataclass(frozen=True)
class Guarded:
    """How a run ended."""

    rounds: int | None
    problems: tuple[str, ...]
    is_restored: bool


def run_guarded(folder: Path, start: Path, samples: Path, *, questions: QuestionSlice, sizes: dict[str, Any]) -> None:
    """Adapt at the wrecking rate under the guard with its own limits, as far as that was not done."""
    if read_manifest(folder / fitting.ADAPTER) is not None:
        return
    if not (folder / fitting.SAMPLES).exists():
        shutil.copytree(samples, folder / fitting.SAMPLES)
    reward, target = METHODS[PLAIN]
    one = fitting.Adaptation(
        str(start), None, questions, reward, target, None, None, rounds=MOST_ROUNDS, lr=WRECKING_RATE, **sizes
    )
    options = {"model": {"lora": ADAPTER}, "data": {"max_length": 320}, "trainer": {"accelerator": "cpu"}}
    settings = fitting.fit_settings(one, folder, engine=EngineSettings(max_batch=512), guard={}, options=options)
    write_settings(folder / "config.yaml", settings)
    if status := run_step(["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", "last"]):
        raise RunError(f"Expected the run under the guard to end by itself, but it ended with status {status}.")


def read_guarded(folder: Path) -> Guarded | None:
    """Return how a run ended; None where there was none."""
    if read_manifest(folder / fitting.ADAPTER) is None:
        return None
    seen = json.loads((folder / fitting.GUARD_FILE).read_text())
    stops = sorted(int(number) for number, row in seen.items() if row["problems"])
    if not stops:
        return Guarded(None, (), is_restored=False)
    left, round = read_adapter_state(folder / fitting.ADAPTER), stops[0] - 1
    if round == 0:
        is_restored = not any(value.any() for name, value in left.items() if "lora_B" in name)
    else:
        good = read_adapter_state(adapter_folder(str(folder / fitting.SAMPLES), round))
        is_restored = all(value.equal(good[name]) for name, value in left.items())
    return Guarded(stops[0], tuple(seen[str(stops[0])]["problems"]), is_restored)
