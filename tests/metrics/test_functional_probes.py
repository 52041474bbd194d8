"""Class probes against recorded vectors, scikit-learn and hand-made cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from selfcal_lightning.capability.probe_heads import class_confidence, class_loss, nearest_class

Vectors = Callable[[str], dict[str, Any]]


def test_class_probe_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("linear_classifier_probe")["cases"]:
        weight, bias, x = (torch.tensor(case[name]) for name in ("W", "b", "X"))
        assert class_confidence(x @ weight.T + bias).tolist() == pytest.approx(case["confidence"], abs=1e-6)


def test_nearest_class_equals_the_vectors(vectors: Vectors) -> None:
    """The reference cuts targets down to the edge of a bin; the recommended column takes the nearest one."""
    differing = 0
    for case in vectors("quantile_bin_encode_decode")["cases"]:
        found = nearest_class(torch.tensor(case["accuracy"]).double(), case["n_bins"]).tolist()
        assert found == case["nearest_bin_id_recommended"]
        differing += sum(ours != theirs for ours, theirs in zip(found, case["bin_id"], strict=True))
    assert differing > 0


def test_class_loss_by_hand() -> None:
    # Three classes for 0, 1/2, 1. Target .6 is nearest to the middle: -log softmax of the middle logit.
    logits = torch.tensor([[0.0, math.log(2.0), 0.0]])
    assert class_loss(logits, torch.tensor([0.6])).item() == pytest.approx(math.log(2.0))
    assert class_loss(logits, torch.tensor([0.0])).item() == pytest.approx(math.log(4.0))
    assert class_confidence(logits).item() == pytest.approx(0.5)
    assert class_confidence(torch.tensor([0.0, 0.0, 90.0])).item() == pytest.approx(1.0)


def test_training_on_the_class_loss_recovers_the_share() -> None:
    logits = torch.zeros(1, 11, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    for _ in range(200):
        optimizer.zero_grad()
        class_loss(logits, torch.tensor([0.7])).sum().backward()
        optimizer.step()
    assert class_confidence(logits).item() == pytest.approx(0.7, abs=0.01)
