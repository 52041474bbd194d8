import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from support.capability_pools import capability_store, give_states
from support.processes import run_command
from support.training_runs import Record, data_module, generation, module_of, trainer_with
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from selfcal_lightning.callbacks.calibration_curve import CalibrationCurve, CapabilityCurve
from selfcal_lightning.capability.probe_module import LinearProbeModule
from selfcal_lightning.datamodules.probe import ProbeDataModule
from selfcal_lightning.models.folders import config_path
from selfcal_lightning.training.metrics import CalibrationPoints

FIGURES = ("reliability", "roc", "distribution")
SHALLOW = True


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "logs" / "version_0"), size_guidance={"images": 0, "scalars": 0})
    return accumulator.Reload()


def run(tiny_model: str, store: Path, folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    logger = TensorBoardLogger(str(folder), name="logs", version=0)
    trainer = trainer_with(*callbacks, logger=logger, log_every_n_steps=1, **settings)
    trainer.fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
    return trainer


def check_figures(trainer: Trainer, found: EventAccumulator, tag: str, pool: str, figures: tuple[str, ...]) -> None:
    names = [f"{stage}/{pool}/{name}" for stage in ("before", "val") for name in figures]
    assert set(found.Tags()["images"]) == {f"{tag}/{name}" for name in names}
    pngs = {path.name for path in (Path(trainer.log_dir) / "figures").iterdir()}
    assert pngs == {f"{name.replace('/', '-')}.png" for name in names}


def test_before_and_after(tiny_model: str, store: Path, tmp_path: Path) -> None:
    callback = CalibrationCurve()
    trainer = run(tiny_model, store, tmp_path, callback)
    found = events(tmp_path)
    check_figures(trainer, found, "calibration_curve", "word_problems", FIGURES)
    before, after = found.Scalars("val/calibration/Brier")  # in one chart
    assert (before.step, after.step) == (0, 3)
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith("calibration_curve")]
    assert after.value != pytest.approx(before.value)
    (fresh,) = trainer_with().validate(module_of(tiny_model), datamodule=data_module(tiny_model, store), verbose=False)
    assert before.value == pytest.approx(fresh["val/calibration/Brier"], abs=1e-6)


@pytest.mark.parametrize("before", [None, (np.array([0.4, 0.6]), np.array([1.0, 0.0]))])
def test_a_curve_is_called_before_only_where_it_is_that(before: Any) -> None:
    figures = CalibrationCurve(before=before is not None).figures("gsm8k", (np.array([0.1, 0.9]), np.arange(2)), before)
    labels = [text.get_text() for text in figures["roc"].axes[0].get_legend().get_texts()]
    assert [label.split(":")[0] for label in labels] == (["before", "after"] if before else ["confidence"])


@pytest.mark.slow
def test_the_last_weights_are_scored_when_no_validation_did(tiny_model: str, store: Path, tmp_path: Path) -> None:
    run(tiny_model, store, tmp_path, CalibrationCurve(save_images=False), max_steps=3)
    assert [scalar.step for scalar in events(tmp_path).Scalars("val/calibration/Brier")] == [0, 3]
    assert not (tmp_path / "logs" / "version_0" / "figures").exists()


@pytest.mark.slow
def test_training_goes_on_as_without_it(tiny_model: str, store: Path, tmp_path: Path) -> None:
    drawn, plain = Record(), Record()
    run(tiny_model, store, tmp_path / "a", CalibrationCurve(), drawn)
    run(tiny_model, store, tmp_path / "b", plain)
    assert (drawn.losses, drawn.norms) == (plain.losses, plain.norms)
    assert len(drawn.losses) == 4


