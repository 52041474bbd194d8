import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.house import Script

from selfcal_lightning.rewards.metrics import QuantileMetrics, StepMetrics


def places(script: Script, *, shift: float = 0.0) -> Any:
    """Return places whose mean is their rate, but for a shift."""
    rng = np.random.default_rng(0)
    question, position = np.repeat(np.arange(20), 5), np.tile(np.arange(5), 20)
    rate = rng.integers(0, 9, len(question)) / 8
    mean = np.clip(rate + shift, 0.0, 1.0)
    score = np.stack([mean, np.maximum(mean - 0.2, 0.0), np.minimum(mean + 0.2, 1.0)], axis=1)
    return script("_reward_measures").Places(question, position, score, rate, 20, (3, 10), (10, 40, 60))


def test_places_are_measured_as_validation_measures_them(script: Script) -> None:
    import torch

    found, study = places(script, shift=0.3), script("_reward_measures")
    metric, quantiles = StepMetrics(), QuantileMetrics((0.1, 0.9))
    mean, low, high = (torch.tensor(column) for column in found.score.T)
    rate, position = torch.tensor(found.rate), torch.tensor(found.position)
    metric.update(mean, rate, torch.full_like(position, 8), position)
    quantiles.update(low, high, rate, position)
    expected = {**metric.compute(), **quantiles.compute()}
    names = {"brier": "Brier", "ece": "ECE", "bias": "Bias", "pinball": "Pinball", "below": "BelowLow"}
    for where in ("all", "first", "end"):
        measured = study.estimates([found], where)
        prefix = "" if where == "all" else f"{where}/"
        for short, name in names.items():
            assert measured[short].value == pytest.approx(expected[f"{prefix}steps/{name}"]), (where, name)


def test_a_calibrated_score_may_have_no_error_in_truth(script: Script) -> None:
    """Its calibration error is above 0 by chance, more so on every resample: percentiles leave the truth out."""
    rng, study = np.random.default_rng(1), script("_reward_measures")
    question, position = np.repeat(np.arange(80), 5), np.tile(np.arange(5), 80)
    mean = rng.uniform(0.05, 0.95, len(question))
    score = np.stack([mean, mean, mean], axis=1)
    rows = [
        study.Places(question, position, score, (rng.random(len(mean)) < mean).astype(float), 80, (1, 2), (1, 2, 3))
        for _ in range(2)
    ]
    found = study.estimates(rows)["ece"]
    assert found.low == 0.0 < found.value < found.high
    same = study.difference(rows, rows, "ece")
    assert same.low <= same.value == 0.0 <= same.high
    without = study.Places(question, np.zeros_like(position), score, mean, 80, (1, 2), (1, 2, 3))
    assert study.estimates([without], "middle")["ece"].value is None, "nothing stands there"


def test_accuracy_is_read_at_equal_tokens_in_every_resample(script: Script) -> None:
    spent, demands = script("_reward_measures").Spent, script("report_rewards")
    curve = {
        str(n): spent(np.array([0.1 * n, 0.2 * n]), np.array([n, n]), np.array([10.0 * n, 20.0 * n])) for n in (1, 2, 3)
    }
    assert demands.at_equal_tokens(curve, np.array([25.0, 30.0])) == pytest.approx([0.25, 0.3])


def test_adaptive_n_takes_of_each_question_what_its_score_asks_for(script: Script) -> None:
    from selfcal_lightning.inference.thresholds import GridOutcome

    grid = tuple(float(n) for n in range(1, 9))
    hits = np.array([[n >= 2, n >= 7] for n in range(1, 9)])
    samples = np.repeat(np.arange(1, 9)[:, None], 2, axis=1)
    outcome = GridOutcome(grid, hits, samples, 10 * samples)
    found = script("_reward_measures")._adaptive(outcome, np.array([0.9, 0.5]), 0.99, 8)
    assert found.tolist() == [[1.0, 1.0], [2.0, 7.0], [20.0, 70.0]], ".9 needs 2 and .5 needs 7"


def test_a_command_that_was_run_is_not_run_again(script: Script, tmp_path: Path) -> None:
    jobs = script("shared.jobs")
    (tmp_path / jobs.DONE).write_text(json.dumps({"generate --x": 1.5}))
    jobs.run_once(tmp_path, "generate", "--x")
    assert jobs.seconds_of(tmp_path) == {"generate --x": 1.5}
    assert not (tmp_path / "log.txt").exists()


def test_a_model_does_not_differ_from_itself_and_a_worse_one_does(script: Script) -> None:
    study, good, bad = script("_reward_measures"), places(script), places(script, shift=0.3)
    same = study.difference([good], [good], "brier")
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    gain = study.difference([good, good], [bad, bad], "ece")
    assert gain.high < -0.1


def test_every_model_is_trained_by_the_shipped_configuration(script: Script, tmp_path: Path) -> None:
    jobs = script("_reward_measures")
    sizes = {"training": 12, "rolled": 3, "id": 2, "ood": 2, "calibration": 2, "num_samples": 8}
    plan = jobs.Plan(output=tmp_path, **sizes)
    for name, trained in jobs.MODELS.items():
        config = jobs.reward_configuration(plan, 5, name, trained)
        data, model = config["data"]["init_args"], config["model"]["init_args"]
        assert (model["target"], model["seed"], data["seed"]) == (trained.target, 5, 5)
        assert data["train"][0]["limit"] == (3 if trained.is_rolled else 12)
        assert ("rollouts" in data) == (trained.target in ("hard", "success_rate"))
    assert jobs.awake_configuration(plan, 5)["data"]["init_args"]["store_dir"] == data_of(jobs, plan, "vote_share")


def data_of(jobs: ModuleType, plan: Any, name: str) -> str:
    return str(jobs.reward_configuration(plan, 5, name, jobs.MODELS[name])["data"]["init_args"]["store_dir"])
