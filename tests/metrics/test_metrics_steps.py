"""StepMetrics and QuantileMetrics against the pure functions on the prefixes of each position."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from selfcal_lightning.data.steps import POSITIONS
from selfcal_lightning.metrics.calibration import brier_score, expected_calibration_error
from selfcal_lightning.rewards.metrics import QuantileMetrics, StepMetrics
from selfcal_lightning.rewards.quantiles import brier_excess, coverage
from selfcal_lightning.training.losses import pinball_loss


def _prefixes(size: int = 600) -> dict[str, Tensor]:
    generator = np.random.default_rng(0)
    position = generator.integers(0, len(POSITIONS) - 1, size)
    rollouts = np.where(position == 3, 1, 8)
    truth = generator.beta(0.4, 0.4, size)
    rate = generator.binomial(rollouts, truth) / rollouts
    score = np.clip(truth + generator.normal(0.05, 0.2, size), 0.0, 1.0)
    columns = {
        "score": score, "rate": rate, "num_rollouts": rollouts, "position": position,
        "low": np.clip(score - 0.3, 0.0, 1.0), "high": np.clip(score + 0.3, 0.0, 1.0),
    }  # fmt: skip
    return {name: torch.tensor(column) for name, column in columns.items()}


def _computed(metric: StepMetrics | QuantileMetrics, columns: dict[str, Tensor], names: list[str]) -> dict[str, float]:
    for start in range(0, len(columns["rate"]), 170):
        metric.update(*(columns[name][start : start + 170] for name in names))
    return metric.compute()


def _parts(columns: dict[str, Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
    """Return the prefixes overall and at each position, behind the prefix of their keys."""
    parts = [("", columns)]
    for at, name in enumerate(POSITIONS):
        mine = columns["position"] == at
        if mine.any():
            parts.append((f"{name}/", {key: column[mine] for key, column in columns.items()}))
    return parts


def test_steps_equal_the_functions_overall_and_by_position() -> None:
    columns = _prefixes()
    found = _computed(StepMetrics(), columns, ["score", "rate", "num_rollouts", "position"])
    for name, part in _parts(columns):
        score, rate = part["score"], part["rate"]
        assert found[f"{name}steps/Brier"] == pytest.approx(brier_score(score, rate), abs=1e-12)
        assert found[f"{name}steps/Bias"] == pytest.approx((score - rate).mean().item(), abs=1e-12)
        assert found[f"{name}steps/ECE"] == pytest.approx(expected_calibration_error(score, rate), abs=1e-12)
        many = part["num_rollouts"] > 1
        excess = brier_excess(score[many], rate[many], part["num_rollouts"][many])
        if excess is None:
            assert math.isnan(found[f"{name}steps/BrierExcess"])
        else:
            assert found[f"{name}steps/BrierExcess"] == pytest.approx(excess, abs=1e-12)
        assert found[f"{name}count/Prefixes"] == len(score)
    assert not any(key.startswith("end/") for key in found)
    assert len(found) == 5 * 5


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_quantiles_equal_the_functions_overall_and_by_position(tolerance: float) -> None:
    columns = _prefixes()
    found = _computed(QuantileMetrics(tolerance=tolerance), columns, ["low", "high", "rate", "position"])
    for name, part in _parts(columns):
        losses = pinball_loss(torch.stack([part["low"], part["high"]], dim=1), part["rate"], [0.1, 0.9])
        assert found[f"{name}steps/Pinball"] == pytest.approx(losses.mean().item(), abs=1e-12)
        for key, side, level in (("BelowLow", "low", 0.1), ("AboveHigh", "high", 0.9)):
            outside = coverage(part[side], part["rate"], level, tolerance=tolerance).outside
            assert found[f"{name}steps/{key}"] == pytest.approx(outside, abs=1e-12)
        assert found[f"{name}count/Prefixes"] == len(part["rate"])


def test_one_belongs_to_the_last_bin() -> None:
    metric = StepMetrics()
    metric.update(torch.tensor([0.93, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([1, 1]), torch.tensor([4, 4]))
    assert metric.compute()["end/steps/ECE"] == pytest.approx(0.465, abs=1e-6)


def test_nothing_seen_has_no_position() -> None:
    metric = StepMetrics()
    metric.update(*(torch.zeros(0) for _ in range(4)))
    values = metric.compute()
    assert values["count/Prefixes"] == 0.0
    assert math.isnan(values["steps/Brier"])
    assert all("/" in key and key.split("/")[0] in ("steps", "count") for key in values)


def test_impossible_values_are_refused() -> None:
    half, one = torch.tensor([0.5]), torch.tensor([1])
    with pytest.raises(ValueError, match=r"Expected `score` to lie in \[0, 1\]"):
        StepMetrics().update(torch.tensor([1.5]), half, one, one)
    with pytest.raises(ValueError, match=r"Expected `position` to lie in \[0, 5\), but got \[5\]"):
        StepMetrics().update(half, half, one, torch.tensor([5]))
    with pytest.raises(ValueError, match="Expected `num_rollouts` to be at least 1, but got 0"):
        StepMetrics().update(half, half, torch.tensor([0]), one)
    with pytest.raises(ValueError, match=r"Expected `high` to lie in \[0, 1\]"):
        QuantileMetrics().update(half, torch.tensor([float("nan")]), half, one)
    with pytest.raises(ValueError, match=r"Expected `levels` to rise within \(0, 1\), but got \(0.9, 0.1\)"):
        QuantileMetrics((0.9, 0.1))
    with pytest.raises(ValueError, match="Expected `tolerance` to be at least 0, but got -1"):
        QuantileMetrics(tolerance=-1.0)
