import csv
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from support.number_pools import write_number_pool
from support.strategy_pools import random_pool

from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.inference.base import Ask, Solving, make_verdict
from selfcal_lightning.inference.registry import STRATEGIES
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import fit_goal_threshold, grid_outcome
from selfcal_lightning.inference.vectorised import PoolArrays, curve_of, replayed_curve
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.records import Question, QuestionSamples


@dataclass(frozen=True)
class OwnStopping:
    """Early stopping, written without arrays."""

    name: ClassVar[str] = "own_stopping"
    grid_parameter: ClassVar[str] = "threshold"

    threshold: float = 0.8
    max_samples: int = 4
    confidence: str | None = "p_true"

    def solve(self, question: Question) -> Solving:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return EarlyStopping(**named).solve(question)


@dataclass(frozen=True)
class OwnVote:
    """A vote that reads texts, which arrays do not hold."""

    name: ClassVar[str] = "own_vote"
    grid_parameter: ClassVar[str] = "max_samples"

    max_samples: int = 4
    confidence: str | None = None

    def solve(self, question: Question) -> Solving:
        seen = yield Ask(self.max_samples)
        longest = max((sample for sample in seen if sample.answer is not None), key=lambda s: len(s.text), default=None)
        answer = None if longest is None else longest.answer
        return make_verdict(question, seen, answer, confidence=None, stopped_early=False)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_gives_what_the_vectorised_form_gives(seed: int) -> None:
    pool = random_pool(seed)
    arrays, grid = PoolArrays.from_samples(pool, confidence="p_true"), (0.0, 0.3, 0.7, 1.0)
    assert not hasattr(OwnStopping(), "curve")
    expected, found = EarlyStopping(max_samples=4).curve(arrays, grid), curve_of(OwnStopping(), arrays, grid)
    for name in ("answer", "used", "stopped_early"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    budgets = (1, 2, 4)
    plain, vote = PoolArrays.from_samples(pool), SelfConsistency()
    replayed, curve = replayed_curve(vote, plain, budgets), vote.curve(plain, budgets)
    np.testing.assert_array_equal(replayed.answer, curve.answer)
    np.testing.assert_array_equal(replayed.used, curve.used)


def even_pool() -> list[QuestionSamples]:
    return [entry for entry in random_pool(5) if len(entry.samples) >= 4]


def test_orders_are_replayed_sample_by_sample() -> None:
    pool = even_pool()
    grid, options = (0.2, 0.6, 0.9), {"num_reshuffles": 7, "seed": 3}
    expected = grid_outcome(EarlyStopping(max_samples=4), pool, grid, **options)
    found = grid_outcome(OwnStopping(), pool, grid, **options)
    np.testing.assert_array_equal(found.sum_correct, expected.sum_correct)
    np.testing.assert_array_equal(found.sum_samples, expected.sum_samples)
    assert fit_goal_threshold(OwnStopping(), pool, "budget", 3.0, grid, **options).threshold == (
        fit_goal_threshold(EarlyStopping(max_samples=4), pool, "budget", 3.0, grid, **options).threshold
    )


def test_a_strategy_without_a_grid_is_told_what_it_lacks() -> None:
    @dataclass(frozen=True)
    class Nameless:
        name: ClassVar[str] = "nameless"
        max_samples: int = 2
        confidence: str | None = None

        def solve(self, question: Question) -> Solving:
            """Not asked for: what is missing is told before."""
            raise AssertionError("solve was called")

    with pytest.raises(ValueError, match=r"Expected nameless to name the field .* as `grid_parameter`"):
        fit_goal_threshold(Nameless(), even_pool(), "budget", 1.0, (1,))


def test_evaluate_runs_registered_strategies_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "own_vote", OwnVote)
    monkeypatch.setitem(STRATEGIES, "own_stopping", OwnStopping)
    write_pool(tmp_path / "pool.jsonl")
    labels = ["own_vote", "own_stopping", "early_stopping"]
    results = run_evaluate(
        output_dir=str(tmp_path / "out"), pools={"mine": str(tmp_path / "pool.jsonl")}, strategies=labels,
        confidences=["p_true"], thresholds=[0.0, 0.5, 0.9], num_reshuffles=4, num_resamples=5, tables="short",
    )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "out" / "curves.csv").open()))

    def found(label: str) -> dict[str, tuple[str, str]]:
        mine = [row for row in rows if row["strategy"] == label]
        return {
            row["setting"]: (row["accuracy"], row["samples"]) for row in mine if row["setting"] in ("0.0", "0.5", "0.9")
        }

    assert found("own_stopping") == found("early_stopping") != {}
    # The right answer has the longest text, so that with all samples at hand it is always taken.
    best = [float(row["accuracy"]) for row in rows if row["strategy"] == "own_vote"]
    assert max(best) == 1.0
    assert "strategies" in results


def write_pool(path: Path) -> None:
    right = {"text": "After some thought it is 1.", "answer": "1", "tokens": 5, "confidence": {"p_true": 0.8}}
    wrong = {"text": "2.", "answer": "2", "tokens": 5, "confidence": {"p_true": 0.4}}
    orders = [[right, wrong, right, wrong], [wrong, right, wrong, wrong]]
    write_number_pool(path, {f"q{number}": orders[number % 2] for number in range(20)})
