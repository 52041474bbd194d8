"""The training bar stays on one line, and the time left is not guessed while an engine fills its first batch."""

from __future__ import annotations

import time

import pytest
import rich.console
from lightning.pytorch import Trainer

from selfcal_lightning.callbacks.progress_bar import OneLineProgressBar
from selfcal_lightning.core import progress

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


def test_short_steps_in_a_row_are_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
