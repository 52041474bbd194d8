"""States under two processes, pickling, resets and casts: the same for every metric."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torchmetrics import Metric

from selfcal_lightning.capability.metrics import CapabilityMetrics
from selfcal_lightning.metrics.streaming import BinnedCalibrationError, ConfidenceAUROC, WithinQuestionAUROC
from selfcal_lightning.rewards.metrics import QuantileMetrics, StepMetrics
from selfcal_lightning.training.metrics import CalibrationMetrics

Batch = dict[str, Any]

METRICS: dict[str, tuple[Callable[[], Metric], tuple[str, ...]]] = {
    "ece": (BinnedCalibrationError, ("confidence", "correct")),
    "auroc": (ConfidenceAUROC, ("confidence", "correct")),
    "within": (WithinQuestionAUROC, ("confidence", "correct", "question_index")),
    "collection": (
        CalibrationMetrics,
        ("confidence", "correct", "target", "question_index", "task", "yes_no_mass"),
    ),
    "capability": (CapabilityMetrics, ("confidence", "num_correct", "num_samples")),
    "steps": (StepMetrics, ("confidence", "rate", "num_rollouts", "position")),
    "quantiles": (QuantileMetrics, ("target", "confidence", "rate", "position")),
}
# Those that keep sums: sums of two partial sums may differ in the last bits.
SUMS = ("ece", "steps", "quantiles")
# Which of the eight batches each of two processes sees: uneven, an empty second, an empty first process.
DEALS = {"uneven": ([0, 2, 4, 5, 6, 7], [1, 3]), "empty second": (list(range(8)), []), "empty first": ([], [0, 3, 5])}


def _batches() -> list[Batch]:
    """Return eight batches of uneven size; the odd ones are of a task of their own, which a process may never meet."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(8):
        size = 5 + 3 * number
        confidence = torch.rand(size, generator=generator).mul(20).round().div(20)
        correct = (torch.rand(size, generator=generator) < confidence).float()
        num_rollouts = torch.randint(1, 9, (size,), generator=generator)
        batches.append(
            {
                "confidence": confidence,
                "correct": correct,
                "target": torch.rand(size, generator=generator),
                "question_index": torch.randint(6, (size,), generator=generator),
                "task": ["choice à la carte" if number % 2 else "arithmetic"] * size,
                "yes_no_mass": torch.rand(size, generator=generator),
                "num_correct": torch.randint(9, (size,), generator=generator),
                "num_samples": torch.full((size,), 8),
                "num_rollouts": num_rollouts,
                "rate": (confidence * num_rollouts).round() / num_rollouts,
                # A position that only the odd batches have, which a process may never meet.
                "position": torch.randint(4, (size,), generator=generator) + number % 2,
            }
        )
    return batches


def _computed(name: str, batches: list[Batch], *, cast: Callable[[Metric], Any] = lambda metric: None) -> Any:
    metric_class, arguments = METRICS[name]
    metric = metric_class()
    for batch in batches:
        metric.update(*(batch[argument] for argument in arguments))
    cast(metric)
    return _plain(metric.compute())


def _plain(value: Tensor | dict[str, float]) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _in_a_group(folder: Path) -> dict[str, Any]:
    """Return every metric on this process's share of every deal."""
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
    values["after points"] = _plain(collection.compute())
    torch.distributed.destroy_process_group()
    return values


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two gloo processes computed."""
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
def test_pickle_keeps_states(name: str) -> None:
    def roundtrip(metric: Metric) -> None:
        again = pickle.loads(pickle.dumps(metric))  # noqa: S301 - our own object
        assert _plain(again.compute()) == expected

    expected = _computed(name, _batches())
    assert _computed(name, _batches(), cast=roundtrip) == expected


@pytest.mark.parametrize("name", METRICS)
def test_reset_forgets(name: str) -> None:
    metric_class, arguments = METRICS[name]
    metric = metric_class()
    first, *rest = _batches()
    metric.update(*(first[argument] for argument in arguments))
    metric.compute()
    metric.reset()
    for batch in rest:
        metric.update(*(batch[argument] for argument in arguments))
    assert _plain(metric.compute()) == _computed(name, rest)


@pytest.mark.parametrize("name", METRICS)
def test_forward_gives_the_batch_and_keeps_the_whole(name: str) -> None:
    metric_class, arguments = METRICS[name]
    metric = metric_class()
    batches = _batches()
    for batch in batches:
        value = _plain(metric(*(batch[argument] for argument in arguments)))
        assert value == pytest.approx(_computed(name, [batch]), nan_ok=True)
    assert _plain(metric.compute()) == pytest.approx(_computed(name, batches), abs=1e-15)


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


@pytest.mark.parametrize("name", [name for name in METRICS if name != "collection"])
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_nothing_seen_is_nan(name: str) -> None:
    assert _computed(name, []) != _computed(name, [])


@pytest.mark.parametrize("name", METRICS)
def test_uneven_columns_are_refused(name: str) -> None:
    batch, second = _batches()[0], METRICS[name][1][1]
    batch[second] = batch[second][:-1]
    with pytest.raises(ValueError, match=r"Expected `\w+`, `\w+`.* to have the same shape \[B\]"):
        _computed(name, [batch])
