"""Intervals of a calibration error hold the truth, be it 0, small or large; the debiased value is nearer to it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from selfcal_lightning.capability.evaluation import share_error_bounds
from selfcal_lightning.metrics.arrays import ECE
from selfcal_lightning.metrics.bootstrap import (
    Estimate,
    ScoredResponses,
    bootstrap_interval,
    calibration_error_bounds,
    paired_bootstrap,
    question_bootstrap,
    resample_weights,
)
from selfcal_lightning.metrics.calibration import ErrorBounds, expected_calibration_error

NUM_SETS, NUM_QUESTIONS, NUM_RESPONSES, NUM_RESAMPLES = 200, 150, 6, 200
# A share of NUM_SETS intervals that hold the truth lies above this unless their level is below 95 % (three sigma).
ENOUGH = 0.95 - 3.0 * math.sqrt(0.95 * 0.05 / NUM_SETS)


def simulate(excess: float, draw: np.random.Generator, *, num_questions: int = NUM_QUESTIONS) -> ScoredResponses:
    """Draw responses that are right with their confidence less ``excess``; those to one question depend on each other.

    Confidences lie between .3 and .95, so that no chance is cut off and the population's ECE is ``excess``.
    """
    ease = draw.uniform(0.35, 0.9, size=(num_questions, 1))
    confidence = ease + draw.uniform(-0.05, 0.05, size=(num_questions, NUM_RESPONSES))
    shared, own = draw.random((num_questions, 1)), draw.random(confidence.shape)
    luck = np.where(draw.random(confidence.shape) < 0.5, shared, own)
    question = np.repeat(np.arange(num_questions), NUM_RESPONSES)
    return ScoredResponses(confidence.ravel(), (luck < confidence - excess).ravel(), question)


def columns(pool: ScoredResponses) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.asarray(pool.confidence), np.asarray(pool.correct), np.asarray(pool.question_index)


def test_the_simulated_worlds_have_the_error_that_is_claimed() -> None:
    for excess in (0.0, 0.03, 0.25):
        pool = simulate(excess, np.random.default_rng(0), num_questions=40_000)
        assert expected_calibration_error(pool.confidence, pool.correct) == pytest.approx(excess, abs=0.006)


@pytest.mark.parametrize("excess", [0.0, 0.03, 0.25])
def test_intervals_hold_the_truth(excess: float) -> None:
    draw = np.random.default_rng(7)
    held, plain, value = 0, 0, []
    for number in range(NUM_SETS):
        pool = simulate(excess, draw)
        options = {"metrics": [ECE], "num_resamples": NUM_RESAMPLES, "seed": number}
        found = bootstrap_interval(*columns(pool), **options)[ECE]
        assert found.value == pytest.approx(expected_calibration_error(pool.confidence, pool.correct))
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
        held += found.low <= excess <= found.high
        low, high = np.quantile(question_bootstrap(*columns(pool), **options)[ECE], [0.025, 0.975])
        plain += low <= excess <= high
        value.append(found.high - found.low)
    assert held / NUM_SETS >= ENOUGH
    if excess == 0.0:
        assert plain == 0, "percentiles of the resampled error never reach 0"
    if excess == 0.25:
        # Where all gaps have one sign, the interval is hardly wider than the percentiles' one.
        assert plain / NUM_SETS >= ENOUGH
    assert np.mean(value) < 0.2


@pytest.mark.parametrize(("before", "after"), [(0.25, 0.0), (0.25, 0.03), (0.03, 0.0), (0.03, 0.03)])
def test_changes_and_ratios_hold_the_truth(before: float, after: float) -> None:
    draw = np.random.default_rng(8)
    held = np.zeros(2)
    for number in range(NUM_SETS):
        pair = simulate(before, draw), simulate(after, draw)
        found = paired_bootstrap(*pair, metrics=[ECE], num_resamples=NUM_RESAMPLES, seed=number)[ECE]
        truths = (found.change, after - before), (found.ratio, after / before)
        held += [part.low <= truth <= part.high for part, truth in truths]
        assert all(part.low <= part.value <= part.high for part, _ in truths)
    assert (held / NUM_SETS >= ENOUGH).all()


def test_a_clear_change_stays_clear() -> None:
    """The price of holding the truth near 0 is paid there, not where a model gets better for all to see."""
    draw = np.random.default_rng(9)
    found = paired_bootstrap(
        simulate(0.25, draw, num_questions=600), simulate(0.05, draw, num_questions=600), metrics=[ECE]
    )[ECE]
    assert found.change.high < -0.1


def test_the_debiased_error_is_nearer_to_the_truth() -> None:
    from selfcal_lightning.metrics.calibration import debiased_calibration_error

    draw = np.random.default_rng(10)
    for excess, left_over in ((0.0, 0.65), (0.03, 0.35), (0.25, None)):
        pools = [simulate(excess, draw) for _ in range(NUM_SETS)]
        plain = np.mean([expected_calibration_error(pool.confidence, pool.correct) for pool in pools]) - excess
        debiased = np.mean([debiased_calibration_error(*columns(pool)) for pool in pools]) - excess
        if left_over is None:
            assert abs(debiased) < 0.005
        else:
            assert plain > 0.01
            assert abs(debiased) < left_over * plain


def test_debiasing_by_simulation_of_its_formula() -> None:
    """The expected absolute gaps by drawing them, instead of the folded normal's mean."""
    from selfcal_lightning.metrics.calibration import debiased_calibration_error

    draw = np.random.default_rng(11)
    confidence, correct, question = columns(simulate(0.05, draw, num_questions=80))
    slot = np.minimum((confidence * 10).astype(int), 9)
    gaps, errors = np.zeros(10), np.zeros(10)
    for bin_number in range(10):
        by_question = np.bincount(question, weights=(correct - confidence) * (slot == bin_number))
        gaps[bin_number] = by_question.sum() / len(confidence)
        errors[bin_number] = by_question.std() * math.sqrt(len(by_question)) / len(confidence)
    drawn = np.abs(gaps + errors * draw.normal(size=(400_000, 10))).sum(axis=1).mean()
    expected = 2.0 * np.abs(gaps).sum() - drawn
    assert debiased_calibration_error(confidence, correct, question) == pytest.approx(expected, abs=2e-4)
    assert debiased_calibration_error([], [], []) is None


