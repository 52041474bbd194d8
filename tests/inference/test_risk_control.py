import math
from math import comb

import numpy as np
import pytest

from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.metrics.risk import (
    binomial_p_value,
    certify_threshold,
    guided_grid,
    hoeffding_bentkus_p_value,
    questions_needed,
    reject,
    selective_counts,
)


def _binomial_tail(wrong: int, answered: int, risk: float) -> float:
    return math.fsum(comb(answered, k) * risk**k * (1 - risk) ** (answered - k) for k in range(wrong + 1))


@pytest.mark.parametrize("risk", [0.05, 0.3])
def test_binomial_p_value_is_the_exact_tail(risk: float) -> None:
    for answered in (1, 7, 60):
        for wrong in range(answered + 1):
            found = float(binomial_p_value(wrong, answered, risk=risk))
            assert found == pytest.approx(_binomial_tail(wrong, answered, risk), abs=1e-12)
    assert float(binomial_p_value(0, 0, risk=risk)) == 1.0


def test_hoeffding_bentkus_p_value_by_its_formula() -> None:
    for mean, n, risk in ((0.0, 20, 0.1), (0.05, 200, 0.1), (0.3, 10, 0.1), (0.123, 57, 0.4)):
        low = min(mean, risk)
        h = (low * math.log(low / risk) if low else 0.0) + (1 - low) * math.log((1 - low) / (1 - risk))
        bentkus = math.e * _binomial_tail(math.ceil(n * mean - 1e-9), n, risk)
        expected = min(math.exp(-n * h), bentkus, 1.0)
        assert float(hoeffding_bentkus_p_value(mean, n, risk=risk)) == pytest.approx(expected, rel=1e-9)
    assert float(hoeffding_bentkus_p_value(0.0, 0, risk=0.1)) == 1.0


def test_fixed_sequence_stops_at_the_first_failure_and_bonferroni_does_not() -> None:
    p_values = [0.02, 0.03, 0.2, 0.001, 0.001]
    assert reject(p_values, delta=0.05, procedure="fixed_sequence").tolist() == [True, True, False, False, False]
    # Two starts, at 0 and at 5 * 1 // 2 = 2, each at .025: the first goes one step, the second none.
    found = reject(p_values, delta=0.05, procedure="fixed_sequence", num_starts=2)
    assert found.tolist() == [True, False, False, False, False]
    # Five starts are Bonferroni's: .01 each.
    for procedure, starts in (("bonferroni", 1), ("fixed_sequence", 5), ("fixed_sequence", 9)):
        found = reject(p_values, delta=0.05, procedure=procedure, num_starts=starts)  # type: ignore[arg-type]
        assert found.tolist() == [False, False, False, True, True]


def test_counts_are_at_or_above_the_threshold() -> None:
    confidence = np.array([0.5, 0.9, -np.inf, 0.5, 0.1])
    loss = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    answered, total = selective_counts(confidence, loss, np.array([1.0, 0.9, 0.5, 0.1, 0.0]))
    assert answered.tolist() == [0, 1, 3, 4, 4]  # -inf is never answered
    assert total.tolist() == [0.0, 0.0, 1.0, 2.0, 2.0]


# Confidence is uniform and right with probability c: the error rate at or above t is (1 - t) / 2, .1 at t = .8. The
# grid has a threshold just below, whose risk is .1025: the hardest one to refuse.
GRID = np.round(np.arange(0.995, 0.0, -0.005), 3)
RISK, DELTA, NUM_QUESTIONS, NUM_SETS = 0.1, 0.1, 1000, 2000


def _simulate(draw: np.random.Generator, num_questions: int = NUM_QUESTIONS) -> tuple[Floats, Floats]:
    confidence = draw.random(num_questions)
    return confidence, (draw.random(num_questions) >= confidence).astype(float)


def _slack(num_sets: int) -> float:
    """Return three standard errors of a share DELTA of the simulated sets."""
    return 3.0 * math.sqrt(DELTA * (1 - DELTA) / num_sets)


@pytest.mark.parametrize(
    ("procedure", "num_sets"),
    [
        ("fixed_from_promising", NUM_SETS),
        ("guided", NUM_SETS),
        ("fixed_from_top", 500),
        ("ten_starts", 500),
        ("bonferroni", 500),
        ("hoeffding_bentkus", 500),
    ],
)
def test_the_stated_error_level_holds(procedure: str, num_sets: int) -> None:
    draw = np.random.default_rng(7)
    settings: dict = {
        "ten_starts": {"num_starts": 10},
        "bonferroni": {"procedure": "bonferroni"},
        "hoeffding_bentkus": {"test": "hoeffding_bentkus"},
    }.get(procedure, {})
    grid = GRID[GRID <= 0.88] if procedure in ("fixed_from_promising", "hoeffding_bentkus") else GRID
    violations = certified = 0
    for _ in range(num_sets):
        confidence, loss = _simulate(draw)
        if procedure == "guided":
            grid = guided_grid(*_simulate(draw), num_questions=NUM_QUESTIONS, risk=RISK)
        found = certify_threshold(confidence, loss, grid, risk=RISK, delta=DELTA, **settings)
        violations += found.threshold is not None and (1.0 - found.threshold) / 2.0 > RISK
        certified += found.threshold is not None
    assert violations / num_sets <= DELTA + _slack(num_sets)
    if procedure in ("fixed_from_promising", "guided"):
        # It is no empty promise either: something is certified more often than not.
        assert certified / num_sets > 0.5


