import json
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from support.strategy_pools import make_entry

from selfcal_lightning.confidence.base import split_hash
from selfcal_lightning.confidence.fusion import load_scorer
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.core.files import sealed
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import FittedThreshold, fit_goal_threshold, fit_risk_threshold, grid_outcome
from selfcal_lightning.inference.vectorised import Orders, PoolArrays, right_codes, with_setting
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.records import QuestionSamples, Sample, Verdict

GRID = [0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0]
SIX = EarlyStopping(max_samples=6)
ONE = EarlyStopping(threshold=0.0, max_samples=1)
FAILED = Sample("q", 0, 0, "", (), None, None, None)  # what a refused request leaves in a store


def calibrated_pool(num_questions: int, *, prefix: str = "c", length: int = 6) -> list[QuestionSamples]:
    """Responses that are right with the probability that they state."""
    draw = random.Random(f"{prefix}/0")
    pool = []
    for number in range(num_questions):
        confidences: list[float | None] = [round(draw.random(), 3) for _ in range(length)]
        answers: list[str | None] = ["a" if draw.random() < (c or 0.0) else draw.choice("bcd") for c in confidences]
        pool.append(make_entry(answers, confidences, name=f"{prefix}{number}"))
    return pool


def test_curves_are_replays_of_the_orders() -> None:
    """The orders and the verdicts on them, one question at a time."""
    pool = [*calibrated_pool(15), *calibrated_pool(10, prefix="long", length=8)]
    strategy = EarlyStopping(max_samples=5)
    found = grid_outcome(strategy, pool, GRID, num_reshuffles=2, seed=3)
    (block,) = Orders(np.array([len(entry.samples) for entry in pool]), 5, 2, 3).blocks()
    for row, value in enumerate(GRID):
        verdicts = [
            replay(replace(strategy, threshold=value), replace(entry, samples=tuple(entry.samples[i] for i in order)))
            for entry, order in zip(pool * 2, block.position.tolist(), strict=True)
        ]
        assert found.accuracy[row] == pytest.approx(np.mean([bool(verdict.correct) for verdict in verdicts]))
        assert found.mean_samples[row] == pytest.approx(np.mean([verdict.samples_used for verdict in verdicts]))


def test_a_smaller_budget_cuts_the_same_orders_shorter() -> None:
    lengths = np.array([4, 7, 5])
    wide, narrow, recorded = (next(Orders(lengths, *sizes).blocks()).position for sizes in ((4, 6), (2, 6), (3, 0)))
    np.testing.assert_array_equal(wide[:, :2], narrow)
    assert all(set(row) <= set(range(lengths[i % 3])) for i, row in enumerate(wide.tolist()))
    assert recorded.tolist() == [[0, 1, 2]] * 3
    with pytest.raises(ValueError, match=r"between 1 and 4, .* 5"):
        Orders(lengths, 5)


