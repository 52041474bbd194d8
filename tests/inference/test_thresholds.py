import json
import math
import random
import re
from dataclasses import replace
from math import comb
from pathlib import Path

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
from selfcal_lightning.inference.vectorised import Orders, PoolArrays, right_codes
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics import risk as ltt
from selfcal_lightning.metrics.arrays import Floats
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


def test_correctness_of_answers_by_the_first_sample_that_gave_them() -> None:
    pool = PoolArrays.from_samples([make_entry(["b", "a", None], [0.5, 0.5, 0.5]), make_entry([None], [0.5], name="r")])
    right = right_codes(pool.answer, pool.correct)
    answer = np.array([[0, -1], [1, -1], [-1, -1]])
    assert right[[0, 1], answer].tolist() == [[False, False], [True, False], [False, False]]
    contradicting = right_codes(np.array([[0, 0]], dtype=np.int32), np.array([[False, True]]))
    assert contradicting.tolist() == [[False, False]]


# Learn then Test


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
    with pytest.raises(ValueError, match="--estimator verbalized"):
        fit_goal_threshold(replace(SIX, confidence="verbalized"), pool, "budget", 1.0)


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


# ---- learn then test


def _binomial_tail(wrong: int, answered: int, risk: float) -> float:
    return math.fsum(comb(answered, k) * risk**k * (1 - risk) ** (answered - k) for k in range(wrong + 1))


@pytest.mark.parametrize("risk", [0.05, 0.3])
def test_binomial_p_value_is_the_exact_tail(risk: float) -> None:
    for answered in (1, 7, 60):
        for wrong in range(answered + 1):
            found = float(ltt.binomial_p_value(wrong, answered, risk=risk))
            assert found == pytest.approx(_binomial_tail(wrong, answered, risk), abs=1e-12)
    assert float(ltt.binomial_p_value(0, 0, risk=risk)) == 1.0


def test_hoeffding_bentkus_p_value_by_its_formula() -> None:
    for mean, n, risk in ((0.0, 20, 0.1), (0.05, 200, 0.1), (0.3, 10, 0.1), (0.123, 57, 0.4)):
        low = min(mean, risk)
        h = (low * math.log(low / risk) if low else 0.0) + (1 - low) * math.log((1 - low) / (1 - risk))
        bentkus = math.e * _binomial_tail(math.ceil(n * mean - 1e-9), n, risk)
        expected = min(math.exp(-n * h), bentkus, 1.0)
        assert float(ltt.hoeffding_bentkus_p_value(mean, n, risk=risk)) == pytest.approx(expected, rel=1e-9)
    assert float(ltt.hoeffding_bentkus_p_value(0.0, 0, risk=0.1)) == 1.0


def test_fixed_sequence_stops_at_the_first_failure_and_bonferroni_does_not() -> None:
    p_values = [0.02, 0.03, 0.2, 0.001, 0.001]
    assert ltt.reject(p_values, delta=0.05, procedure="fixed_sequence").tolist() == [True, True, False, False, False]
    # Two starts, at 0 and at 5 * 1 // 2 = 2, each at .025: the first goes one step, the second none.
    found = ltt.reject(p_values, delta=0.05, procedure="fixed_sequence", num_starts=2)
    assert found.tolist() == [True, False, False, False, False]
    # Five starts are Bonferroni's: .01 each.
    for procedure, starts in (("bonferroni", 1), ("fixed_sequence", 5), ("fixed_sequence", 9)):
        found = ltt.reject(p_values, delta=0.05, procedure=procedure, num_starts=starts)  # type: ignore[arg-type]
        assert found.tolist() == [False, False, False, True, True]


def test_counts_are_at_or_above_the_threshold() -> None:
    confidence = np.array([0.5, 0.9, -np.inf, 0.5, 0.1])
    loss = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    answered, total = ltt.selective_counts(confidence, loss, np.array([1.0, 0.9, 0.5, 0.1, 0.0]))
    assert answered.tolist() == [0, 1, 3, 4, 4]  # -inf is never answered
    assert total.tolist() == [0.0, 0.0, 1.0, 2.0, 2.0]


# Confidence is uniform and right with probability c: the error rate at or above t is (1 - t) / 2, .1 at t = .8. The
# grid has a threshold just below, whose risk is .1025: the hardest one to refuse.
STEPS = np.round(np.arange(0.995, 0.0, -0.005), 3)
RISK, DELTA, NUM_QUESTIONS, NUM_SETS = 0.1, 0.1, 1000, 2000


def _simulate(draw: np.random.Generator, num_questions: int = NUM_QUESTIONS) -> tuple[Floats, Floats]:
    confidence = draw.random(num_questions)
    return confidence, (draw.random(num_questions) >= confidence).astype(float)