def test_a_grid_from_the_calibration_questions_themselves_breaks_the_level() -> None:
    """Where to begin is chosen on the test's own questions, and luck is chosen with it: what `guided_grid` must not do.

    Confidence says nothing here: every threshold has risk .12, so that anything certified is a violation.
    """
    draw = np.random.default_rng(11)
    own = other = 0
    for _ in range(600):
        sets = [(draw.random(200), (draw.random(200) < 0.12).astype(float)) for _ in range(2)]
        certified = []
        for source in sets:
            grid = guided_grid(*source, num_questions=200, risk=0.12)
            certified.append(certify_threshold(*sets[0], grid, risk=0.12, delta=DELTA).threshold is not None)
        own, other = own + certified[0], other + certified[1]
    assert other / 600 <= DELTA + _slack(600)
    assert own / 600 > DELTA + 3.0 * _slack(600)


def test_the_threshold_that_answers_most_is_taken_and_its_numbers_are_right() -> None:
    confidence = np.repeat([0.9, 0.6, 0.3], 50)
    loss = np.concatenate([np.zeros(50), [1.0], np.zeros(49), np.ones(50)])
    found = certify_threshold(confidence, loss, [0.9, 0.6, 0.3], risk=0.1, delta=0.05)
    assert (found.threshold, found.num_answered, found.loss, found.num_certified) == (0.6, 100, 1.0, 2)
    assert found.p_value == pytest.approx(0.9**100 + 100 * 0.1 * 0.9**99, rel=1e-9)
    assert "confidence 0.95" in found.message


def test_no_threshold_says_how_many_questions_are_missing() -> None:
    # Twenty right answers: .9 ** 20 = .12 exceeds .1.
    found = certify_threshold([0.9] * 20, [0.0] * 20, [0.5], risk=0.1, delta=0.1)
    assert found.threshold is None
    assert (found.num_answered, found.p_value, found.shortfall) == (0, 1.0, "questions")
    needed = questions_needed([0.9] * 20, [0.0] * 20, [0.5], risk=0.1, delta=0.1)
    assert needed is not None
    assert f"about {needed - 20} more would be needed" in found.message
    # The guarded error rate is .5 / 21: less than one wrong answer. Without any, 22 answers do it (.9 ** 22 = .098);
    # with one, 38 (P(Bin(38, .1) <= 1) = .095). The estimate lies between.
    assert 22 < needed < 38
    half_answered = questions_needed([0.9] * 20 + [0.1] * 20, [0.0] * 40, [0.5], risk=0.1, delta=0.1)
    assert half_answered == 2 * needed


def test_that_many_questions_certify_about_half_of_the_time() -> None:
    draw = np.random.default_rng(5)
    needed = questions_needed([0.9] * 400, [1.0] * 20 + [0.0] * 380, [0.5], risk=0.1, delta=0.01)
    assert needed is not None
    certified = [
        certify_threshold(
            np.full(needed, 0.9), (draw.random(needed) < 0.05).astype(float), [0.5], risk=0.1, delta=0.01
        ).threshold
        is not None
        for _ in range(400)
    ]
    assert 0.35 < np.mean(certified) < 0.75


def test_no_promise_where_nothing_looks_good_or_the_start_is_unreachable() -> None:
    bad = certify_threshold([0.9] * 50, [1.0] * 50, [0.5], risk=0.1)
    assert "more questions would not help" in bad.message
    unreachable = certify_threshold([0.9] * 100, [0.0] * 100, [0.99, 0.5], risk=0.1)
    assert unreachable.threshold is None
    assert "the others were not tested" in unreachable.message
    too_high = certify_threshold([-0.5] * 100 + [-math.inf], [0.0] * 100 + [1.0], [0.5, 0.0], risk=0.1)
    assert "above all confidences, of which -0.5 is the highest" in too_high.message
    assert [found.shortfall for found in (bad, unreachable, too_high)] == ["ranking", "start", "grid"]
    assert certify_threshold([-math.inf] * 9, [1.0] * 9, [0.5], risk=0.1).shortfall == "ranking"
    assert certify_threshold([0.9] * 100, [0.0] * 100, [0.99, 0.5], risk=0.1, num_starts=2).threshold == 0.5


def test_guided_grid_begins_where_the_case_is_clearest() -> None:
    # Ten answers at 1 and above are too few for 20 questions; at .5 all forty are answered, with one error.
    confidence, loss = [1.0] * 2 + [0.5] * 38, [0.0] * 39 + [1.0]
    assert guided_grid(confidence, loss, num_questions=200, risk=0.2).tolist() == [0.5]
    confidence, loss = [1.0] * 20 + [0.5] * 20, [0.0] * 20 + [1.0] * 20
    assert guided_grid(confidence, loss, num_questions=200, risk=0.2).tolist() == [1.0, 0.5]
    with pytest.raises(ValueError, match="at least one finite value"):
        guided_grid([-math.inf], [1.0], num_questions=5, risk=0.2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": [0.5]}, "0 and 1"),
        *(({name: value}, f"`{name}` .* {value}") for name, value in (("risk", 0.0), ("risk", 1.0), ("delta", 1.0))),
        ({"confidence": [math.nan]}, "`grid` of finite"),
        ({"grid": []}, "`grid` of finite"),
        ({"grid": [math.inf]}, "`grid` of finite"),
        ({"procedure": "holm"}, "`procedure`"),
        ({"num_starts": 0}, "`num_starts` .* 0"),
    ],
)
def test_bad_arguments_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certify_threshold(**{"confidence": [0.5], "loss": [0.0], "grid": [0.5], "risk": 0.1, **changes})