def test_the_most_accurate_within_a_budget_or_the_cheapest_of_an_accuracy_is_taken() -> None:
    pool = calibrated_pool(80)
    outcome = grid_outcome(SIX, pool, GRID, num_reshuffles=5)
    points = list(zip(GRID, outcome.accuracy, outcome.mean_samples, strict=True))
    goal = float(np.sort(outcome.accuracy)[len(GRID) // 2])
    reaching = fit_goal_threshold(SIX, pool, "accuracy", goal, GRID, num_reshuffles=5)
    enough = [(samples, value) for value, accuracy, samples in points if accuracy >= goal]
    assert (reaching.achieved["mean_samples"], reaching.threshold) == min(enough)
    fitted = fit_goal_threshold(SIX, pool, "budget", 3.0, GRID, num_reshuffles=5)
    allowed = [(accuracy, -samples, value) for value, accuracy, samples in points if samples <= 3.0]
    accuracy, samples, threshold = max(allowed)
    assert fitted.threshold == threshold
    assert fitted.achieved == {"accuracy": accuracy, "mean_samples": -samples}
    assert 0.0 < threshold < 1.0
    assert fitted.delta is None
    # All thresholds above the highest confidence use every sample and decide alike: the cheapest is the first of them.
    same = fit_goal_threshold(SIX, pool, "budget", 6.0, [1.0, 0.9999], num_reshuffles=1)
    assert same.threshold == 1.0


def test_a_number_of_samples_may_be_chosen_too_and_stays_whole() -> None:
    fitted = fit_goal_threshold(
        SelfConsistency(max_samples=6, confidence="p_true"), calibrated_pool(30), "budget", 2.5, [1, 2, 4, 6]
    )
    assert fitted.parameter == "max_samples"
    assert fitted.fields["max_samples"] in (1, 2)
    assert isinstance(fitted.fields["max_samples"], int)


def test_a_plug_in_s_parameter_may_be_a_fraction() -> None:
    @dataclass(frozen=True)
    class Doubting(SelfConsistency):
        name: ClassVar[str] = "doubting"
        grid_parameter: ClassVar[str] = "margin"
        margin: float = 0.5

    (low, high) = (with_setting(Doubting(), value) for value in (0.25, 1.0))
    assert (low, high) == (Doubting(margin=0.25), Doubting(margin=1.0))


def test_correctness_of_answers_by_the_first_sample_that_gave_them() -> None:
    pool = PoolArrays.from_samples([make_entry(["b", "a", None], [0.5, 0.5, 0.5]), make_entry([None], [0.5], name="r")])
    right = right_codes(pool.answer, pool.correct)
    answer = np.array([[0, -1], [1, -1], [-1, -1]])
    assert right[[0, 1], answer].tolist() == [[False, False], [True, False], [False, False]]
    contradicting = right_codes(np.array([[0, 0]], dtype=np.int32), np.array([[False, True]]))
    assert contradicting.tolist() == [[False, False]]


# Learn then Test


def test_risk_threshold_keeps_its_promise_on_new_questions() -> None:
    """Verdicts of one sample, right with the confidence stated: R(t) = (1 - t) / 2 is .2 at t = .6."""
    fitted = fit_risk_threshold(
        ONE, calibrated_pool(600, length=1), risk=0.2, delta=0.1, guide=calibrated_pool(300, prefix="g", length=1)
    )
    assert fitted.threshold is not None
    assert 0.6 <= fitted.threshold < 0.8
    assert fitted.parameter is None
    verdicts = [replay(ONE, entry) for entry in calibrated_pool(3000, prefix="t", length=1)]
    given = [verdict for verdict in verdicts if fitted.answers(verdict)]
    wrong = sum(not verdict.correct for verdict in given) / len(given)
    assert wrong == pytest.approx((1.0 - fitted.threshold) / 2.0, abs=0.04)
    assert len(given) / 3000 == pytest.approx(1.0 - fitted.threshold, abs=0.04)


def test_numbers_on_the_calibration_questions() -> None:
    pool = calibrated_pool(400, length=1)
    fitted = fit_risk_threshold(ONE, pool, risk=0.3, grid=[0.6])
    given = [entry.samples[0] for entry in pool if (entry.samples[0].p_true or 0.0) >= 0.6]
    wrong = sum(not sample.correct for sample in given)
    assert fitted.threshold == 0.6
    expected = {"num_answered": len(given), "num_wrong": wrong, "error_rate_of_answered": wrong / len(given)}
    expected |= {"coverage": len(given) / 400, "mean_samples": 1.0}
    assert {name: fitted.achieved[name] for name in expected} == pytest.approx(expected)
    assert fitted.fitted_on.split_hash == split_hash(entry.question.id for entry in pool)


@pytest.mark.parametrize(
    ("answer", "confidence", "given"), [("a", 0.7, True), ("a", 0.69, False), ("a", None, False), (None, 0.9, False)]
)
def test_which_verdicts_are_given(answer: str | None, confidence: float | None, given: bool) -> None:
    fitted = replace(fit_risk_threshold(SIX, calibrated_pool(60), risk=0.4, grid=[0.9]), threshold=0.7)
    verdict = Verdict("q", answer, confidence, None, 1, False)
    assert fitted.answers(verdict) is given
    of_budget = fit_goal_threshold(SIX, calibrated_pool(5), "budget", 6.0, GRID, num_reshuffles=1)
    assert of_budget.answers(verdict) is (answer is not None)


def test_unanswered_questions_are_never_answered_and_never_counted_right() -> None:
    mute = [make_entry([None], [0.9], name=f"mute{number}") for number in range(30)]
    pool = [*mute, *(make_entry(["a"], [0.9], name=f"right{number}") for number in range(30))]
    fitted = fit_risk_threshold(ONE, pool, risk=0.1, grid=[0.5])
    # Thirty right answers: .9 ** 30 = .042. The mute ones would have made it hopeless.
    assert fitted.threshold == 0.5
    assert (fitted.achieved["num_answered"], fitted.achieved["coverage"]) == (30, 0.5)
    assert fitted.achieved["accuracy_without_abstaining"] == 0.5


# What is refused


def test_questions_that_a_scorer_was_fitted_on_are_refused() -> None:
    pool = calibrated_pool(40)
    scaler = fit_scaler(pool[:20], "platt", name="scaled")
    strategy = EarlyStopping(confidence="scaled", threshold=0.5, max_samples=6)
    fitted = fit_goal_threshold(strategy, pool[20:], "budget", 4.0, GRID, scorers=[scaler], num_reshuffles=1)
    assert list(fitted.scorers) == ["scaled"]
    for overlapping in (pool[19:], pool):
        with pytest.raises(ValueError, match="'scaled' was not fitted on"):
            fit_goal_threshold(strategy, overlapping, "budget", 4.0, GRID, scorers=[scaler])
        with pytest.raises(ValueError, match="'scaled' was not fitted on"):
            fit_risk_threshold(strategy, overlapping, risk=0.3, scorers=[scaler])
    # The guide may be what the scaler was fitted on; it must not be the calibration questions.
    guided = fit_risk_threshold(strategy, pool[20:], risk=0.6, scorers=[scaler], guide=pool[:20])
    assert guided.fitted_on.num_questions == 20
    with pytest.raises(ValueError, match="`pool` and `guide` to share no question, but got 1 in both"):
        fit_risk_threshold(strategy, pool[20:], risk=0.6, scorers=[scaler], guide=pool[:21])


def test_another_strategy_is_refused() -> None:
    fitted = fit_goal_threshold(SIX, calibrated_pool(20), "budget", 3.0, GRID, num_reshuffles=1)
    assert fitted.configure(replace(SIX, threshold=0.123)).threshold == fitted.threshold
    for other in (EarlyStopping(max_samples=3), SelfConsistency()):
        with pytest.raises(ValueError, match="Fit a threshold for this one"):
            fitted.configure(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SIX, calibrated_pool(5), "budget", 0.9, GRID), r"`budget` 0.9; the closest uses 1\.00"),
        ((SIX, calibrated_pool(80), "accuracy", 0.999, GRID), r"`accuracy` 0.999; the closest reaches 0\.\d{4}"),
        ((SIX, calibrated_pool(3), "budget", 3.0, []), "`grid`"),
        ((SIX, calibrated_pool(3), "budget", 3.0, [1.5]), "got 1.5"),
        ((SIX, calibrated_pool(3), "budget", 0.0), "`budget` .* 0.0"),
        ((SIX, calibrated_pool(3), "accuracy", 1.1), "`accuracy` .* 1.1"),
        ((SIX, [], "budget", 1.0), "at least one calibration question"),
        ((replace(SIX, confidence="verbalized"), calibrated_pool(3), "budget", 1.0), "--estimator verbalized"),
    ],
)
def test_bad_input_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_goal_threshold(*arguments)


