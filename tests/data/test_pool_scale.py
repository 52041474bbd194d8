"""Large pools: long runs say what they are doing, and columns are laid out once."""

from __future__ import annotations

import json
import time

import numpy as np
import pyarrow as pa
import pytest

from selfcal_lightning.core import progress
from selfcal_lightning.core.progress import Progress, Stage, counted
from selfcal_lightning.data.store.shards import _confidences


def test_a_stage_speaks_while_it_lasts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_progress_that_ends_at_once_may_leave_no_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress(2, label="Checking", unit="lines", only_if_slow=True) as bar:
        assert list(counted("ab", bar)) == ["a", "b"]
    assert (bar.done, capsys.readouterr().err) == (2, "")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress(2, label="Checking", unit="lines", only_if_slow=True) as bar:
        list(counted("ab", bar))
    assert "Checking: 2 of 2 lines" in capsys.readouterr().err


def test_confidences_are_laid_out_once_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a row, which took days at millions of them."""
    made: list[int] = []
    full = np.full
    monkeypatch.setattr(np, "full", lambda *given, **options: (made.append(1), full(*given, **options))[1])
    chunks = [[json.dumps({"a": 0.5 + n, "b": 1.5}), None] for n in range(10)]
    found = _confidences(pa.chunked_array(chunks, pa.string()))
    assert len(made) == 2
    np.testing.assert_array_equal(found["a"], np.ravel([[0.5 + n, np.nan] for n in range(10)]))
    np.testing.assert_array_equal(found["b"], np.ravel([[1.5, np.nan]] * 10))
