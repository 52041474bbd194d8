import functools
import inspect
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch  # noqa: F401 - its log handler keeps the standard error of the moment it is imported
import pytest
import rich.console
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from support.command_lines import Refused, exit_status
from support.ssc_pools import Pool
from support.store_samples import write_pool

from selfcal_lightning.cli import VERBS, function_of, run
from selfcal_lightning.commands.lightning_cli import OneLineProgressBar, SelfCalibrationCLI, untrained_folders_removed
from selfcal_lightning.commands.trainer_start import DATA_MODULE, MODULE
from selfcal_lightning.core import progress
from selfcal_lightning.core.progress import Stage
from selfcal_lightning.models.folders import base_model_identity, config_path

FUNCTIONS = [name for name, verb in VERBS.items() if verb.module is not None]
TRAINERS = [name for name, verb in VERBS.items() if verb.module is None]


def test_no_verb_and_an_unknown_one(capsys: pytest.CaptureFixture) -> None:
    assert run([]) == 2
    shown = capsys.readouterr().out
    assert all(f"  {verb} " in shown for verb in VERBS)
    assert run(["evalute"]) == 2
    shown = capsys.readouterr().err
    assert "'evalute'" in shown
    assert "Did you mean 'evaluate'?" in shown


def test_the_full_help_of_a_trainer_verb(capsys: pytest.CaptureFixture) -> None:
    for full in (["--help=full"], ["--help", "all"]):
        assert exit_status(["predict", *full]) == 0
        text = capsys.readouterr().out.rpartition("--weights_only")[2]
        assert "default: True" in " ".join(text.split()), "nothing is unpickled unless a user says so"


@pytest.mark.parametrize("verb", FUNCTIONS)
def test_every_function_verb_has_help_and_takes_whole_names_alone(verb: str, capsys: pytest.CaptureFixture) -> None:
    """A part of one option may be that of another in the next version, and then do something else."""
    assert exit_status([verb, "--help"]) == 0
    assert f"selfcal {verb}" in capsys.readouterr().out
    names = inspect.signature(function_of(verb)).parameters
    whole = max((name for name in names if name != "settings"), key=len)
    assert exit_status([verb, f"--{whole[:-1]}", "x"]) == 2
    assert f"--{whole[:-1]}. Did you mean --{whole}?" in capsys.readouterr().err


@pytest.mark.parametrize("verb", TRAINERS)
def test_a_trainer_verb_takes_whole_names_and_needs_settings(verb: str, capsys: pytest.CaptureFixture) -> None:
    assert exit_status([verb, "--config", config_path("demo.yaml"), "--ckpt", "last"]) == 2
    assert "--ckpt. Did you mean --ckpt_path?" in capsys.readouterr().err
    assert run([verb]) == 1
    assert f"`selfcal {verb} --config FILE.yaml`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["answer", "--model", "bundled", "--questoin", "1?"], ["--questoin", "Did you mean --question?"]),
        (["generate", "--model", "bundled"], ["required", "store_dir", "task"]),
        (["answer", "--model", "bundled", "--seed", "many"], ["--seed", "int", "many"]),
        (["answer", "--model", "bundled", "--engine.name", "vlm"], ["--engine.name", "Did you mean 'vllm'?"]),
        (["evaluate", "--tests", "[{nme: a, task: gsm8k}]"], ["TestSet", "'nme'", "'name'"]),
        (["fit", "--config", "CONFIG", "--model.omgea", "1"], ["'omgea'", "Did you mean 'omega'?"]),
        (["fit", "--config", "CONFIG", "--trainr.max_epochs", "1"], ["Did you mean --trainer.max_epochs?"]),
    ],
)
def test_a_wrong_option_is_one_line_and_a_usage(capsys: pytest.CaptureFixture, arguments: list, words: list) -> None:
    status = exit_status([config_path("demo.yaml") if word == "CONFIG" else word for word in arguments])
    lines = [line for line in capsys.readouterr().err.splitlines() if "Loading PyTorch" not in line]
    assert lines[0].startswith(f"selfcal {arguments[0]}: error: ")
    assert all(word in lines[0] for word in words), lines[0]
    assert (status, len(lines)) == (2, 3), "what is wrong, how it is used, where the rest stands"
    assert lines[1].startswith(f"usage: selfcal {arguments[0]}")
    assert len(lines[1]) < 120
    assert f"`selfcal {arguments[0]} --help`" in lines[2]