def test_what_a_refusal_names_can_be_asked_for() -> None:
    for number in range(7, 12):
        pool = calibrated_pool(number)
        for goal, missed, threshold in (("budget", 0.5, 0.9), ("accuracy", 1.0, 0.0)):
            with pytest.raises(ValueError, match="Ask for that") as refused:
                fit_goal_threshold(SIX, pool, goal, missed, [threshold], num_reshuffles=3)
            named = float(re.findall(r"\d\.\d{4}", str(refused.value))[-1])
            fit_goal_threshold(SIX, pool, goal, named, [threshold], num_reshuffles=3)


def test_a_failed_request_is_wrong_but_references_are_needed_and_a_guide_or_a_grid() -> None:
    pool = calibrated_pool(10)
    pool[0] = replace(pool[0], samples=(*pool[0].samples[:5], FAILED))
    pool[1] = replace(pool[1], samples=(FAILED,) * 6)
    strategy = SelfConsistency(max_samples=6)
    fitted = fit_goal_threshold(strategy, pool, "budget", 6.0, [6], num_reshuffles=0)
    assert fitted.achieved["accuracy"] == np.mean([bool(replay(strategy, entry).correct) for entry in pool])
    pool = calibrated_pool(10)
    no_reference = [replace(e, samples=tuple(replace(s, correct=None) for s in e.samples)) for e in pool]
    with pytest.raises(ValueError, match="'c0' has none"):
        fit_risk_threshold(SIX, no_reference, risk=0.3)
    without = replace(pool[0], question=replace(pool[0].question, reference=None), samples=(FAILED,) * 6)
    with pytest.raises(ValueError, match="'c0' has none"):
        fit_risk_threshold(SIX, [without, *pool[1:]], risk=0.3)
    with pytest.raises(ValueError, match="either `guide` or `grid`"):
        fit_risk_threshold(SIX, pool, risk=0.3, guide=pool, grid=[0.5])


def test_a_threshold_survives_its_file(tmp_path: Path) -> None:
    pool = calibrated_pool(60)
    risk = fit_risk_threshold(SIX, pool, risk=0.4)
    budget = fit_goal_threshold(SIX, pool, "budget", 3.0, GRID, num_reshuffles=1)
    for number, fitted in enumerate((risk, budget, replace(risk, sampled_by={"sampling": {"temperature": 0.5}}))):
        path = tmp_path / f"{number}.json"
        fitted.save(path)
        assert FittedThreshold.load(path) == fitted
    content = json.loads(path.read_text())
    assert content["fitted_on"]["num_questions"] == 60
    del content["strategy"]
    path.write_bytes(sealed(content))
    with pytest.raises(ValueError, match="no field 'strategy'"):
        FittedThreshold.load(path)
    with pytest.raises(ValueError, match="fitted confidence"):
        fit_scaler(pool, "platt").save(path)
    scaled = tmp_path / "scaled.json"
    fit_scaler(pool, "platt").save(scaled)
    with pytest.raises(ValueError, match="one of threshold, but got 'platt'"):
        FittedThreshold.load(scaled)
    assert load_scorer(scaled).name == "p_true_platt"
