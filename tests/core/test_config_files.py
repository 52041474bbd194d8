"""What a command line names is bounded before it is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from selfcal_lightning.cli import run as selfcal


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert selfcal(arguments) == 1
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", ["evaluate", "generate", "fit"])
def test_yaml_that_grows_without_bound_is_refused(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = [f"a{i}: &a{i} [{', '.join(['x' if i == 0 else f'*a{i - 1}'] * 20)}]" for i in range(12)]
    (tmp_path / "bomb.yaml").write_text("\n".join(levels))
    assert "bomb.yaml must have at most 100 aliases" in refused([verb, "--config", str(tmp_path / "bomb.yaml")], capsys)
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    assert "deep.yaml must have at most 100 levels" in refused([verb, "--config", str(tmp_path / "deep.yaml")], capsys)


@pytest.mark.parametrize("option", ["--path {}", "--path={}"])
def test_a_pipe_is_refused(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = option.format(tmp_path / "pipe").split()
    told = refused(["import-pool", *given, "--store_dir", str(tmp_path / "store"), "--task", "local_number"], capsys)
    assert "pipe is a pipe or a socket" in told
