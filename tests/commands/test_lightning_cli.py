import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from support.command_lines import Refused, exit_status

from selfcal_lightning.cli import run
from selfcal_lightning.commands.lightning_cli import LIGHTNING_LOGGER, silence_lightning, untrained_folders_removed
from selfcal_lightning.commands.trainer_start import DATA_MODULE, MODULE
from selfcal_lightning.models.folders import base_model_identity


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.folder),)


def validate(tiny_model: str, checkpoint: Path) -> list[str]:
    folder = checkpoint.parent
    return [
        "validate", "--trainer.accelerator", "cpu", "--trainer.use_distributed_sampler", "false",
        "--trainer.logger", "false", "--trainer.default_root_dir", str(folder),
        "--model", MODULE, "--model.base_model", tiny_model,
        "--data", DATA_MODULE, "--data.store_dir", str(folder / "store"),
        "--ckpt_path", str(checkpoint),
    ]  # fmt: skip


def test_a_checkpoint_that_would_run_code_is_refused(tiny_model: str, tmp_path: Path, refused: Refused) -> None:
    torch.save({"state_dict": {}, "callbacks": Evil(tmp_path / "taken")}, tmp_path / "evil.ckpt")
    error = refused(validate(tiny_model, tmp_path / "evil.ckpt"))
    assert not (tmp_path / "taken").exists()
    assert "selfcal validate: error: Not a checkpoint that `selfcal fit` wrote" in error
    assert "Traceback" not in error
    torch.load(tmp_path / "evil.ckpt", weights_only=False)
    assert (tmp_path / "taken").exists(), "the checkpoint of this test is one that runs code"


def test_a_log_folder_loses_only_what_loggers_wrote(tmp_path: Path) -> None:
    """Without name and version, the log folder is that of the run, samples included."""
    run, apart = tmp_path / "run", tmp_path / "apart"
    loggers = [SimpleNamespace(log_dir=str(one), finalize=lambda _: None) for one in (run, apart)]
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    trainer = SimpleNamespace(loggers=loggers, state=state, global_step=0, is_global_zero=True)

    def stopped() -> None:
        (run / "samples").mkdir(parents=True)
        (run / "samples" / "config.yaml").write_text("")
        apart.mkdir()
        for folder in (run, apart):
            for name in ("events.out.tfevents.1", "hparams.yaml", "config.yaml"):
                (folder / name).write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), untrained_folders_removed(trainer):
        stopped()
    assert sorted(tmp_path.rglob("*")) == [run, run / "samples", run / "samples" / "config.yaml"]


def test_a_config_of_the_user_is_never_replaced(tiny_model: str, here: Path) -> None:
    """Without a logger the resolved configuration goes to the folder of the run, where the user's may lie."""
    mine = f"# mine\nmodel: {{class_path: {MODULE}, init_args: {{base_model: {tiny_model}}}}}\n"
    Path("config.yaml").write_text(mine)

    def validate_by(*options: str) -> set[str]:
        command = ["validate", "--config", "config.yaml", "--trainer.logger", "false", "--trainer.accelerator", "cpu"]
        run([*command, "--data", DATA_MODULE, "--data.store_dir", "absent", *options])
        return {path.name for path in here.glob("*.yaml")}

    assert validate_by() == {"config.yaml", "config-2.yaml"}
    assert validate_by() == {"config.yaml", "config-2.yaml"}, "the same settings are not written twice"
    assert validate_by("--model.lr", "0.5") == {"config.yaml", "config-2.yaml", "config-3.yaml"}
    assert Path("config.yaml").read_text() == mine
    assert "lr: 0.5" not in Path("config-2.yaml").read_text()
    assert "lr: 0.5" in Path("config-3.yaml").read_text()


@pytest.mark.parametrize("content", [b"", b"no checkpoint"])
def test_what_is_no_checkpoint_is_refused(tiny_model: str, tmp_path: Path, content: bytes, refused: Refused) -> None:
    (tmp_path / "notes.ckpt").write_bytes(content)
    assert "Not a checkpoint that" in refused(validate(tiny_model, tmp_path / "notes.ckpt"))


def test_a_checkpoint_of_another_base_model_is_refused(tiny_model: str, tmp_path: Path, refused: Refused) -> None:
    identity = {**base_model_identity(tiny_model), "model": "meta/other", "weights_sha256": "0" * 64}
    kept = {"state_dict": {}, "base_model_identity": identity, "epoch": 0, "global_step": 0}
    torch.save({**kept, "pytorch-lightning_version": "2.6.6"}, tmp_path / "other.ckpt")
    error = refused(validate(tiny_model, tmp_path / "other.ckpt"))
    assert f"'{tiny_model}'" in error
    assert "'meta/other'" in error


@pytest.mark.parametrize("verb", ["fit", "predict"])
@pytest.mark.parametrize("full", [["--help=full"], ["--help", "all"]], ids=" ".join)
def test_the_full_help_begins_with_what_to_type(verb: str, full: list[str], capsys: pytest.CaptureFixture) -> None:
    assert exit_status([verb, *full]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"usage: selfcal {verb} --config FILE.yaml [--ckpt_path FILE.ckpt]")
    assert f"`selfcal {verb} --model.help {MODULE}`" in text
    assert "default: True" in text.rpartition("--weights_only")[2], "nothing is unpickled unless a user says so"


def test_advertisements_stay_off_the_terminal(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Lightning's own words: the tips of 2.6, and a line that must stay."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    logger = logging.getLogger(LIGHTNING_LOGGER)
    before, logger.filters[:] = list(logger.filters), []
    logger.addHandler(caplog.handler)
    try:
        Trainer(accelerator="cpu", default_root_dir=tmp_path)
        assert "litlogger" in caplog.text, "this version has no advertisement: drop the filter"
        caplog.clear()
        silence_lightning()
        Trainer(accelerator="cpu", default_root_dir=tmp_path)
        rank_zero_info("Epochs continue.")
    finally:
        logger.filters[:] = before
        logger.removeHandler(caplog.handler)
    assert "litlogger" not in caplog.text
    assert "Epochs continue." in caplog.text


@pytest.mark.slow
def test_a_class_of_an_unnamed_package_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("open('imported', 'w')")
    for number, settings in enumerate((
        "trainer: {callbacks: [{class_path: evil.Any}]}", "model: evil.Any", "trainer: {logger: os.system}",
    )):  # fmt: skip
        (tmp_path / f"{number}.yaml").write_text(settings)
    code = """if True:
        from selfcal_lightning.cli import run
        for number in range(3):
            try:
                run(["fit", "--config", f"{number}.yaml"], owns_process=True)
            except SystemExit as end:
                assert end.code == 2
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is not imported") == 3
    assert not (tmp_path / "imported").exists()
