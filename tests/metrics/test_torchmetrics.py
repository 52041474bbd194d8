import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from support.processes import run_processes
from torch import Tensor, nn
from torchmetrics import Metric

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.data.steps import POSITIONS
from selfcal_lightning.metrics import calibration
from selfcal_lightning.metrics.discrimination import auroc, spearman, within_question_discrimination
from selfcal_lightning.metrics.streaming import BinnedCalibrationError, ConfidenceAUROC, WithinQuestionAUROC
from selfcal_lightning.rewards.metrics import QuantileMetrics, StepMetrics
from selfcal_lightning.training.losses import pinball_loss
from selfcal_lightning.training.metrics import KEYS, CalibrationMetrics

Batch = dict[str, Any]

METRICS: dict[str, tuple[Callable[[], Metric], tuple[str, ...]]] = {
    "ece": (BinnedCalibrationError, ("confidence", "correct")),
    "auroc": (ConfidenceAUROC, ("confidence", "correct")),
    "within": (WithinQuestionAUROC, ("confidence", "correct", "question_index")),
    "collection": (CalibrationMetrics, ("confidence", "correct", "target", "question_index", "task", "yes_no_mass")),
    "capability": (CapabilityMetrics, ("confidence", "num_correct", "num_samples")),
    "steps": (StepMetrics, ("confidence", "rate", "num_rollouts", "position")),
    "quantiles": (QuantileMetrics, ("target", "confidence", "rate", "position")),
}

# Those that keep sums: sums of two partial sums may differ in the last bits.
SUMS = ("ece", "steps", "quantiles")

# Which of the eight batches each of two processes sees: uneven, an empty second, an empty first process.
DEALS = {"uneven": ([0, 2, 4, 5, 6, 7], [1, 3]), "empty second": (list(range(8)), []), "empty first": ([], [0, 3, 5])}


