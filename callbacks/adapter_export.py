"""Write what was learned as a folder: the adapter, its tokenizer, and a manifest that says what it is."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from selfcal_lightning.metrics.collection import KEYS
from selfcal_lightning.modules.model_parallel import gather_trained, is_sharded
from selfcal_lightning.modules.self_calibration import SelfCalibrationModule
from selfcal_lightning.pipelines.export import check_output, read_manifest, write_export
from selfcal_lightning.pipelines.progress import say
from selfcal_lightning.store import SampleStore


class AdapterExport(Callback):
    """Writes the adapter (all weights without one), the tokenizer and ``selfcal_manifest.json``.

    Args:
        output_dir: Where the weights at the end of training go; an older export there is replaced in one step.
            None is ``adapter`` in the trainer's log folder.
        monitor: A value of ``CalibrationMetrics``, such as "val/calibration/ECE" or, of one task,
            "val/gsm8k/calibration/ECE"; after every validation that betters it, the weights go to
            ``<output_dir>-best``. None exports at the end only.
        mode: Whether lower ("min") or higher ("max") is better.
    """

    def __init__(
        self, output_dir: str | None = None, *, monitor: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> None:
        if mode not in {"min", "max"}:
            raise ValueError(f'Expected `mode` to be "min" or "max", but got {mode!r}.')
        if monitor is not None and not (
            monitor.startswith("val/") and monitor.endswith(tuple(f"/{key}" for key in KEYS))
        ):
            raise ValueError(
                f'Expected `monitor` to be "val/" and one of {", ".join(KEYS)}, but got {monitor!r}. The name of a '
                "task may stand between them."
            )
        self.output_dir, self.monitor, self.mode = output_dir, monitor, mode
        self.best: float | None = None
        self.run: str | None = None
        self._folder, self._best_folder = Path(), Path()

    def setup(self, trainer: Trainer, pl_module: SelfCalibrationModule, stage: str) -> None:
        """Settle the folder while all processes are here, and refuse before training what would be lost after it."""
        log_dir = trainer.log_dir  # agreed on by a broadcast
        default = Path(log_dir or trainer.default_root_dir) / "adapter"
        self._folder = default if self.output_dir is None else Path(self.output_dir)
        self._best_folder = self._folder.with_name(f"{self._folder.name}-best")
        if stage == TrainerFn.FITTING:
            check_output(self._folder, overwrite=True)
            if self.monitor is not None:
                check_output(self._best_folder, overwrite=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far and the run's name, so that a resumed run does not replace a better export."""
        return {"best": self.best, "run": self.run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the best value of the run that is resumed."""
        self.best, self.run = state_dict["best"], state_dict.get("run")

    def on_train_start(self, trainer: Trainer, pl_module: SelfCalibrationModule) -> None:
        """Name the run; one that goes on takes up the best value of its folder, which its checkpoint may not know."""
        if self.run is None:
            self.run = trainer.strategy.broadcast(uuid.uuid4().hex)
            return
        if self.monitor is None:
            return
        manifest = read_manifest(self._best_folder) or {}
        mine = manifest.get("run") == self.run  # not of an earlier training
        kept = trainer.strategy.broadcast(manifest["metrics"].get(self.monitor) if mine else None)
        best = [value for value in (self.best, kept) if value is not None]
        self.best = (min if self.mode == "min" else max)(best, default=None)

    def on_validation_end(self, trainer: Trainer, pl_module: SelfCalibrationModule) -> None:
        """Export when the monitored value is the best so far."""
        if self.monitor is None or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        if self.monitor not in trainer.callback_metrics:
            known = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
            raise ValueError(f"Expected `monitor` to be one of the logged values {known}, but got {self.monitor!r}.")
        value = trainer.callback_metrics[self.monitor].item()
        sign = 1.0 if self.mode == "min" else -1.0
        # A value that is not defined (nan) is never the best.
        if not math.isnan(value) and (self.best is None or sign * value < sign * self.best):
            self.best = value
            self._export(trainer, pl_module, self._best_folder)

    def on_fit_end(self, trainer: Trainer, pl_module: SelfCalibrationModule) -> None:
        """Export the weights at the end of training."""
        self._export(trainer, pl_module, self._folder)

    def _export(self, trainer: Trainer, module: SelfCalibrationModule, folder: Path) -> None:
        # Where the weights are cut over processes, all of them give their part before the first one writes.
        state = gather_trained(module.model) if is_sharded(module.model) else None
        if not trainer.is_global_zero:
            return
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        store_dir = getattr(trainer.datamodule, "store_dir", None)
        store = None if store_dir is None else describe_store(store_dir)
        write_export(module, folder, store=store, metrics=metrics, run=self.run, state=state)
        say(f"AdapterExport: wrote the {'model' if module.lora is None else 'adapter'} to {folder}")


def describe_store(store_dir: str) -> dict[str, Any]:
    """Return the folder of a sample store and the digest of what every round of it was sampled with."""
    rounds = SampleStore(store_dir).manifest.rounds
    return {"path": store_dir, "digests": {str(number): record.digest for number, record in rounds.items()}}
