"""CapabilityCurve: figures and numbers of a probe's validation questions before and after training."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from support.capability_pools import capability_store, give_states
from support.training_runs import module_of, trainer_with
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from selfcal_lightning.callbacks.calibration_curve import CalibrationCurve, CapabilityCurve
from selfcal_lightning.capability.probe_module import LinearProbeModule
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.datamodules.probe import ProbeDataModule

FIGURES = ("reliability", "scatter")


def fitted(store: Path, folder: Path, callback: CapabilityCurve) -> Trainer:
    logger = TensorBoardLogger(str(folder), name="logs", version=0)
    trainer = trainer_with(callback, logger=logger, log_every_n_steps=1, max_epochs=4, check_val_every_n_epoch=4)
    data = ProbeDataModule("bundled", str(store), validation_split="calibration")
    trainer.fit(LinearProbeModule("bundled", lr=0.05), datamodule=data)
    return trainer


def test_before_and_after(tmp_path: Path) -> None:
    store = capability_store(tmp_path / "store")
    give_states(store)
    callback = CapabilityCurve()
    trainer = fitted(store, tmp_path, callback)
    found = EventAccumulator(str(tmp_path / "logs" / "version_0"), size_guidance={"images": 0, "scalars": 0}).Reload()
    wanted = {f"capability_curve/{stage}/validation/{name}" for stage in ("before", "val") for name in FIGURES}
    assert set(found.Tags()["images"]) == wanted
    pngs = {path.name for path in (Path(trainer.log_dir) / "figures").iterdir()}
    assert pngs == {f"{stage}-validation-{name}.png" for stage in ("before", "val") for name in FIGURES}
    before, after = found.Scalars("val/capability/Spearman")  # in one chart
    assert (before.step, after.step) == (0, 7)
    assert after.value > before.value
    assert {"val/loss", "val/target/MSE", "train/loss"} <= set(found.Tags()["scalars"])
    again = CapabilityCurve()
    again.load_state_dict(callback.state_dict())
    assert len(again._before["validation"][0]) == 24
    unjudged = capability_store(tmp_path / "unjudged", judged=False)
    give_states(unjudged)
    alone = fitted(unjudged, tmp_path / "alone", CapabilityCurve())
    assert not (Path(alone.log_dir) / "figures").exists(), "without verdicts nothing is drawn"
    assert "val/target/MSE" in alone.callback_metrics
    assert not [name for name in alone.callback_metrics if "capability" in name]


def test_a_module_of_another_kind_is_refused(shallow_model: str, tmp_path: Path) -> None:
    trainer = trainer_with()
    with pytest.raises(InputError, match="`val_metrics` are CapabilityMetrics, but got Calib"):
        CapabilityCurve().setup(trainer, module_of(shallow_model), "fit")
    with pytest.raises(InputError, match="`val_metrics` are CalibrationMetrics, but got CapabilityMetrics of Lin"):
        CalibrationCurve().setup(trainer, LinearProbeModule("bundled"), "fit")
    with pytest.raises(InputError, match="`num_bins` to be at least 1"):
        CapabilityCurve(num_bins=0)
