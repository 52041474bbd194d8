"""The training bar stays on one line, and the time left is not guessed while an engine fills its first batch."""

from __future__ import annotations

import time

import pytest
import rich.console
from lightning.pytorch import Trainer

from selfcal_lightning.callbacks.progress_bar import OneLineProgressBar, fitting
from selfcal_lightning.core import progress
from selfcal_lightning.core.progress import Progress

METRICS = {"v_num": 0, "cal": 0.084, "gen": 0.0, "conf": 0.561, ">eta": 0.312, "tok/s": 1476.363, "pad": 0.002}


@pytest.mark.parametrize(("width", "kept"), [(80, 1), (100, 3), (200, 6)])
def test_the_numbers_fit_the_terminal(width: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = OneLineProgressBar()
    bar._console = rich.console.Console(width=width)
    parent = "lightning.pytorch.callbacks.RichProgressBar.get_metrics"
    monkeypatch.setattr(parent, lambda *_: dict(METRICS))
    shown = bar.get_metrics(Trainer(accelerator="cpu", logger=False), None)  # type: ignore[arg-type]
    assert list(shown) == list(METRICS)[1 : kept + 1]
    written = "".join(f"{name}: {value:.3f} " for name, value in shown.items())
    assert 62 + len(written) <= width


def test_nothing_is_shown_where_nothing_fits() -> None:
    assert fitting(METRICS, 0) == {}


def test_short_steps_in_a_row_are_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(progress, "LOOK_SECONDS", 0.01)
    progress.say("begin")
    for number in range(10):  # none of them takes as long as a line is due
        with progress.Stage(f"step {number}"):
            time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("step ") for line in lines[1:])


def test_the_time_left_counts_from_the_first_finished_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty seconds until an engine has filled its batch, then ten a second: the rest takes 90 s, not an hour."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress(1000, label="Sampling", enabled=False) as shown:
        assert shown.seconds_left() is None
        now[0] = 30.0
        shown.update(1)
        now[0] = 31.0
        shown.update(1)
        assert shown.seconds_left() is None, "one second says little"
        assert shown.line().endswith("time left unknown")
        now[0] = 40.0
        shown.update(98)
        assert shown.seconds_left() == pytest.approx(900 * 10 / 99)
        assert shown.line().endswith("01:30 left")
        shown.update(900)
        assert shown.line().endswith("00:00 left")
