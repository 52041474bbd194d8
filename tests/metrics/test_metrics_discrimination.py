"""AUROC metrics against the functions and against torchmetrics."""

from __future__ import annotations

import pytest
import torch
from torchmetrics.classification import BinaryAUROC

from selfcal_lightning.metrics.discrimination import auroc, within_question_discrimination
from selfcal_lightning.metrics.streaming import ConfidenceAUROC, WithinQuestionAUROC


def _responses() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(600, generator=generator).mul(30).round().div(30)
    correct = (torch.rand(600, generator=generator) < confidence).long()
    return confidence, correct, torch.randint(50, (600,), generator=generator)


def _reference_torchmetrics_auroc(confidence: torch.Tensor, correct: torch.Tensor) -> float:
    metric = BinaryAUROC()
    metric.update(confidence, correct)
    return metric.compute().item()


def test_auroc_equals_the_function_and_torchmetrics() -> None:
    confidence, correct, _ = _responses()
    metric = ConfidenceAUROC()
    for rows in torch.arange(600).split(130):
        metric.update(confidence[rows], correct[rows])
    assert metric.compute().item() == auroc(confidence, correct)
    assert metric.compute().item() == pytest.approx(_reference_torchmetrics_auroc(confidence, correct), abs=1e-6)


def test_within_question_equals_the_function() -> None:
    columns = _responses()
    expected = within_question_discrimination(*columns)
    for average, value in (("question", expected.mean), ("pair", expected.pooled)):
        metric = WithinQuestionAUROC(average=average)
        for rows in torch.arange(600).split(130):
            metric.update(*(column[rows] for column in columns))
        assert metric.compute().item() == value


def test_large_question_numbers_stay_apart() -> None:
    metric = WithinQuestionAUROC()
    numbers = torch.tensor([2**62, 2**62, 2**62 + 1, 2**62 + 1])
    metric.update(torch.tensor([0.9, 0.1, 0.2, 0.3]), torch.tensor([1, 0, 1, 0]), numbers)
    assert metric.compute().item() == 0.5


def test_one_class_is_nan() -> None:
    metric = ConfidenceAUROC()
    metric.update(torch.tensor([0.5, 0.6]), torch.tensor([1, 1]))
    assert metric.compute().isnan()
