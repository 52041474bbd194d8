"""The table of criteria, on made-up responses of which the worth is known."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from support.house import ROOT
from support.selection_stores import sums_entry, sums_store


def test_a_perfect_score_and_one_that_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "selection"))
    table = importlib.import_module("criteria_table")
    entries = [sums_entry(number, right=number % 5) for number in range(10)]  # 4 of 10 questions less than 2 right
    perfect = table.worth_of("right", lambda _, sample: float(bool(sample.correct)), entries)
    assert (perfect.best, perfect.responses, perfect.within, perfect.selected) == (0.8, 1.0, 1.0, 1.0)
    assert perfect.gain[0] == pytest.approx(0.8 - 0.5)
    assert perfect.gain[1] <= perfect.gain[0] <= perfect.gain[2]
    assert perfect.kept == 1.0
    nothing = table.worth_of("constant", lambda *_: 1.0, entries)
    assert (nothing.responses, nothing.within) == (0.5, 0.5)
    assert nothing.best == 0.8, "the first readable response, which is right wherever one is"


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "selection"))
    table = importlib.import_module("criteria_table")
    monkeypatch.setattr(sys, "argv", ["criteria_table.py", "--store_dir", str(sums_store(tmp_path / "store").path)])
    table.main()
    said = capsys.readouterr().out
    assert "12 questions, 48 responses" in said
    for name in ("vote share", "fused", "mean_logprob", "p_true", "length"):
        assert f"| `{name}` |" in said
