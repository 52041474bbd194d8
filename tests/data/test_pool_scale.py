"""Large pools in small: the synthetic ones are what an import makes of them, and long runs say what they are at."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest

from selfcal_lightning.core import progress
from selfcal_lightning.core.progress import Progress, Stage, counted
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.store.shards import _confidences

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "speed"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a file of the folder by name, as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib


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


def test_the_synthetic_store_is_the_import_of_the_synthetic_lines(benchmarks: ModuleType, tmp_path: Path) -> None:
    made = benchmarks.import_module("pool_scale")
    size = made.Size(num_questions=260, num_samples=3, num_tokens=12)  # more than are written at a time
    made.write_lines(tmp_path / "pool.jsonl", size)
    made.write_store(tmp_path / "store", size)
    report = import_pool(tmp_path / "pool.jsonl", tmp_path / "imported")
    assert (report.questions, report.responses, report.extracted) == (260, 780, 780)
    assert 0 < report.unreadable < 80
    stored, imported = (load_recorded_pool(tmp_path / name).entries for name in ("store", "imported"))
    assert stored == imported


@pytest.mark.slow
def test_the_benchmark_of_large_pools_runs(benchmarks: ModuleType, tmp_path: Path) -> None:
    sizes = ["--questions", "60", "--imported", "20", "--samples", "4", "--tokens", "20", "--num_reshuffles", "2"]
    benchmarks.import_module("pool_scale").main([*sizes, "--work", str(tmp_path), "--output", str(tmp_path / "out")])
    costs = json.loads((tmp_path / "out" / "pool_scale.json").read_text())["costs"]
    assert [cost["command"].split()[0] for cost in costs] == ["import-pool", "evaluate", *["fit-threshold"] * 2]
    assert all(0 < cost["silence_seconds"] <= cost["seconds"] and cost["peak_bytes"] > 2**26 for cost in costs)
    assert (tmp_path / "out" / "pool_scale.md").read_text().count("| `") == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
