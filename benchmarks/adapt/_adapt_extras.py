"""What a group of responses costs as one packed row, against rows of their own."""

from __future__ import annotations

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from _adapt_tables import ADAPTER, METHODS, PLAIN
from lightning.pytorch import Callback, LightningModule, Trainer

from selfcal_lightning.adaptation import runs as fitting
from selfcal_lightning.adaptation.module import TestTimeTrainingModule
from selfcal_lightning.adaptation.runs import QuestionSlice
from selfcal_lightning.commands.two_stages import write_settings
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.files import json_object_or_none
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.datamodules.ssc.sampler import Packing as Way
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import LoraSettings, read_adapter_state
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


FILE, GROUPS, REPEATS = "packing.json", 5, 3


@dataclass(frozen=True)
class Packing:
    """Costs of the same responses, packed and apart."""

    packed_tokens: float
    apart_tokens: float
    packed_seconds: float
    apart_seconds: float

    @property
    def speed_up(self) -> float:
        """How many times as many responses a CPU second takes when groups are packed."""
        return self.apart_seconds / self.packed_seconds


class Clock(Callback):
    """Counts positions, rows and CPU seconds of forward and backward passes.

    Rows that fill up a micro-batch and teach nothing are counted as they are computed: they are no part of the cost of
    a response.
    """

    def __init__(self) -> None:
        self.positions = self.responses = 0
        self.seconds = self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start."""
        self.positions += batch.input_ids.numel()
        self.responses += len(batch.target)
        self._started = time.process_time()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop, before the optimiser."""
        self.seconds += time.process_time() - self._started


def measure_packing(folder: Path, model: Path, store: Path, samples: int) -> None:
    """Measure as far as that was not done; the two ways take turns."""
    if (folder / FILE).exists():
        return
    clocks: dict[Way, list[Clock]] = {"shared_prefix": [], "off": []}
    for _ in range(REPEATS):
        for way, found in clocks.items():
            found.append(_pass(str(model), str(store), samples, way))
    tokens = {way: found[0].positions / found[0].responses for way, found in clocks.items()}
    seconds = {way: min(clock.seconds / clock.responses for clock in found) for way, found in clocks.items()}
    figures = Packing(tokens["shared_prefix"], tokens["off"], seconds["shared_prefix"], seconds["off"])
    (folder / FILE).write_text(json.dumps(asdict(figures)))


def read_packing(folder: Path) -> Packing | None:
    """Return what was measured; None where nothing was."""
    path = folder / FILE
    found = json_object_or_none(path) if path.is_file() else None
    return None if found is None else Packing(**found)


def _pass(model: str, store: str, samples: int, packing: Way) -> Clock:
    """Train for one step on all groups of a store that teach."""
    clock, reward = Clock(), METHODS[PLAIN][0]
    lora = LoraSettings(**{**ADAPTER, "target_modules": tuple(ADAPTER["target_modules"])})
    module = TestTimeTrainingModule(model, lora=lora, reward=reward)
    data = RolloutDataModule(
        model, store, num_samples=samples, reward=reward, batch_size=GROUPS * samples, max_length=320, packing=packing
    )
    # One optimiser step: the model that is updated sampled the round, and nothing is computed but what is learnt from.
    micro_steps = math.ceil(len(SampleStore(store).index(split="train", round=0)) / (GROUPS * samples))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=micro_steps, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, num_sanity_val_steps=0, use_distributed_sampler=False, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return clock
