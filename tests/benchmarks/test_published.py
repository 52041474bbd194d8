"""What lies under benchmarks/results: every table is the one that its figures give, every picture the one shown."""

import json
import sys
from pathlib import Path

import numpy as np
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
    "engine_throughput": "engine_throughput.as_markdown",
    "reward_scoring": "reward_scoring.as_markdown",
    "gpu_training": "gpu_training.table",
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_is_that_of_its_figures(name: str, script: Script) -> None:
    module, function = WRITERS[name].split(".")
    content = json.loads((RESULTS / f"{name}.json").read_text())
    assert getattr(script(module), function)(content) == (RESULTS / f"{name}.md").read_text()


def test_a_result_names_the_options_that_made_it(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    savings = script("live_savings")
    monkeypatch.setattr(savings, "calibrate", lambda *sizes: dict.fromkeys(savings.SYSTEMS))
    monkeypatch.setattr(savings, "ask", lambda *asked, **settings: np.ones((3, 4)))
    options = ["--questions", "4", "--engines", "transformers"]
    monkeypatch.setattr(sys, "argv", ["live_savings.py", *options, "--results", str(tmp_path)])
    savings.STUDY.main()
    wanted = f"python benchmarks/bundled_model/live_savings.py {' '.join(options)}"
    assert json.loads((tmp_path / "live_savings.json").read_text())["command"] == wanted


@pytest.mark.parametrize(
    ("shown", "drawn"), [("votes", "report"), ("capability", "report_capability"), ("rewards", "report_rewards")]
)
def test_the_documentation_shows_the_published_picture(shown: str, drawn: str) -> None:
    image = ROOT / "docs" / "images" / f"report_{shown}.png"
    assert image.read_bytes() == (RESULTS / f"{drawn}.png").read_bytes()