@pytest.mark.slow
def test_a_resumed_run_keeps_the_start_that_it_compares_with(tiny_model: str, store: Path, tmp_path: Path) -> None:
    first = CalibrationCurve(save_images=False)
    trainer = run(tiny_model, store, tmp_path / "a", first)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    second = CalibrationCurve(save_images=False)
    logger = TensorBoardLogger(str(tmp_path / "b"), name="logs", version=0)
    trainer_with(second, logger=logger, max_epochs=2).fit(
        module_of(tiny_model), datamodule=data_module(tiny_model, store), ckpt_path=tmp_path / "one.ckpt"
    )
    for mine, theirs in zip(first._before["word_problems"], second._before["word_problems"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not [tag for tag in events(tmp_path / "b").Tags()["images"] if "/before/" in tag]


@pytest.mark.slow
def test_without_validation_questions_nothing_is_drawn(bundled_model: str, tmp_path: Path) -> None:
    """Of another store, since one that holds a validation split is validated on."""
    data = data_module(bundled_model, tmp_path / "store", validation=[])
    trainer = trainer_with(generation(), CalibrationCurve(), default_root_dir=str(tmp_path))
    trainer.fit(module_of(bundled_model), datamodule=data)
    assert trainer.global_step == 4
    assert not (tmp_path / "figures").exists()


def test_unknown_labels_are_left_out_and_several_tasks_also_drawn_together() -> None:
    nan = float("nan")
    confidence, correct = np.array([0.1, nan, 0.3, 0.4]), np.array([1.0, 1.0, nan, 0.0])
    tasks = np.array(["gsm8k", "gsm8k", "svamp", "svamp"])
    points = CalibrationPoints(confidence, correct, np.full(4, nan), np.ones(4), np.arange(4), tasks)
    pools = CalibrationCurve().pools(SimpleNamespace(points=lambda: points))
    found = {task: pool[0].tolist() for task, pool in pools.items()}
    assert found == {"gsm8k": [0.1], "svamp": [0.4], "all": [0.1, 0.4]}


def fitted(store: Path, folder: Path, callback: CapabilityCurve) -> Trainer:
    logger = TensorBoardLogger(str(folder), name="logs", version=0)
    trainer = trainer_with(callback, logger=logger, log_every_n_steps=1, max_epochs=4, check_val_every_n_epoch=4)
    data = ProbeDataModule("bundled", str(store), validation_split="calibration")
    trainer.fit(LinearProbeModule("bundled", lr=0.05), datamodule=data)
    return trainer


@pytest.mark.slow
def test_a_probe_before_and_after(tmp_path: Path) -> None:
    store = capability_store(tmp_path / "store")
    give_states(store)
    callback = CapabilityCurve()
    trainer = fitted(store, tmp_path, callback)
    found = events(tmp_path)
    check_figures(trainer, found, "capability_curve", "validation", ("reliability", "scatter"))
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


# ---- the examples for W&B and MLflow, with the real packages where they are installed

EXAMPLES = Path(__file__).parents[2] / "examples" / "loggers"
SMALL = """
data:
  init_args:
    num_samples: 2
    train: [{task: word_problems, split: train, limit: 8}]
    validation: [{task: word_problems, split: validation, limit: 8}]
"""
# A figure and, where it lies in a file of its own, a metric.
WRITTEN = {
    "wandb": ["runs/demo/wandb/offline-run-*/files/media/images/calibration_curve/val/word_problems/reliability*.png"],
    "mlflow": [
        "runs/demo/mlruns/*/*/artifacts/calibration_curve/val/word_problems/reliability-*.png",
        "runs/demo/mlruns/*/*/metrics/val/calibration/ECE",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_metrics_and_figures_arrive(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"needs {name}, which is no dependency")
    (tmp_path / "small.yaml").write_text(SMALL)
    configs = [config_path("demo.yaml"), str(EXAMPLES / f"{name}.yaml"), "small.yaml"]
    given = [word for file in configs for word in ("--config", file)]
    environment = os.environ | {"MLFLOW_ALLOW_FILE_STORE": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfcal_lightning", "fit", *given]
    run_command(command, cwd=tmp_path, env=environment)
    assert [pattern for pattern in WRITTEN[name] if not list(tmp_path.glob(pattern))] == []
