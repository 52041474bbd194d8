"""What the metrics draw: their numbers can be read off the axes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.metrics.streaming import BinnedCalibrationError, ConfidenceAUROC, WithinQuestionAUROC
from selfcal_lightning.rewards.metrics import StepMetrics
from selfcal_lightning.training.metrics import CalibrationMetrics

CONFIDENCE = torch.tensor([0.15, 0.15, 0.85, 0.85, 0.85, 0.85])
CORRECT = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
QUESTION = torch.tensor([0, 0, 0, 1, 1, 1])


def bars(axes: Axes) -> list[float]:
    return [patch.get_height() for patch in axes.containers[0].patches]


def test_calibration_error_draws_the_reliability_diagram() -> None:
    metric = BinnedCalibrationError()
    metric.update(CONFIDENCE, CORRECT)
    figure, axes = metric.plot()
    assert isinstance(figure, Figure)
    assert bars(axes) == [0.5, 0.75]  # one of two right at .15, three of four at .85
    assert axes.get_title() == "ECE 0.183"  # (2 * .35 + 4 * .10) / 6
    assert float(metric.compute()) == pytest.approx(0.55 / 3)
    assert axes.get_xlabel() == "confidence"


def test_it_draws_on_axes_that_are_given() -> None:
    given = Figure().subplots()
    metric = BinnedCalibrationError()
    metric.update(CONFIDENCE, CORRECT)
    figure, axes = metric.plot(ax=given)
    assert axes is given
    assert figure is given.get_figure()


def test_auroc_draws_the_curve() -> None:
    metric = ConfidenceAUROC()
    metric.update(CONFIDENCE, CORRECT)
    _, axes = metric.plot()
    curve = axes.lines[0]
    assert np.trapezoid(curve.get_ydata(), curve.get_xdata()) == pytest.approx(float(metric.compute()))
    assert axes.get_title() == f"AUROC {float(metric.compute()):.3f}"


def test_capability_draws_the_share_of_right_samples() -> None:
    metric = CapabilityMetrics()
    metric.update(torch.tensor([0.25, 0.25, 0.75]), torch.tensor([0, 2, 4]), torch.tensor([4, 4, 4]))
    _, axes = metric.plot()
    assert bars(axes) == [0.25, 1.0]
    assert axes.get_xlabel() == "predicted capability"


@pytest.mark.parametrize("labelled", [True, False])
def test_the_collection_draws_labels_or_else_targets(labelled: bool) -> None:
    metric = CalibrationMetrics()
    unknown = torch.full_like(CORRECT, float("nan"))
    ones = torch.ones_like(CORRECT)
    metric.update(CONFIDENCE, CORRECT if labelled else unknown, 0.5 * ones, QUESTION, ["t"] * 6, ones)
    _, axes = metric.plot()
    assert bars(axes) == ([0.5, 0.75] if labelled else [0.5, 0.5])
    assert axes.get_ylabel() == ("accuracy" if labelled else "target")


def test_numbers_without_a_diagram_are_bars_with_their_names() -> None:
    metric = WithinQuestionAUROC()
    metric.update(CONFIDENCE, CORRECT, QUESTION)
    _, axes = metric.plot()
    assert [patch.get_width() for patch in axes.patches] == [float(metric.compute())]
    steps = StepMetrics()
    steps.update(torch.tensor([0.2, 0.9]), torch.tensor([0.0, 1.0]), torch.tensor([4, 4]), torch.tensor([0, 1]))
    values = steps.compute()
    _, axes = steps.plot()
    assert [label.get_text() for label in axes.get_yticklabels()] == list(values)


def test_values_of_several_steps_are_a_line() -> None:
    metric = BinnedCalibrationError()
    _, axes = metric.plot([torch.tensor(0.3), torch.tensor(0.2), torch.tensor(0.1)])
    assert axes.lines[0].get_ydata() == pytest.approx([0.3, 0.2, 0.1])
    assert axes.get_ylabel() == "BinnedCalibrationError"


@pytest.mark.parametrize(
    "metric", [BinnedCalibrationError(), ConfidenceAUROC(), CalibrationMetrics(), CapabilityMetrics()]
)
def test_nothing_seen_is_an_empty_diagram(metric: BinnedCalibrationError) -> None:
    _, axes = metric.plot()
    assert "–" in axes.get_title()


def test_functions_of_metrics_bring_no_torch() -> None:
    code = (
        "import sys; from selfcal_lightning import metrics\n"
        "assert metrics.soft_self_consistency(['4', '4'], [0.5, 0.5]) == [1.0, 1.0]\n"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
