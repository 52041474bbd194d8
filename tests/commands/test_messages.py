"""What a command says while it runs: how far it is, whom it waits for, what it scores; nothing of other packages."""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from support.options import nested
from support.ssc_pools import Pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.core import progress
from selfcal_lightning.data.store.parts import PartLock
from selfcal_lightning.models.folders import config_path


def write_pool(path: Path, questions: int = 3) -> str:
    line = {"task": "gsm8k", "split": "calibration", "question": "?", "reference": "7"}
    rows = [
        {**line, "id": f"q{number}", "responses": [{"text": f"It is {answer}.", "confidence": {"p_true": 0.5}}
                                                   for answer in (7, 8)]}
        for number in range(questions)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_reading_a_pool_shows_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    pool = write_pool(tmp_path / "pool.jsonl")
    assert run(["import-pool", "--path", pool, "--store_dir", str(tmp_path / "store")]) == 0
    lines = capsys.readouterr().err.splitlines()
    for number in (2, 4, 6):
        assert any(line.startswith(f"Importing pool.jsonl: {number} of 6 responses") for line in lines), lines
    arguments = ["--pool", pool, "--output", str(tmp_path / "fitted.json"), "--kind", "platt"]
    assert run(["fit-confidence", *arguments]) in (0, 1)
    assert "Reading pool.jsonl: 6 of 6 responses" in capsys.readouterr().err


def _hold(lock: str, folder: Path) -> None:
    held = PartLock(Path(lock))
    held.acquire()
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
        with caplog.at_level(logging.WARNING), pytest.raises(RuntimeError, match="to have one writer") as refusal:
            PartLock(part, wait_seconds=0.3).acquire()
    finally:
        (tmp_path / "enough").write_text("")
        other.join(timeout=120)
        other.kill()
    waiting = [record.getMessage() for record in caplog.records]
    assert len(waiting) == 1, "said once, not at every look"
    assert f"process {other.pid} on " in waiting[0]
    assert str(part) in waiting[0]
    assert f"process {other.pid} on " in str(refusal.value)
    PartLock(part, wait_seconds=0.0).acquire()  # and nothing is left of it


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_an_adapter_that_was_never_trained_is_not_scored_in_silence(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    samples = "[{task: word_problems, split: test_id, limit: 5}]"
    arguments = [
        "--config",
        config_path("demo.yaml"),
        "--data.store_dir",
        pool.write(f"scored-{verb}"),
        "--data.num_samples",
    ]
    arguments += ["8", "--trainer.logger", "false", "--data.test", samples]
    scored = functools.wraps(getattr(Trainer, verb))(lambda *_, **__: [{}])  # its options are those of the verb
    monkeypatch.setattr(Trainer, verb, scored)
    assert run([verb, *arguments]) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert f"No checkpoint is loaded: `selfcal {verb}` scores the base model, with an adapter that was never" in shown
    assert "`--ckpt_path FILE.ckpt`" in shown


def test_one_process_alone_says_nothing_of_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"model": "bundled", "task": "word_problems", "num_samples": 2, "max_new_tokens": 8, "limit": 2}
    run_generate(**nested(**settings, store_dir=str(tmp_path / "store"), edt_scale=None))
    shown = capsys.readouterr().err
    assert "Joined" not in shown
    assert "share" not in shown


def test_a_pool_without_such_questions_says_which_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = write_pool(tmp_path / "pool.jsonl")
    arguments = ["--pool", pool, "--output", str(tmp_path / "t.json"), "--budget", "1"]
    assert run(["fit-threshold", *arguments, "--split", "calibratoin"]) == 1
    assert "It holds the split calibration and the task gsm8k." in capsys.readouterr().err


def test_an_evaluation_without_a_pool_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", "--pools", "{}", "--output_dir", str(tmp_path / "out")]) == 1
    assert "Expected `pools` to name at least one" in capsys.readouterr().err


def test_pools_of_different_questions_are_answered_with_who_lacks_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, fewer = write_pool(tmp_path / "more.jsonl", 4), write_pool(tmp_path / "fewer.jsonl", 3)
    assert run(["evaluate", "--pools", f"{{a: {more}, b: {fewer}}}", "--output_dir", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert "to answer the same questions, but got 1 that only one of 'a' and 'b' has, such as 'q3'" in shown
    assert "'b' lacks" in shown


def test_a_failed_search_writes_no_file_and_names_options_that_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six questions cannot prove an error rate of one per cent."""
    pool, output = write_pool(tmp_path / "pool.jsonl", 6), tmp_path / "threshold.json"
    assert run(["fit-threshold", "--pool", pool, "--output", str(output), "--risk", "0.01", "--use_all", "true"]) == 1
    shown = capsys.readouterr().err
    assert not output.exists()
    with pytest.raises(SystemExit):
        run(["fit-threshold", "--help"])
    options = capsys.readouterr().out
    named = [word for word in ("risk", "delta", "grid", "use_all", "confidence") if f"`{word}`" in shown]
    assert named
    assert all(f"--{word}" in options for word in named)


@pytest.mark.slow
def test_nothing_of_other_packages_is_said_at_the_start(tmp_path: Path) -> None:
    """Where bitsandbytes is installed, it advises at each import to install yet another package."""
    arguments = ["validate", "--config", config_path("demo.yaml"), "--check"]
    done = subprocess.run(
        [sys.executable, "-m", "selfcal_lightning", *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for foreign in ("kernels", "bitsandbytes", "Warning", "litlogger", "TPU available"):
        assert foreign not in done.stderr