@pytest.mark.parametrize(
    ("procedure", "num_sets", "settings"),
    [
        ("fixed_from_promising", NUM_SETS, {}),
        ("guided", NUM_SETS, {}),
        ("fixed_from_top", 500, {}),
        ("ten_starts", 500, {"num_starts": 10}),
        ("bonferroni", 500, {"procedure": "bonferroni"}),
        ("hoeffding_bentkus", 500, {"test": "hoeffding_bentkus"}),
    ],
)
def test_the_stated_error_level_holds(procedure: str, num_sets: int, settings: dict) -> None:
    draw = np.random.default_rng(7)
    grid = STEPS[STEPS <= 0.88] if procedure in ("fixed_from_promising", "hoeffding_bentkus") else STEPS
    violations = certified = 0
    for _ in range(num_sets):
        confidence, loss = _simulate(draw)
        if procedure == "guided":
            grid = ltt.guided_grid(*_simulate(draw), num_questions=NUM_QUESTIONS, risk=RISK)
        found = ltt.certify_threshold(confidence, loss, grid, risk=RISK, delta=DELTA, **settings)
        violations += found.threshold is not None and (1.0 - found.threshold) / 2.0 > RISK
        certified += found.threshold is not None
    slack = 3.0 * math.sqrt(DELTA * (1 - DELTA) / num_sets)  # three standard errors
    assert violations / num_sets <= DELTA + slack
    if procedure in ("fixed_from_promising", "guided"):
        # It is no empty promise either: something is certified more often than not.
        assert certified / num_sets > 0.5


def test_the_threshold_that_answers_most_is_taken_and_its_numbers_are_right() -> None:
    confidence = np.repeat([0.9, 0.6, 0.3], 50)
    loss = np.concatenate([np.zeros(50), [1.0], np.zeros(49), np.ones(50)])
    found = ltt.certify_threshold(confidence, loss, [0.9, 0.6, 0.3], risk=0.1, delta=0.05)
    assert (found.threshold, found.num_answered, found.loss, found.num_certified) == (0.6, 100, 1.0, 2)
    assert found.p_value == pytest.approx(0.9**100 + 100 * 0.1 * 0.9**99, rel=1e-9)
    assert "confidence 0.95" in found.message


def test_no_threshold_says_how_many_questions_are_missing() -> None:
    # Twenty right answers: .9 ** 20 = .12 exceeds .1.
    found = ltt.certify_threshold([0.9] * 20, [0.0] * 20, [0.5], risk=0.1, delta=0.1)
    assert found.threshold is None
    assert (found.num_answered, found.p_value, found.shortfall) == (0, 1.0, "questions")
    needed = ltt.questions_needed([0.9] * 20, [0.0] * 20, [0.5], risk=0.1, delta=0.1)
    assert needed is not None
    assert f"about {needed - 20} more would be needed" in found.message
    # The guarded error rate is .5 / 21: less than one wrong answer. Without any, 22 answers do it (.9 ** 22 = .098);
    # with one, 38 (P(Bin(38, .1) <= 1) = .095). The estimate lies between.
    assert 22 < needed < 38
    half_answered = ltt.questions_needed([0.9] * 20 + [0.1] * 20, [0.0] * 40, [0.5], risk=0.1, delta=0.1)
    assert half_answered == 2 * needed


def test_that_many_questions_certify_about_half_of_the_time() -> None:
    draw = np.random.default_rng(5)
    needed = ltt.questions_needed([0.9] * 400, [1.0] * 20 + [0.0] * 380, [0.5], risk=0.1, delta=0.01)
    assert needed is not None
    certified = [
        ltt.certify_threshold(
            np.full(needed, 0.9), (draw.random(needed) < 0.05).astype(float), [0.5], risk=0.1, delta=0.01
        ).threshold
        is not None
        for _ in range(400)
    ]
    assert 0.35 < np.mean(certified) < 0.75


def test_no_promise_where_nothing_looks_good_or_the_start_is_unreachable() -> None:
    bad = ltt.certify_threshold([0.9] * 50, [1.0] * 50, [0.5], risk=0.1)
    assert "more questions would not help" in bad.message
    unreachable = ltt.certify_threshold([0.9] * 100, [0.0] * 100, [0.99, 0.5], risk=0.1)
    assert unreachable.threshold is None
    assert "the others were not tested" in unreachable.message
    too_high = ltt.certify_threshold([-0.5] * 100 + [-math.inf], [0.0] * 100 + [1.0], [0.5, 0.0], risk=0.1)
    assert "above all confidences, of which -0.5 is the highest" in too_high.message
    assert [found.shortfall for found in (bad, unreachable, too_high)] == ["ranking", "start", "grid"]
    assert ltt.certify_threshold([-math.inf] * 9, [1.0] * 9, [0.5], risk=0.1).shortfall == "ranking"
    assert ltt.certify_threshold([0.9] * 100, [0.0] * 100, [0.99, 0.5], risk=0.1, num_starts=2).threshold == 0.5


def test_guided_grid_begins_where_the_case_is_clearest() -> None:
    # Ten answers at 1 and above are too few for 20 questions; at .5 all forty are answered, with one error.
    confidence, loss = [1.0] * 2 + [0.5] * 38, [0.0] * 39 + [1.0]
    assert ltt.guided_grid(confidence, loss, num_questions=200, risk=0.2).tolist() == [0.5]
    confidence, loss = [1.0] * 20 + [0.5] * 20, [0.0] * 20 + [1.0] * 20
    assert ltt.guided_grid(confidence, loss, num_questions=200, risk=0.2).tolist() == [1.0, 0.5]


def test_values_that_would_prove_nothing_are_refused() -> None:
    for changes, message in (({"loss": [0.5]}, "0 and 1"), ({"confidence": [math.nan]}, "`grid` of finite")):
        with pytest.raises(ValueError, match=message):
            ltt.certify_threshold(**{"confidence": [0.5], "loss": [0.0], "grid": [0.5], "risk": 0.1, **changes})