def _columns(size: int = 400, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(size, generator=generator).mul(20).round().div(20)
    return {
        "confidence": confidence,
        "correct": (torch.rand(size, generator=generator) < confidence).float(),
        "target": (confidence + 0.2 * torch.randn(size, generator=generator)).clamp(0.0, 1.0),
        "question_index": torch.randint(25, (size,), generator=generator),
        "yes_no_mass": torch.rand(size, generator=generator),
    }


def _batches() -> list[Batch]:
    """Return eight batches of uneven size; the odd ones have a task and a position that a process may never meet."""
    generator, batches = torch.Generator().manual_seed(0), []
    for number, size in enumerate(range(5, 29, 3)):
        columns = _columns(size, seed=number)
        rollouts = torch.randint(1, 9, (size,), generator=generator)
        more = {
            "question_index": columns["question_index"] % 6,
            "task": ["choice à la carte" if number % 2 else "arithmetic"] * size,
            "num_correct": torch.randint(9, (size,), generator=generator),
            "num_samples": torch.full((size,), 8),
            "num_rollouts": rollouts,
            "rate": (columns["confidence"] * rollouts).round() / rollouts,
            "position": torch.randint(4, (size,), generator=generator) + number % 2,
        }
        batches.append(columns | more)
    return batches


def plain(value: Tensor | dict[str, float]) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _computed(name: str, batches: list[Batch], *, cast: Callable[[Metric], Any] = lambda metric: None) -> Any:
    metric_class, arguments = METRICS[name]
    metric = metric_class()
    for batch in batches:
        metric.update(*(batch[argument] for argument in arguments))
    cast(metric)
    return plain(metric.compute())


def _in_a_group(folder: Path) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    batches = _batches()
    values = {
        f"{deal}/{name}": _computed(name, [batches[i] for i in shares[rank]])
        for deal, shares in DEALS.items()
        for name in METRICS
    }
    metric = BinnedCalibrationError()
    collection = CalibrationMetrics()
    for batch in batches if rank else []:
        metric.update(batch["confidence"], batch["correct"])
        collection.update(*(batch[argument] for argument in METRICS["collection"][1]))
    values["bins"] = metric.bins().count.tolist()
    values["points"] = collection.points().confidence.tolist()
    values["after points"] = plain(collection.compute())
    torch.distributed.destroy_process_group()
    return values


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_processes(_in_a_group, folder / "processes", folder)


@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("name", METRICS)
def test_two_processes_equal_one(ranks: list[dict[str, Any]], deal: str, name: str) -> None:
    batches = _batches()
    alone = _computed(name, [batches[i] for share in DEALS[deal] for i in share])
    for values in ranks:
        together = values[f"{deal}/{name}"]
        assert together == (pytest.approx(alone, rel=0.0, abs=1e-14) if name in SUMS else alone)


def test_diagrams_see_the_responses_of_all_processes(ranks: list[dict[str, Any]]) -> None:
    confidence = torch.cat([batch["confidence"] for batch in _batches()])
    for values in ranks:
        assert sum(values["bins"]) == len(confidence)
        assert sorted(values["points"]) == sorted(confidence.double().tolist())
        assert values["after points"] == _computed("collection", _batches())


@pytest.mark.parametrize("name", METRICS)
def test_forward_reset_and_pickle(name: str) -> None:
    metric_class, arguments = METRICS[name]
    metric = metric_class()
    batches = _batches()
    for batch in batches:
        value = plain(metric(*(batch[argument] for argument in arguments)))
        assert value == pytest.approx(_computed(name, [batch]), nan_ok=True)
    assert plain(metric.compute()) == pytest.approx(_computed(name, batches), abs=1e-15)
    metric.reset()
    for batch in batches[1:]:
        metric.update(*(batch[argument] for argument in arguments))
    again = pickle.loads(pickle.dumps(metric))  # noqa: S301 - our own object
    assert plain(again.compute()) == plain(metric.compute()) == _computed(name, batches[1:])


@pytest.mark.parametrize("name", METRICS)
def test_casting_the_module_leaves_the_states_in_float64(name: str) -> None:
    class Holder(nn.Module):
        def __init__(self, metric: Metric) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.metric = metric

    def cast(metric: Metric) -> None:
        assert Holder(metric).to(torch.bfloat16).weight.dtype == torch.bfloat16

    assert _computed(name, _batches(), cast=cast) == _computed(name, _batches())
    metric = METRICS[name][0]()
    Holder(metric).to(torch.bfloat16)
    metric.reset()
    floats = [state for state in metric.metric_state.values() if isinstance(state, Tensor)]
    assert all(state.dtype == torch.float64 for state in floats)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_input_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    def rounded(batch: Batch, to: torch.dtype) -> Batch:
        columns = {key: batch[key].to(dtype).to(to) for key in ("confidence", "correct", "target", "yes_no_mass")}
        return batch | columns

    low = [rounded(batch, dtype) for batch in _batches()]
    wide = [rounded(batch, torch.float64) for batch in _batches()]
    assert _computed(name, low) == _computed(name, wide)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_seen_is_nan_and_an_empty_diagram(name: str) -> None:
    found = _computed(name, [])
    if name != "collection":
        assert any(map(math.isnan, found.values() if isinstance(found, dict) else [found]))
    if name in ("ece", "auroc", "collection", "capability"):
        assert "–" in METRICS[name][0]().plot()[1].get_title()


NAN = float("nan")

FAMILIES = ("calibration", "discrimination", "accuracy", "target", "mass", "stopping", "count")


def test_one_task_has_plain_keys() -> None:
    columns = _columns()
    metrics = CalibrationMetrics()
    for rows in torch.arange(400).split(90):
        metrics.update(**{key: column[rows] for key, column in columns.items()}, task=["arithmetic"] * len(rows))
    confidence, correct, target = (columns[key].double().numpy() for key in ("confidence", "correct", "target"))
    question, difference = columns["question_index"].numpy(), np.abs(confidence - target)
    within = within_question_discrimination(confidence, correct, question)
    expected = {
        "calibration/ECE": calibration.expected_calibration_error(confidence, correct),
        "calibration/MCE": calibration.reliability_bins(confidence, correct).maximum_error,
        "calibration/Brier": calibration.brier_score(confidence, correct),
        "discrimination/AUROC": auroc(confidence, correct),
        "discrimination/WithinQuestionAUROC": within.mean,
        "discrimination/WithinQuestionPairs": within.pooled,
        "discrimination/MixedQuestions": within.num_questions,
        "accuracy/PassAt1": np.mean([correct[question == q].mean() for q in np.unique(question)]),
        "target/MAE": difference.mean(),
        "target/Spearman": spearman(confidence, target),
        "target/SmoothL1": np.where(difference < 0.25, 2.0 * difference**2, difference - 0.125).mean(),
        "mass/YesNo": columns["yes_no_mass"].double().mean().item(),
        "stopping/Threshold": calibration.half_budget_threshold(columns["confidence"], columns["question_index"]),
        "count/Responses": len(confidence),
        "count/Questions": len(np.unique(question)),
        **dict.fromkeys(("count/WithoutConfidence", "count/WithoutLabel", "count/WithoutTarget"), 0),
    }
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
    together = {key: value for key, value in values.items() if key.count("/") == 1}
    assert together == pytest.approx(apart.compute(), abs=1e-12)
    assert values["count/Questions"] == 50


@pytest.mark.parametrize("unknown", ["correct", "target"])
def test_an_unknown_column_leaves_the_other_families(unknown: str) -> None:
    lost = {"correct": {"calibration", "discrimination", "accuracy"}, "target": {"target"}}[unknown]
    columns = _columns(20)
    columns[unknown][:] = NAN
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a"] * 20)
    values = metrics.compute()
    assert {key.split("/")[0] for key in values} == set(FAMILIES) - lost
    assert values["count/WithoutLabel" if unknown == "correct" else "count/WithoutTarget"] == 20


def test_partly_unknown_columns_count_what_they_leave_out() -> None:
    columns = _columns(40)
    columns["correct"][:10], columns["target"][5:15], columns["confidence"][30:] = NAN, NAN, NAN
    metrics = CalibrationMetrics()
    metrics.update(**columns, task=["a"] * 40)
    values = metrics.compute()
    assert [values[f"count/Without{name}"] for name in ("Label", "Target", "Confidence")] == [10, 10, 10]
    brier = calibration.brier_score(columns["confidence"][10:30], columns["correct"][10:30])
    assert values["calibration/Brier"] == pytest.approx(brier)
    known = np.r_[0:5, 15:30]
    expected = (columns["confidence"] - columns["target"])[known].double().abs().mean().item()
    assert values["target/MAE"] == pytest.approx(expected, abs=1e-6)
    correct, question = columns["correct"][10:].numpy(), columns["question_index"][10:].numpy()
    expected = np.mean([correct[question == q].mean() for q in np.unique(question)])
    assert values["accuracy/PassAt1"] == pytest.approx(expected)


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


def _prefixes() -> dict[str, Tensor]:
    generator = np.random.default_rng(0)
    position = generator.integers(0, len(POSITIONS) - 1, 600)
    rollouts = np.where(position == 3, 1, 8)
    truth = generator.beta(0.4, 0.4, 600)
    rate = generator.binomial(rollouts, truth) / rollouts
    score = np.clip(truth + generator.normal(0.05, 0.2, 600), 0.0, 1.0)
    columns = {
        "score": score, "rate": rate, "num_rollouts": rollouts, "position": position,
        "low": np.clip(score - 0.3, 0.0, 1.0), "high": np.clip(score + 0.3, 0.0, 1.0),
    }  # fmt: skip
    return {name: torch.tensor(column) for name, column in columns.items()}


def _steps_computed(metric: Metric, columns: dict[str, Tensor], names: list[str]) -> dict[str, float]:
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
    found = _steps_computed(StepMetrics(), columns, ["score", "rate", "num_rollouts", "position"])
    for name, part in _parts(columns):
        score, rate = part["score"], part["rate"]
        assert found[f"{name}steps/Brier"] == pytest.approx(calibration.brier_score(score, rate), abs=1e-12)
        assert found[f"{name}steps/Bias"] == pytest.approx((score - rate).mean().item(), abs=1e-12)
        error = calibration.expected_calibration_error(score, rate)
        assert found[f"{name}steps/ECE"] == pytest.approx(error, abs=1e-12)
        many = part["num_rollouts"] > 1
        noise = rate * (1.0 - rate) / (part["num_rollouts"] - 1.0)
        excess = ((score - rate) ** 2 - noise)[many].double().mean().item()
        assert found[f"{name}steps/BrierExcess"] == pytest.approx(excess, abs=1e-12, nan_ok=True)
        assert found[f"{name}count/Prefixes"] == len(score)
    assert not any(key.startswith("end/") for key in found)
    assert len(found) == 5 * 5


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_quantiles_equal_the_functions_overall_and_by_position(tolerance: float) -> None:
    columns = _prefixes()
    found = _steps_computed(QuantileMetrics(tolerance=tolerance), columns, ["low", "high", "rate", "position"])
    for name, part in _parts(columns):
        losses = pinball_loss(torch.stack([part["low"], part["high"]], dim=1), part["rate"], [0.1, 0.9])
        assert found[f"{name}steps/Pinball"] == pytest.approx(losses.mean().item(), abs=1e-12)
        beyond = {"BelowLow": part["low"] - part["rate"], "AboveHigh": part["rate"] - part["high"]}
        for key, distance in beyond.items():
            outside = (distance > tolerance + 1e-9).double().mean().item()
            assert found[f"{name}steps/{key}"] == pytest.approx(outside, abs=1e-12)
        assert found[f"{name}count/Prefixes"] == len(part["rate"])


HALF, ONE = torch.tensor([0.5]), torch.tensor([1])


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: StepMetrics().update(torch.tensor([1.5]), HALF, ONE, ONE), "`score`"),
        (lambda: StepMetrics().update(HALF, HALF, ONE, torch.tensor([5])), r"`position` .* got \[5\]"),
        (lambda: StepMetrics().update(HALF, HALF, torch.tensor([0]), ONE), "`num_rollouts` .* got 0"),
        (lambda: QuantileMetrics().update(HALF, torch.tensor([NAN]), HALF, ONE), "`high`"),
        (lambda: CalibrationMetrics().update(**_columns(4), task=["a"]), "`task` .* got 1"),
        (lambda: ConfidenceAUROC().update(torch.rand(2), ONE), r"`confidence`, `correct`.* same shape \[B\]"),
        (lambda: BinnedCalibrationError().update(torch.tensor([NAN]), ONE), "`confidence`"),
    ],
)
def test_impossible_values_are_refused(refused: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused()


CONFIDENCE = torch.tensor([0.15, 0.15, 0.85, 0.85, 0.85, 0.85])
CORRECT = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0])


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


@pytest.mark.parametrize("labelled", [True, False])
def test_the_collection_draws_labels_or_else_targets(labelled: bool) -> None:
    metric = CalibrationMetrics()
    unknown = torch.full_like(CORRECT, float("nan"))
    ones = torch.ones_like(CORRECT)
    question = torch.tensor([0, 0, 0, 1, 1, 1])
    metric.update(CONFIDENCE, CORRECT if labelled else unknown, 0.5 * ones, question, ["t"] * 6, ones)
    _, axes = metric.plot()
    assert bars(axes) == ([0.5, 0.75] if labelled else [0.5, 0.5])
    assert axes.get_ylabel() == ("accuracy" if labelled else "target")