def test_bounds_from_sums_and_of_shares_are_those_of_the_responses() -> None:
    """Every question has one estimate, against which its share of right responses is held."""
    draw = np.random.default_rng(3)
    values = draw.uniform(0.05, 0.95, NUM_QUESTIONS)
    right = draw.random((NUM_QUESTIONS, NUM_RESPONSES)) < values[:, None]
    question = np.repeat(np.arange(NUM_QUESTIONS), NUM_RESPONSES)
    of_responses = calibration_error_bounds(
        np.repeat(values, NUM_RESPONSES), right.ravel(), question, num_resamples=NUM_RESAMPLES
    )
    weights = resample_weights(NUM_QUESTIONS, num_resamples=NUM_RESAMPLES)
    found = share_error_bounds(values, right.mean(axis=1), weights)
    assert found.value == pytest.approx(of_responses.value)
    assert found.value == pytest.approx(expected_calibration_error(np.repeat(values, NUM_RESPONSES), right.ravel()))
    assert found.least == pytest.approx(of_responses.least)
    assert found.most == pytest.approx(of_responses.most)


def test_resamples_without_a_response_are_left_out_and_counted() -> None:
    weights = np.array([[0.5, 1.0, 0.0], [0.5, 0.0, 1.0]])
    bounds = ErrorBounds.from_sums(np.array([[0.5], [0.0]]), np.array([1.0, 0.0]), weights)
    assert np.isnan(bounds.least).tolist() == [False, True]
    assert Estimate.from_bounds(bounds) == Estimate(0.5, 0.5, 0.5, 1)
    nothing = ErrorBounds.from_sums(np.zeros((2, 1)), np.zeros(2), weights)
    assert Estimate.from_bounds(nothing) == Estimate(None, None, None)
    alone = ErrorBounds.from_sums(np.array([[0.5]]), np.ones(1), np.ones((1, 1)))
    assert Estimate.from_bounds(alone) == Estimate(0.5, None, None), "one question cannot be resampled"