@pytest.mark.parametrize("named", [{}, {"_class_path": MODULE}], ids=["plain", "with its class"])
def test_users_beat_checkpoints(named: dict, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning would end in an error without the class, and with it train the checkpoint's settings in silence."""
    checkpoint = tmp_path / "old.ckpt"
    torch.save({"hyper_parameters": {"base_model": "another", "omega": 0.1, **named}}, checkpoint)
    monkeypatch.setattr(SelfCalibrationCLI, "_run_subcommand", lambda *_: None)
    cli = SelfCalibrationCLI(
        ["fit", "--model", MODULE, "--model.base_model", tiny_model, "--model.omega", "0.33",
         "--model.lora.activated", "false", "--data", DATA_MODULE, "--data.store_dir", str(tmp_path / "s"),
         "--trainer.accelerator", "cpu", "--ckpt_path", str(checkpoint)]
    )  # fmt: skip
    assert cli.model.omega == pytest.approx(0.33)
    assert cli.model.base_model == tiny_model


def test_an_empty_name_of_a_model_is_not_the_folder_here(refused: Refused) -> None:
    for name in ("", " "):
        error = refused(["generate", "--store_dir", "never", "--task", "word_problems", "--model", name])
        assert f"on the hub or 'bundled', but got {name!r}." in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "gsm8k", "--split", "trian"], "Did you mean 'train'?"),
        (["--task", "word_problems", "--split", "test"], "test_id, test_ood"),
        (["--task", "local_number", "--path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--task", "local_number"], "`path`"),
    ],
)
def test_unknown_splits_and_files_are_refused_at_once(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    for place in ("engines.sampling.running.open_engine", "models.chat_format.load_tokenizer"):
        monkeypatch.setattr(f"selfcal_lightning.{place}", lambda *_, **__: pytest.fail("something was loaded"))
    assert message in refused(["generate", "--model", "bundled", "--store_dir", f"{tmp_path}/store", *options])


# ---- what is said of pools, adapters and progress


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_adapter_that_was_never_trained_is_not_scored_in_silence(
    pool: Pool, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, verb: str
) -> None:
    arguments = ["--config", config_path("demo.yaml"), "--data.store_dir", pool.write(f"scored-{verb}")]
    arguments += ["--data.num_samples", "8", "--trainer.logger", "false"]
    arguments += ["--data.test", "[{task: word_problems, split: test_id, limit: 5}]"]
    scored = functools.wraps(getattr(Trainer, verb))(lambda *_, **__: [{}])  # its options are those of the verb
    monkeypatch.setattr(Trainer, verb, scored)
    assert run([verb, *arguments]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert f"No checkpoint is loaded: `selfcal {verb}` scores the base model" in shown
    assert "`--ckpt_path FILE.ckpt`" in shown


def test_a_refused_pool_is_told_and_nothing_written(here: Path, refused: Refused) -> None:
    for questions in (3, 4):
        write_pool(here / f"{questions}.jsonl", questions=questions)
    fit = ["fit-threshold", "--pool", "4.jsonl", "--output", "t.json"]
    assert "the split calibration and the task gsm8k" in refused([*fit, "--budget", "1", "--split", "calibratoin"])
    assert "`risk`" in refused([*fit, "--risk", "0.01", "--use_all", "true"]), "few questions cannot prove one per cent"
    shown = refused(["evaluate", "--pools", "{a: 4.jsonl, b: 3.jsonl}", "--output_dir", "out"])
    assert "1 that only one of 'a' and 'b' has, such as 'q3'" in shown
    assert not Path("t.json").exists()
    assert not Path("out/results.json").exists()


def test_the_time_left_counts_from_the_first_finished_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty seconds until an engine has filled its batch, then ten a second: the rest takes 90 s, not an hour."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.Progress(1000, label="Sampling", enabled=False) as shown:
        for at, responses, left in ((30.0, 1, None), (31.0, 1, None), (40.0, 98, 900 * 10 / 99), (40.0, 900, 0.0)):
            now[0] = at
            shown.update(responses)
            assert shown.seconds_left() == (None if left is None else pytest.approx(left))
        assert shown.line().endswith("00:00 left")


def test_a_stage_speaks_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with Stage("Quick"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    with suppress(RuntimeError), Stage("Joining"):
        while "Joining: 0 s so far" not in capsys.readouterr().err:
            time.sleep(0.02)
        raise RuntimeError
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # it is over, after an error too


# ---- the verbs of a Trainer: checkpoints, log folders, classes of others


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
    for content in (b"", b"no checkpoint"):
        (tmp_path / "notes.ckpt").write_bytes(content)
        assert "Not a checkpoint that" in refused(validate(tiny_model, tmp_path / "notes.ckpt"))


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


def test_a_checkpoint_of_another_base_model_is_refused(tiny_model: str, tmp_path: Path, refused: Refused) -> None:
    identity = {**base_model_identity(tiny_model), "model": "meta/other", "weights_sha256": "0" * 64}
    kept = {"state_dict": {}, "base_model_identity": identity, "epoch": 0, "global_step": 0}
    torch.save({**kept, "pytorch-lightning_version": "2.6.6"}, tmp_path / "other.ckpt")
    error = refused(validate(tiny_model, tmp_path / "other.ckpt"))
    assert f"'{tiny_model}'" in error
    assert "'meta/other'" in error


@pytest.mark.parametrize(("width", "kept"), [(80, 1), (100, 3), (200, 6)])
def test_the_numbers_fit_the_terminal(width: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {"v_num": 0, "cal": 0.084, "gen": 0.0, "conf": 0.561, ">eta": 0.312, "tok/s": 1476.363, "pad": 0.002}
    bar = OneLineProgressBar()
    bar._console = rich.console.Console(width=width)
    monkeypatch.setattr("lightning.pytorch.callbacks.RichProgressBar.get_metrics", lambda *_: dict(numbers))
    shown = bar.get_metrics(Trainer(accelerator="cpu", logger=False), None)  # type: ignore[arg-type]
    assert list(shown) == list(numbers)[1 : kept + 1]
    assert 62 + len("".join(f"{name}: {value:.3f} " for name, value in shown.items())) <= width


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
