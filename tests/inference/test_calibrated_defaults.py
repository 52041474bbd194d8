"""What a calibration knew is taken where the user says nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from selfcal_lightning.inference.choices import CalibratedDefaults
from selfcal_lightning.metrics.calibration import half_budget_threshold
from selfcal_lightning.records import SamplingSettings

TAUGHT = SamplingSettings(max_new_tokens=60, temperature=0.9)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    manifest = {
        "format": 2, "kind": "adapter", "files": {}, "store": {"sampling": asdict(TAUGHT), "tasks": ["local_number"]},
        "metrics": {"val/stopping/Threshold": 0.43},
    }  # fmt: skip
    (tmp_path / "selfcal_manifest.json").write_text(json.dumps(manifest))
    return tmp_path


def test_what_is_not_given_is_that_of_the_calibration(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = CalibratedDefaults.of("bundled", str(adapter))
    assert found.task == "local_number"
    assert found.sampling_for(None) == TAUGHT
    assert found.strategy_fields() == {"threshold": 0.43}
    said = capsys.readouterr().err
    assert "max_new_tokens 60" in said
    assert "confidence of 0.43" in said


def test_what_is_given_counts(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = CalibratedDefaults.of("bundled", str(adapter))
    for given in (SamplingSettings(max_new_tokens=7), SamplingSettings()):
        assert found.sampling_for(given) == given, "also where it is the default"
    assert capsys.readouterr().err == ""


def test_a_folder_of_another_tool_knows_nothing(tmp_path: Path) -> None:
    found = CalibratedDefaults.of("bundled", str(tmp_path))
    assert (found.sampling, found.task, found.threshold) == (None, None, None)
    assert found.sampling_for(None) == SamplingSettings()
    assert found.strategy_fields() == {}


def test_half_of_the_budget_is_counted_by_hand() -> None:
    """Questions of four responses: the first sure one of m comes after 5 / (m + 1), of none after 4."""
    question = [0] * 4 + [1] * 4
    assert half_budget_threshold([0.8] * 4 + [0.5, 0.1, 0.1, 0.1], question) == 0.5  # 1 + 2.5 <= 4 < 1 + 4
    assert half_budget_threshold([0.1] * 8, question) == 0.1
    assert half_budget_threshold([0.7, 0.6], [0, 1]) is None
