"""The command line as a user meets it: help, errors, exit codes, and that a checkpoint does not override the user."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from selfcal_lightning.cli import FUNCTION_VERBS, TRAINER_VERBS, run, usage
from selfcal_lightning.models.folders import config_path


def test_usage_lists_every_verb() -> None:
    for verb in [*TRAINER_VERBS, *FUNCTION_VERBS]:
        assert f"  {verb}" in usage()


def test_no_verb_prints_usage_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "usage: selfcal VERB" in capsys.readouterr().out


def test_unknown_verb_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate"]) == 2
    assert "Expected a verb, but got 'calibrate'" in capsys.readouterr().err


def test_help_and_generate_help_do_not_import_torch() -> None:
    code = (
        "import sys; from selfcal_lightning.cli import run\n"
        "try: run(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for option in ("--devices", "--shard", "--num_samples", "--store_dir"):
        assert option in done.stdout


def test_user_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = run(
        [
            "generate",
            "--model",
            "bundled",
            "--store_dir",
            str(tmp_path / "s"),
            "--task",
            "[no_such_task]",
            "--split",
            "x",
        ]
    )
    error = capsys.readouterr().err
    assert status == 1
    assert error.startswith("selfcal generate: error: Expected")
    assert "no_such_task" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("verb", sorted(FUNCTION_VERBS))
def test_every_function_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run([verb, "--help"])
    assert end.value.code == 0
    assert f"selfcal {verb}" in capsys.readouterr().out


MODULE = "selfcal_lightning.training.self_calibration.SelfCalibrationModule"


@pytest.mark.parametrize("named", [{}, {"_class_path": MODULE}], ids=["plain", "with its class"])
def test_checkpoint_does_not_override_the_user(
    named: dict[str, str], tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would end in an error without the class, and with it train the checkpoint's settings in silence."""
    import torch
    from lightning.pytorch import LightningDataModule, LightningModule

    from selfcal_lightning.commands.lightning_cli import SelfCalibrationCLI

    checkpoint = tmp_path / "old.ckpt"
    torch.save({"hyper_parameters": {"base_model": "another", "omega": 0.1, **named}}, checkpoint)
    monkeypatch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
    cli = SelfCalibrationCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True,
        auto_configure_optimizers=False,
        args=["fit", "--model", MODULE,
              "--model.base_model", tiny_model, "--model.omega", "0.33", "--model.lora.activated", "false",
              "--data", "selfcal_lightning.datamodules.ssc.datamodule.SSCDataModule",
              "--data.store_dir", str(tmp_path / "s"),
              "--trainer.accelerator", "cpu", "--ckpt_path", str(checkpoint)],
    )  # fmt: skip
    assert cli.model.omega == pytest.approx(0.33)
    assert cli.model.base_model == tiny_model


def options_of_function(verb: str) -> list[str]:
    room, name, _ = FUNCTION_VERBS[verb]
    function = getattr(importlib.import_module(f"selfcal_lightning.commands.{room}"), name)
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("verb", sorted(FUNCTION_VERBS))
def test_a_part_of_an_options_name_is_refused_with_the_whole_one(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A part of one option may be that of another in the next version, and then do something else."""
    whole = max(options_of_function(verb), key=len)
    with pytest.raises(SystemExit) as end:
        run([verb, f"--{whole[:-1]}", "x"])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert f"but got `--{whole[:-1]}`. Did you mean `--{whole}`?" in error


@pytest.mark.parametrize("verb", sorted(TRAINER_VERBS))
def test_a_part_of_a_trainer_option_is_refused(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run([verb, "--config", config_path("demo.yaml"), "--ckpt", "last"])
    assert end.value.code == 2
    assert "but got `--ckpt`. Did you mean `--ckpt_path`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["answer", "--question", "1+1?"],
        ["generate", "--store_dir", "never", "--task", "word_problems"],
        ["evaluate", "--tests", "[{name: a, task: word_problems}]"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_of_a_model_is_not_the_folder_one_stands_in(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--model", name]) == 1
    assert f"on the hub or 'bundled', but got {name!r}." in capsys.readouterr().err
