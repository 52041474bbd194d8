import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from support.house import Script

from selfcal_lightning.core.errors import RunError


@pytest.fixture
def report(script: Script) -> ModuleType:
    return script("report_adapt")


def test_changes_are_paired_over_questions_and_drawn_over_seeds(report: ModuleType) -> None:
    before = [np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.0, 0.0, 1.0, 1.0])]
    same = report.as_json(report.mean_change(before, [one + 0.25 for one in before]))
    assert same == {"change": 0.25, "low": 0.25, "high": 0.25}, "what all questions share has no interval"
    apart = report.as_json(report.mean_change(before, [before[0], before[1] + 1.0]))
    assert apart == {"change": 0.5, "low": 0.0, "high": 1.0}, "seeds are drawn: none, one or both of the changed one"


def test_the_command_says_what_is_not_usual(report: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["--folder", "a/b", "--table", "--seeds", "1", "--results=c", "--lr", "0.001"]
    monkeypatch.setattr(sys, "argv", ["report_adapt.py", *typed])
    options = report.STUDY.parse()
    assert options.command == "python benchmarks/adapt/report_adapt.py --seeds 1 --lr 0.001"
    assert (options.output, options.lr, options.only_collect) == (Path("a/b"), 0.001, True)


def test_what_is_met_and_missed(report: ModuleType) -> None:
    def change(value: float) -> dict[str, float]:
        return {"change": value, "low": value - 0.01, "high": value + 0.01}

    found: dict = {name: change(0.0) for name in ("pass@1", "pass@k", "ece")}
    table = {
        "levels": {report.ANCHOR: {"ece": 0.1}},
        "changes": {
            "anchor less start": found,
            "anchor less TTRL": {**found, "ece": change(-0.05)},
            "equations less start": {"pass@1": change(0.005)},
        },
    }
    tables = {"transductive": table, "inductive": table}
    packing = {"packed_tokens": 48.0, "apart_tokens": 83.0, "packed_seconds": 2.0, "apart_seconds": 2.5}
    guarded = {"rounds": 1, "problems": ["a token has lost 3 nats"], "is_restored": True}
    rows = {row["target"].split(":")[0]: row for row in report.targets(tables, change(0.005), packing, guarded)}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "anchor less TTRL, inductive ECE": "met",
        "anchor, ECE after <= .12 and upper bound of its change < +.03, transductive and inductive": "met",
        "anchor, inductive pass@1": "met",
        "anchor, pass@k": "met",
        "equations": "missed",
        "TTRL": "missed",
        "a group packed against rows of their own": "missed",
        "the guard stops a run at a rate of 0.03 within 3 rounds, and restores": "met",
    }


def test_tables_are_not_made_before_all_is_measured(report: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"there is no .*TTRL-0/adaptation.json. Run without `--table`"):
        report.assemble(SimpleNamespace(output=tmp_path, seeds=1))
