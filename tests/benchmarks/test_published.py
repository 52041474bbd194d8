"""What lies under benchmarks/results: every table is the one that its figures give, every picture the one shown."""

import json

import pytest
from support.house import ROOT, Script

RESULTS = ROOT / "benchmarks" / "results"
WRITERS = {
    "report": "report.as_markdown",
    "report_capability": "report_capability.as_markdown",
    "report_rewards": "report_rewards.as_markdown",
    "report_selection": "report_selection.markdown",
    "report_adapt": "report_adapt.markdown",
    "report_real": "report_real.as_markdown",
    "rounds_study": "rounds_study.as_markdown",
    "live_savings": "live_savings.as_markdown",
    "black_box": "black_box.as_markdown",
    "group_size_study": "group_size_study.as_markdown",
    "targets_study": "targets_study.as_markdown",
    "training_throughput": "training_throughput.markdown",
    "gpu_training": "gpu_training.table",
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_is_that_of_its_figures(name: str, script: Script) -> None:
    module, function = WRITERS[name].split(".")
    content = json.loads((RESULTS / f"{name}.json").read_text())
    assert getattr(script(module), function)(content) == (RESULTS / f"{name}.md").read_text()


def test_the_table_of_scoring_costs_is_that_of_the_figures(script: Script) -> None:
    scoring, found = script("reward_scoring"), json.loads((RESULTS / "reward_scoring.json").read_text())
    costs = [scoring.Cost(**cost) for cost in found["costs"]]
    text = scoring.report(costs, num_steps=found["steps"], size=found["size"], command=found["command"])
    assert text == (RESULTS / "reward_scoring.md").read_text()


@pytest.mark.parametrize(
    ("shown", "drawn"), [("votes", "report"), ("capability", "report_capability"), ("rewards", "report_rewards")]
)
def test_the_documentation_shows_the_published_picture(shown: str, drawn: str) -> None:
    image = ROOT / "docs" / "images" / f"report_{shown}.png"
    assert image.read_bytes() == (RESULTS / f"{drawn}.png").read_bytes()
