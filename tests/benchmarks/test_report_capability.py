"""The targets of the report on capability, from made-up evaluations."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "capability"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("report_capability")


def interval(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def row(name: str, mse: float, difference: float | None = None) -> dict[str, Any]:
    return {
        "name": name, "needs_labels": False, "mse": interval(mse), "skill": interval(0.5), "spearman": interval(0.7),
        "ece": interval(0.05), "difference": None if difference is None else interval(difference),
    }  # fmt: skip


def evaluations(mse: float) -> dict[str, Any]:
    curves = [
        {"name": "probe", "way": way, "curve_error": interval(error)}
        for way, error in (("1 - (1 - p)^k", 0.1), ("a map for each k", 0.02))
    ]
    budgets = [
        {"way": "evenly", "budgets": [1, 8], "gain": None},
        {"way": "probe, Beta gain", "budgets": [1, 8], "gain": [interval(0.0), interval(0.02)]},
    ]
    probes = {"comparison": {"rows": [row("probe", mse), row("labelled", mse, 0.005)]}}
    responses = {"comparison": {"rows": [row("agreeing_pairs", 0.05), row("top_share", 0.1, 0.05)]}}
    probes |= {"pass_at_k": curves, "budgets": budgets}
    return {f"{kind}-{split}": each for kind, each in (("probes", probes), ("responses", responses))
            for split in ("id", "ood")}  # fmt: skip


def test_targets_are_means_over_seeds(report: ModuleType) -> None:
    good = report.targets([evaluations(0.06), evaluations(0.08)])
    assert [check.what for check in good if not check.holds] == []
    found = {check.what: check.found for check in good}
    assert found["MSE of the label-free probe, ID"] == pytest.approx(0.07)
    assert found["label-free less labelled MSE, ID, upper bound"] == pytest.approx(0.005)
    assert found["agreeing pairs less top share of 5, MSE, ID"] == pytest.approx(-0.05)
    bad = report.targets([evaluations(0.2)])
    assert sum(not check.holds for check in bad) == 4, "errors and upper bounds, in and out of domain"


def test_the_report_shows_every_seed(report: ModuleType) -> None:
    found = [evaluations(0.06), evaluations(0.08)]
    text = report.as_markdown(report.targets(found), found, "command")
    assert "| probe | no | 0.060 [0.050, 0.070], 0.080 [0.070, 0.090] |" in text
    assert "| labelled | yes |" in text
