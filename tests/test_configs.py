"""Every YAML that ships is found, parsed and instantiated, with a local stand-in for the models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from selfcal_lightning.cli import FUNCTION_VERBS
from selfcal_lightning.records import SamplingSettings

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
TRAINING = [path for path in CONFIGS if path.parent.name == "train" or path == ROOT / "configs" / "demo.yaml"]
PUBLISHED = {
    "llama-3.1-8b-instruct.yaml": (100_000, 0.7, 1, 0.65, 64),
    "llama-3.1-8b-instruct-ddp8.yaml": (100_000, 0.7, 1, 0.65, 64),
    "qwen2.5-7b-instruct.yaml": (200_000, 0.8, 1, 0.45, 64),
    "deepseek-r1-distill-qwen-1.5b.yaml": (200_000, 0.8, 2, 0.40, 64),
}


def _command(path: Path) -> list[str]:
    """Return the words of the command that a file's first line names."""
    first = path.read_text().splitlines()[0]
    assert first.startswith("# selfcal "), f"{path} must begin with the command that runs it"
    return first.removeprefix("# selfcal ").split()


def test_all_configs_are_found() -> None:
    assert {path.relative_to(ROOT / "configs").as_posix() for path in CONFIGS} == {
        "demo.yaml",
        "evaluate/demo.yaml",
        "train/deepseek-r1-distill-qwen-1.5b.yaml",
        "train/llama-3.1-8b-instruct-ddp8.yaml",
        "train/llama-3.1-8b-instruct.yaml",
        "train/qwen2.5-7b-instruct.yaml",
    }
    assert len(TRAINING) == 5


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_first_line_is_the_command_that_runs_it(path: Path) -> None:
    verb, flag, name = _command(path)
    assert flag == "--config"
    assert ROOT / name == path
    assert verb == "fit" or verb in FUNCTION_VERBS


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.name)
def test_training_config_instantiates(
    path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from lightning.pytorch import LightningDataModule, LightningModule

    from selfcal_lightning.callbacks.generation import SSCGeneration
    from selfcal_lightning.datamodules.ssc import SSCDataModule
    from selfcal_lightning.lightning_cli import SelfCalibrationCLI
    from selfcal_lightning.models.lora import LoraSettings
    from selfcal_lightning.modules.self_calibration import SelfCalibrationModule

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
    cli = SelfCalibrationCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True,
        auto_configure_optimizers=False,
        args=["fit", "--config", str(path), "--model.init_args.base_model", tiny_model, "--trainer.accelerator", "cpu",
              "--trainer.precision", "32-true"],
    )  # fmt: skip
    assert isinstance(cli.model, SelfCalibrationModule)
    assert isinstance(cli.datamodule, SSCDataModule)
    assert cli.model.base_model == tiny_model
    names = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert {"SSCGeneration", "CalibrationCurve", "AdapterExport"} <= set(names)
    if path.name in PUBLISHED:
        total, ratio, epochs, shares, rows = PUBLISHED[path.name]
        document: dict[str, Any] = yaml.safe_load(path.read_text())
        data, trainer = document["data"]["init_args"], document["trainer"]
        assert (data["total_tuples"], data["generation_ratio"], trainer["max_epochs"]) == (total, ratio, epochs)
        assert sum(source["share"] for source in data["train"]) == pytest.approx(shares)
        assert trainer["accumulate_grad_batches"] * trainer["devices"] * data["batch_size"] == rows
        model, sampling = cli.model, next(c for c in cli.trainer.callbacks if isinstance(c, SSCGeneration)).sampling
        assert model.lora == LoraSettings(r=32, alpha=16, dropout=0.05, target_modules=("q_proj", "v_proj"))
        assert (model.lr, model.weight_decay, model.warmup_steps) == (5e-5, 0.01, 0)
        assert (model.omega, model.beta, model.loss) == (0.1, 0.25, "smooth_l1")
        assert sampling == SamplingSettings(0.8, 0.8, 1.0, 1.0, 1024)
        assert (cli.datamodule.num_samples, cli.datamodule.eta, cli.datamodule.max_length) == (32, 0.75, 1024)
        assert not {source["split"] for source in data["train"]} - {"train"}


@pytest.mark.parametrize("path", [p for p in CONFIGS if p not in TRAINING], ids=lambda path: path.name)
def test_function_config_parses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from selfcal_lightning.cli import run_function

    verb = _command(path)[0]
    room, name, _ = FUNCTION_VERBS[verb]
    module = importlib.import_module(f"selfcal_lightning.pipelines.{room}")
    called: dict[str, Any] = {}
    real = getattr(module, name)

    import functools

    @functools.wraps(real)
    def record(*args: Any, **kwargs: Any) -> None:
        called.update(kwargs, args=args)

    monkeypatch.setattr(module, name, record)
    run_function(verb, ["--config", str(path)])
    assert called
