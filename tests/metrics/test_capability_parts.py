"""Response- against capability-calibration as a metric: by hand, in batches, and equal to the metric of capability."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from selfcal_lightning.capability.metrics import CapabilityErrorParts, CapabilityMetrics

P, RIGHT, SAMPLES = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([1, 2, 3]), torch.tensor([2, 4, 4])


def test_the_parts_by_hand() -> None:
    metric = CapabilityErrorParts()
    metric.update(P, RIGHT, SAMPLES)
    found = metric.compute()
    # Right with 1/2, 1/2, 3/4: E (p - y)^2 is 1/4, (9/16 + 1/16) / 2 and 1/4.
    assert found["capability/ResponseError"] == pytest.approx((1 / 4 + 5 / 16 + 1 / 4) / 3)
    # Unbiased c* (1 - c*): n / (n - 1) times that of the share.
    assert found["capability/ResponseSpread"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert found["capability/CapabilityError"] == pytest.approx(
        found["capability/ResponseError"] - found["capability/ResponseSpread"]
    )


def test_batches_pickles_and_the_other_metric_agree() -> None:
    whole, parts, other = CapabilityErrorParts(), CapabilityErrorParts(), CapabilityMetrics()
    for metric in (whole, other):
        metric.update(P, RIGHT, SAMPLES)
    for at in (2, 0, 1):
        parts.update(P[at : at + 1], RIGHT[at : at + 1], SAMPLES[at : at + 1])
    assert pickle.loads(pickle.dumps(parts)).compute() == whole.compute()  # noqa: S301
    assert whole.compute()["capability/CapabilityError"] == pytest.approx(other.compute()["capability/MSE"])


def test_nothing_and_bad_input() -> None:
    assert all(math.isnan(value) for value in CapabilityErrorParts().compute().values())
    metric = CapabilityErrorParts()
    metric.update(P[:1], torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(ValueError, match="`num_samples` to be at least 2"):
        metric.compute()
    with pytest.raises(ValueError, match="predicted"):
        metric.update(torch.tensor([1.5]), RIGHT[:1], SAMPLES[:1])
