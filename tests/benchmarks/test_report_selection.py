import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.house import Script
from support.selection_stores import sums_entry, sums_store

from selfcal_lightning.adaptation.picking import SelectionSettings
from selfcal_lightning.metrics.arrays import Floats


@pytest.fixture
def worth(script: Script) -> ModuleType:
    return script("report_selection")


def first(column: Floats) -> float:
    return float(column[0])


def test_a_selection_that_is_known_by_hand(worth: ModuleType) -> None:
    entries = [sums_entry(number, right=number % 5) for number in range(10)]  # 0, 1, 2, 3, 4 of 4 right, twice
    found = worth.selection_worth(entries, SelectionSettings(pick="mean_logprob", keep="share", top=0.4))
    assert first(found["best"]) == 0.8, "the likeliest is right wherever one is"
    assert first(found["gain"]) == pytest.approx(0.8 - 0.5)
    assert first(found["kept"]) == 1.0, "the four questions with three or four equal answers"
    assert found["gain"].min() < first(found["gain"]) < found["gain"].max()
    estimates = worth.over_seeds([found, found])
    assert estimates["gain"].value == pytest.approx(0.3)
    assert estimates["gain"].low < 0.3 < estimates["gain"].high


def test_a_perfect_score_and_one_that_knows_nothing(worth: ModuleType) -> None:
    entries = [sums_entry(number, right=number % 5) for number in range(10)]
    perfect = worth.score_tells(entries, lambda _, sample: float(bool(sample.correct)))
    assert (first(perfect["responses"]), first(perfect["within"])) == (1.0, 1.0)
    nothing = worth.score_tells(entries, lambda *_: 1.0)
    assert (first(nothing["responses"]), first(nothing["within"])) == (0.5, 0.5)
    lacking = worth.score_tells(entries, lambda _, sample: 1.0 if sample.correct else None)
    assert first(lacking["within"]) == 1.0, "a response without the score comes last"


def test_the_script(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("report_selection")
    monkeypatch.setattr(report, "CRITERIA", ())
    sums_store(tmp_path / "pools" / "seed-0")
    given = ["--folder", str(tmp_path / "pools"), "--results", str(tmp_path), "--seeds", "1", "--table"]
    monkeypatch.setattr(sys, "argv", ["report_selection.py", *given])
    report.STUDY.main()
    content = json.loads((tmp_path / "report_selection.json").read_text())
    assert content["sizes"]["responses"] == 48
    assert content["handed_on"][0]["judged_otherwise"] == 0
    assert content["handed_on"][0]["ungrounded_forms"] == 0
    table = (tmp_path / "report_selection.md").read_text()
    assert "Command: `python benchmarks/selection/report_selection.py --seeds 1`." in table
    for name in ("fused", "share", "ssc", "mean_logprob", "p_true"):
        assert f"| `{name}` |" in table
