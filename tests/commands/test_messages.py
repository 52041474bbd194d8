import functools
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rich.console
from lightning.pytorch import Trainer
from support.command_lines import Refused
from support.number_pools import write_pool
from support.options import nested
from support.ssc_pools import Pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.lightning_cli import OneLineProgressBar
from selfcal_lightning.core import progress
from selfcal_lightning.core.progress import Progress, Stage, counted
from selfcal_lightning.data.store.parts import PartLock
from selfcal_lightning.models.folders import config_path


def test_imports_tell_progress(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    pool = write_pool(tmp_path / "pool.jsonl", questions=3, samples=2)
    assert run(["import-pool", "--path", pool, "--store_dir", str(tmp_path / "store")]) == 0
    lines = capsys.readouterr().err.splitlines()
    for number in (2, 4, 6):
        assert any(line.startswith(f"Importing pool.jsonl: {number} of 6 responses") for line in lines), lines


def _hold(lock: str, folder: Path) -> None:
    PartLock(Path(lock)).acquire()
    (folder / "held").write_text(str(os.getpid()))
    while not (folder / "enough").exists():
        time.sleep(0.02)


def test_who_waits_for_a_store_says_for_whom(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = tmp_path / "part"
    part.mkdir()
    other = multiprocessing.get_context("fork").Process(target=_hold, args=(str(part), tmp_path))
    other.start()
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.02)
        with pytest.raises(RuntimeError, match=f"process {other.pid} on "):
            PartLock(part, wait_seconds=0.3).acquire()
    finally:
        (tmp_path / "enough").write_text("")
        other.join(timeout=120)
        other.kill()
    (waiting,) = [record.getMessage() for record in caplog.records]  # said once, not at every look
    assert f"process {other.pid} on " in waiting
    assert str(part) in waiting
    PartLock(part, wait_seconds=0.0).acquire()  # and nothing is left of it


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


def test_one_process_alone_says_nothing_of_shares(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    settings = {"model": "bundled", "task": "word_problems", "num_samples": 2, "max_new_tokens": 8, "limit": 2}
    run_generate(**nested(**settings, store_dir=str(tmp_path / "store"), edt_scale=None))
    shown = capsys.readouterr().err
    assert "Joined" not in shown
    assert "share" not in shown


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["fit-threshold", "--pool", "4.jsonl", "--output", "t.json", "--budget", "1", "--split", "calibratoin"],
            ["the split calibration and the task gsm8k"],
        ),
        (["evaluate", "--pools", "{}", "--output_dir", "out"], ["`pools`"]),
        (
            ["evaluate", "--pools", "{a: 4.jsonl, b: 3.jsonl}", "--output_dir", "out"],
            ["1 that only one of 'a' and 'b' has, such as 'q3'", "'b' lacks"],
        ),
        # Few questions cannot prove an error rate of one per cent.
        (
            ["fit-threshold", "--pool", "4.jsonl", "--output", "t.json", "--risk", "0.01", "--use_all", "true"],
            ["`risk`"],
        ),
    ],
)
def test_a_refused_pool_is_told_and_nothing_written(command: list, words: list, here: Path, refused: Refused) -> None:
    for questions in (3, 4):
        write_pool(here / f"{questions}.jsonl", questions=questions)
    shown = refused(command)
    assert all(word in shown for word in words), shown
    assert not Path("t.json").exists()
    assert not Path("out/results.json").exists()


@pytest.mark.slow
def test_nothing_of_other_packages_is_said_at_the_start(tmp_path: Path) -> None:
    """Where bitsandbytes is installed, it advises at each import to install yet another package."""
    command = [sys.executable, "-m", "selfcal_lightning", "validate", "--config", config_path("demo.yaml"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    for foreign in ("kernels", "bitsandbytes", "Warning", "litlogger", "TPU available"):
        assert foreign not in done.stderr


# ---- progress: lines, the training bar, and the time left

METRICS = {"v_num": 0, "cal": 0.084, "gen": 0.0, "conf": 0.561, ">eta": 0.312, "tok/s": 1476.363, "pad": 0.002}


@pytest.mark.parametrize(("width", "kept"), [(80, 1), (100, 3), (200, 6)])
def test_the_numbers_fit_the_terminal(width: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = OneLineProgressBar()
    bar._console = rich.console.Console(width=width)
    parent = "lightning.pytorch.callbacks.RichProgressBar.get_metrics"
    monkeypatch.setattr(parent, lambda *_: dict(METRICS))
    shown = bar.get_metrics(Trainer(accelerator="cpu", logger=False), None)  # type: ignore[arg-type]
    assert list(shown) == list(METRICS)[1 : kept + 1]
    assert 62 + len("".join(f"{name}: {value:.3f} " for name, value in shown.items())) <= width


def test_short_steps_in_a_row_are_not_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    progress.say("begin")
    for number in range(10):  # none of them takes as long as a line is due
        with progress.Stage(f"step {number}"):
            time.sleep(0.1)
    assert "step " in capsys.readouterr().err


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

    def break_once_heard() -> None:
        heard = ""
        while "Joining: 0 s so far" not in heard:
            heard += capsys.readouterr().err
            time.sleep(0.01)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), Stage("Joining"):
        break_once_heard()
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""  # it is over, after an error too


def test_quick_progress_may_leave_no_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with Progress(2, label="Checking", unit="lines", only_if_slow=True) as bar:
        assert list(counted("ab", bar)) == ["a", "b"]
    assert (bar.done, capsys.readouterr().err) == (2, "")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress(2, label="Checking", unit="lines", only_if_slow=True) as bar:
        list(counted("ab", bar))
    assert capsys.readouterr().err.count("Checking: 2 of 2 lines") == 1
