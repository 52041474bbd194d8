"""Every YAML that ships is found, parsed and instantiated, with a local stand-in for the models."""

from __future__ import annotations

import functools
import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from selfcal_lightning.cli import FUNCTION_VERBS, run_function
from selfcal_lightning.records import SamplingSettings

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
TRAINING = [path for path in CONFIGS if path.parent.name == "train" or path == ROOT / "configs" / "demo.yaml"]
PUBLISHED = {
    "llama-3.1-8b-instruct.yaml": (100_000, 0.7, 1, 0.65, 64),
    "llama-3.1-70b-instruct-qlora.yaml": (100_000, 0.7, 1, 0.65, 64),
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
        "train/llama-3.1-70b-instruct-qlora.yaml",
        "train/llama-3.1-8b-instruct-ddp8.yaml",
        "train/llama-3.1-8b-instruct.yaml",
        "train/qwen2.5-7b-instruct.yaml",
    }
    assert len(TRAINING) == 6


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


def test_samples_made_beforehand_are_those_that_qlora_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands in the comments fill the store with what the settings below them read."""
    path = ROOT / "configs" / "train" / "llama-3.1-70b-instruct-qlora.yaml"
    document = yaml.safe_load(path.read_text())
    model, data = document["model"]["init_args"], document["data"]["init_args"]
    sampling = document["trainer"]["callbacks"][0]["init_args"]
    assert (model["quantization"], model["optimizer"]) == ("nf4", "paged_adamw_8bit")
    lines = [line.removeprefix("#   selfcal ") for line in path.read_text().splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("generate ")]
    assert len(commands) == 3
    made = []
    for verb, *arguments in commands:
        called = _called(verb, arguments, monkeypatch)
        assert (called["model"], called["store_dir"]) == (model["base_model"], data["store_dir"])
        assert (called["engine"], called["engine_args"]) == ("vllm", {"tensor_parallel_size": 4})
        drawn = {name: called[name] for name in ("temperature", "edt_scale", "edt_theta", "max_new_tokens")}
        assert drawn == {name: sampling[name] for name in drawn}
        assert (called["num_samples"], called["top_p"], called["seed"]) == (data["num_samples"], 1.0, 0)
        made += [(task, called["split"], called["limit"]) for task in called["task"]]
    wanted = [(source["task"], source["split"], source["limit"]) for source in [*data["train"], *data["validation"]]]
    assert sorted(made) == sorted(wanted)


@pytest.mark.parametrize("path", [p for p in CONFIGS if p not in TRAINING], ids=lambda path: path.name)
def test_function_config_parses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _called(_command(path)[0], ["--config", str(path)], monkeypatch)


def _called(verb: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the command line calls the function of a verb with."""
    room, name, _ = FUNCTION_VERBS[verb]
    module = importlib.import_module(f"selfcal_lightning.pipelines.{room}")
    called: dict[str, Any] = {}
    real = getattr(module, name)

    @functools.wraps(real)
    def record(**kwargs: Any) -> None:
        called.update(kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, record)
        run_function(verb, arguments)
    return called
