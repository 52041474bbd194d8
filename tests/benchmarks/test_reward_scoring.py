"""The costs of scoring steps: the table is that of the figures, and they are measured of equal scores."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "speed"))
    return importlib.import_module("reward_scoring")


def test_the_table_is_that_of_the_figures(scoring: ModuleType) -> None:
    found = json.loads((RESULTS / "reward_scoring.json").read_text())
    costs = [scoring.Cost(**cost) for cost in found["costs"]]
    text = scoring.report(costs, num_steps=found["steps"], size=found["size"], command=found["command"])
    assert text == (RESULTS / "reward_scoring.md").read_text()


@pytest.mark.slow
def test_packed_rows_take_fewer_tokens_for_the_same_scores(scoring: ModuleType, tmp_path: Path) -> None:
    ways = scoring.prepare(tmp_path, num_questions=2, num_samples=4)
    costs, num_steps = scoring.measure(ways, turns=1)
    tokens = {cost.way: cost.tokens for cost in costs}
    assert num_steps == costs[0].passes
    assert tokens[scoring.PACKED] * 3 < tokens[scoring.ROWS] * 2 < tokens[scoring.APART]
    ways.by_name[scoring.ROWS] = lambda: [0.5] * num_steps
    with pytest.raises(SystemExit, match="to score as one text a step does"):
        scoring.measure(ways, turns=1)
