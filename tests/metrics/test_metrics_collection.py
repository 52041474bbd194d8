"""CalibrationMetrics: every value against its function, per task, with unknown labels, targets and confidences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from selfcal_lightning.metrics.calibration import brier_score, expected_calibration_error, maximum_calibration_error
from selfcal_lightning.metrics.discrimination import auroc, spearman, within_question_discrimination
from selfcal_lightning.training.metrics import KEYS, CalibrationMetrics

NAN = float("nan")
FAMILIES = ("calibration", "discrimination", "accuracy", "target", "mass", "count")


def _columns(size: int = 400, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(size, generator=generator)
    return {
        "confidence": confidence,
        "correct": (torch.rand(size, generator=generator) < confidence).float(),
        "target": (confidence + 0.2 * torch.randn(size, generator=generator)).clamp(0.0, 1.0),
        "question_index": torch.randint(25, (size,), generator=generator),
        "yes_no_mass": torch.rand(size, generator=generator),
    }


def _expected(confidence: np.ndarray, correct: np.ndarray, target: np.ndarray, question: np.ndarray) -> dict:
    """Return the values of fully known responses, each from its own function or a plain formula."""
    within = within_question_discrimination(confidence, correct, question)
    difference = np.abs(confidence - target)
    return {
        "calibration/ECE": expected_calibration_error(confidence, correct),
        "calibration/MCE": maximum_calibration_error(confidence, correct),
        "calibration/Brier": brier_score(confidence, correct),
        "discrimination/AUROC": auroc(confidence, correct),
        "discrimination/WithinQuestionAUROC": within.mean,
        "discrimination/WithinQuestionPairs": within.pooled,
        "discrimination/MixedQuestions": within.num_questions,
        "accuracy/PassAt1": np.mean([correct[question == q].mean() for q in np.unique(question)]),
        "target/MAE": difference.mean(),
        "target/Spearman": spearman(confidence, target),
        "target/SmoothL1": np.where(difference < 0.25, 2.0 * difference**2, difference - 0.125).mean(),
        "count/Responses": len(confidence),
        "count/Questions": len(np.unique(question)),
        "count/WithoutConfidence": 0,
        "count/WithoutLabel": 0,
        "count/WithoutTarget": 0,
    }


def test_one_task_has_plain_keys() -> None:
    columns = _columns()
    metrics = CalibrationMetrics()
    for rows in torch.arange(400).split(90):
        metrics.update(**{key: column[rows] for key, column in columns.items()}, task=["arithmetic"] * len(rows))
    expected = _expected(
        *(columns[key].double().numpy() for key in ("confidence", "correct", "target")),
        columns["question_index"].numpy(),
    )
    expected["mass/YesNo"] = columns["yes_no_mass"].double().mean().item()
    assert metrics.compute() == pytest.approx(expected, abs=1e-12)
    assert {key.split("/")[0] for key in metrics.compute()} == set(FAMILIES)
    assert sorted(metrics.compute()) == sorted(KEYS)


def test_tasks_have_their_own_keys_and_questions() -> None:
    # Question numbers repeat over tasks; the overall numbers tell them apart.
    first, second = _columns(seed=1), _columns(seed=2)
    metrics, alone = CalibrationMetrics(), CalibrationMetrics()
    task = ["a"] * 200 + ["b"] * 200
    mixed = {key: torch.cat([first[key][:200], second[key][:200]]) for key in first}
    metrics.update(**mixed, task=task)
    alone.update(**{key: column[:200] for key, column in second.items()}, task=["b"] * 200)
    values = metrics.compute()
    assert {key: values[f"b/{key}"] for key in alone.compute()} == alone.compute()
    overall = {**mixed, "question_index": mixed["question_index"] + torch.tensor([0] * 200 + [1000] * 200)}
    apart = CalibrationMetrics()
    apart.update(**overall, task=["one"] * 400)
    assert {key: value for key, value in values.items() if key.count("/") == 1} == pytest.approx(
        apart.compute(), abs=1e-12
    )
    assert values["count/Questions"] == 50


def test_unknown_labels_leave_the_target_family() -> None:
    columns = _columns(20)
    columns["correct"][:] = NAN
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a"] * 20)
    values = metrics.compute()
    assert {key.split("/")[0] for key in values} == {"target", "mass", "count"}
    assert values["count/WithoutLabel"] == 20


def test_unknown_targets_leave_the_label_families() -> None:
    columns = _columns(20)
    columns["target"][:] = NAN
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a"] * 20)
    values = metrics.compute()
    assert {key.split("/")[0] for key in values} == set(FAMILIES) - {"target"}
    assert values["count/WithoutTarget"] == 20


def test_partly_unknown_columns_count_what_they_leave_out() -> None:
    columns = _columns(40)
    columns["correct"][:10], columns["target"][5:15], columns["confidence"][30:] = NAN, NAN, NAN
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a"] * 40)
    values = metrics.compute()
    assert [values[f"count/Without{name}"] for name in ("Label", "Target", "Confidence")] == [10, 10, 10]
    assert values["calibration/Brier"] == pytest.approx(
        brier_score(columns["confidence"][10:30], columns["correct"][10:30])
    )
    known = np.r_[0:5, 15:30]
    expected = (columns["confidence"] - columns["target"])[known].double().abs().mean().item()
    assert values["target/MAE"] == pytest.approx(expected, abs=1e-6)
    correct, question = columns["correct"][10:].numpy(), columns["question_index"][10:].numpy()
    assert values["accuracy/PassAt1"] == pytest.approx(
        np.mean([correct[question == q].mean() for q in np.unique(question)])
    )


def test_undefined_values_are_nan_and_their_keys_stay() -> None:
    ones, questions = torch.ones(3), torch.arange(3)
    metrics = CalibrationMetrics()
    metrics.update(0.5 * ones, ones, ones, questions, ["a"] * 3, ones)
    values = metrics.compute()
    assert math.isnan(values["discrimination/AUROC"])
    assert math.isnan(values["discrimination/WithinQuestionAUROC"])
    assert math.isnan(values["target/Spearman"])
    assert values["discrimination/MixedQuestions"] == 0
    lost = CalibrationMetrics()
    lost.update(NAN * ones, ones, ones, questions, ["a"] * 3, ones)
    assert set(lost.compute()) == set(values)
    assert math.isnan(lost.compute()["calibration/ECE"])
    assert lost.compute()["accuracy/PassAt1"] == 1.0


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_seen_counts_zero() -> None:
    values = CalibrationMetrics().compute()
    assert values.pop("mass/YesNo") != 0.0
    assert values == dict.fromkeys(values, 0.0)
    assert {key.split("/")[0] for key in values} == {"count"}


def test_points_give_back_the_columns() -> None:
    columns = _columns(30)
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a", "längerer Name", "b"] * 10)
    points = metrics.points()
    order = np.argsort(points.confidence)
    expected = np.argsort(columns["confidence"].numpy())
    assert points.task[order].tolist() == np.array(["a", "längerer Name", "b"] * 10)[expected].tolist()
    for key in columns:
        np.testing.assert_array_equal(getattr(points, key)[order], columns[key].double().numpy()[expected])


def test_task_must_name_every_row() -> None:
    with pytest.raises(ValueError, match="Expected `task` to name the task of all 4 rows, but got 1"):
        CalibrationMetrics().update(**_columns(4), task=["a"])


def test_confidence_that_is_no_probability_is_refused() -> None:
    columns = _columns(4)
    columns["confidence"] += 2.0
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a"] * 4)
    with pytest.raises(ValueError, match=r"Expected `confidence` to lie in \[0, 1\]"):
        metrics.compute()
