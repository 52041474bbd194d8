import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.capability_pools import capability_store, give_states
from support.house import ROOT, Script

from selfcal_lightning.commands.capability import run_fit_probe, run_score_questions
from selfcal_lightning.metrics.calibration import ErrorBounds

Columns = dict


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a seed whose training store is also that of the tests."""
    folder = tmp_path_factory.mktemp("report") / "seed-0"
    store = capability_store(folder / "tests")
    give_states(store)
    (folder / "train").symlink_to(store, target_is_directory=True)
    for name, target in (("probe", "agreeing_pairs"), ("labelled", "label")):
        run_fit_probe(str(store), str(folder / name), target=target)
        run_score_questions(probe=str(folder / name), store_dir=str(store), name=name)
    return folder


@pytest.fixture(scope="module")
def columns(script: Script, seed: Path) -> Columns:
    with pytest.MonkeyPatch.context() as patch:
        measures = script("_capability_measures")
        patch.setattr(measures, "RESAMPLES", 30)
        patch.setattr(measures, "TESTS", ("test",))
        patch.setattr(measures, "FROM_PROMPTS", ("probe", "labelled"))
        patch.setattr(measures, "FROM_RESPONSES", ("agreeing_pairs", "top_share"))
        found = measures.measure_seed(seed) | measures.size_columns(seed)
    return {key.replace("test/", f"{split}/", 1): found[key] for key in found for split in ("id", "ood")}


def test_a_seed_is_measured(columns: Columns) -> None:
    errors = {key for key, column in columns.items() if isinstance(column, ErrorBounds)}
    assert errors == {key for key in columns if key.endswith("/ece")} != set()
    assert all(len(columns[key].least) == 30 for key in errors)
    assert all(columns[key].shape[-1] in (1, 31) for key in columns.keys() - errors)
    for name in ("probe", "labelled", "agreeing_pairs", "top_share", "probe + isotonic"):
        assert -0.1 < columns[f"id/{name}/mse"][0] < columns["id/constant/mse"][0] * 2.0
    assert columns["id/pass@k/shown"].shape == (4, 31), "k = 1, 2, 4, 8"
    assert columns["id/probe/pass@k/power"][:, 0].tolist() == sorted(columns["id/probe/pass@k/power"][:, 0])
    assert columns["id/solved/evenly"].shape == (3, 31)
    assert (np.diff(columns["id/lost/probe"][:, 0]) >= 0.0).all(), "more left out, more lost"
    oracle = next(column for key, column in columns.items() if key.startswith("id/lost/by the responses"))
    assert (oracle[:, 0] <= columns["id/lost/probe"][:, 0]).all()
    assert columns["id/half of the responses"][0] < 0.01
    assert columns["id/size/few questions"][0] > columns["id/size/all"][0]


def test_the_mean_over_seeds_keeps_what_some_seeds_have(script: Script) -> None:
    error = ErrorBounds(0.1, np.full(30, -0.05), np.full(30, 0.2))
    one, other = {"a": np.zeros(31), "b": np.ones(31), "ece": error}, {"a": np.ones(31), "ece": error}
    found = script("report_capability").over_seeds([one, other])
    assert found["a"][0] == pytest.approx(0.5)
    assert found["a"].std() > 0.0, "which seeds were drawn"
    assert found["b"].tolist() == [1.0] * 31
    assert script("report_capability")._plain(found["ece"]) == [0.1, 0.0, 0.15], "it may be none in truth"


def test_targets_name_what_is_missed(script: Script, columns: Columns) -> None:
    checks = script("_capability_measures").targets(columns, seconds=(0.001, 0.01))
    found = {row.what: row for row in checks}
    ratio = found["processor time of the probe over that of one response"]
    assert (ratio.found.value, ratio.holds) == (pytest.approx(0.1), True)
    worse = {**columns, "id/probe/mse": columns["id/probe/mse"] + 1.0}
    missed = {row.what for row in script("_capability_measures").targets(worse, seconds=(0.001, 0.01)) if not row.holds}
    assert found["MSE of the label-free probe, in domain"].holds
    assert {"MSE of the label-free probe, in domain", "MSE without labels less that with labels, in domain"} <= missed


def test_the_published_command_can_be_run(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    command = json.loads((ROOT / "benchmarks" / "results" / "report_capability.json").read_text())["command"]
    monkeypatch.setattr(sys, "argv", command.split()[1:])
    assert script("report_capability").STUDY.parse().command == command


def test_what_is_written(script: Script, columns: Columns, tmp_path: Path) -> None:
    report: dict = {
        "command": "the command", "seeds": [0], "processor_minutes": 1.0,
        "sizes": {"train": 40, "train_samples": 8, "samples": 8, "id": 24, "ood": 24, "calibration": 24},
    }  # fmt: skip
    made = script("report_capability")
    checks = script("_capability_measures").targets(columns, seconds=(0.001, 0.01))
    report["checks"] = [{**vars(check), "found": made.triple(check.found, digits=made.DIGITS)} for check in checks]
    report["measured"] = {key: made._plain(column) for key, column in columns.items()}
    made.STUDY.publish(made.Options(results=tmp_path), report)
    assert "Command: `the command`" in (tmp_path / "report_capability.md").read_text()
    record = json.loads((tmp_path / "report_capability.json").read_text())
    assert record["measured"]["id/probe/mse"][0] == pytest.approx(columns["id/probe/mse"][0], abs=1e-5)
    assert (tmp_path / "report_capability.png").read_bytes().startswith(b"\x89PNG")
