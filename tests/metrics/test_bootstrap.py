import itertools
import math

import numpy as np
import pytest

from selfcal_lightning.metrics import bootstrap, curves
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.calibration import brier_score, expected_calibration_error
from selfcal_lightning.metrics.discrimination import aurc, auroc, within_question_discrimination


def _pool(num_questions: int = 30, seed: int = 0) -> bootstrap.ScoredResponses:
    """Return responses in random order, one to eight a question, with many ties."""
    generator = np.random.default_rng(seed)
    question_index = np.repeat(np.arange(num_questions), generator.integers(1, 9, num_questions))
    generator.shuffle(question_index)
    difficulty = generator.random(num_questions)[question_index]
    confidence = (difficulty + generator.normal(0.0, 0.3, len(question_index))).clip(0.0, 1.0).round(1)
    return bootstrap.ScoredResponses(confidence, generator.random(len(question_index)) < difficulty, question_index)


def _reference_naive_resample(pool: bootstrap.ScoredResponses, counts: np.ndarray) -> dict[str, float | None]:
    """Return the metrics of the pool in which question q stands ``counts[q]`` times."""
    confidence: list[float] = []
    correct: list[bool] = []
    question: list[int] = []
    copies = 0
    for q, count in enumerate(counts.astype(int)):
        rows = np.flatnonzero(pool.question_index == q)
        for _ in range(count):
            confidence += pool.confidence[rows].tolist()
            correct += pool.correct[rows].tolist()
            question += [copies] * len(rows)
            copies += 1
    return {
        ECE: expected_calibration_error(confidence, correct),
        BRIER: brier_score(confidence, correct),
        AUROC: auroc(confidence, correct),
        WITHIN_QUESTION_AUROC: within_question_discrimination(confidence, correct, question).mean,
        PASS_AT_1: float(
            np.mean([np.mean([y for y, p in zip(correct, question, strict=True) if p == c]) for c in range(copies)])
        ),
    }


def test_auroc_of_many_responses_is_resampled_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, found = _pool(), []
    for size in (bootstrap._COUNTS_AT_ONCE, 1):
        monkeypatch.setattr(bootstrap, "_COUNTS_AT_ONCE", size)
        columns = pool.confidence, pool.correct, pool.question_index
        found.append(bootstrap.question_bootstrap(*columns, metrics=[AUROC], num_resamples=100)[AUROC])
    np.testing.assert_array_equal(*found)


def test_metrics_equal_those_of_the_resample_and_of_all_questions() -> None:
    pool = _pool()
    columns = pool.confidence, pool.correct, pool.question_index
    resampled = bootstrap.question_bootstrap(*columns, num_resamples=100, seed=3)
    counts = np.concatenate(list(bootstrap.resample_counts(30, num_resamples=100, seed=3)))
    assert counts.shape == (100, 30)
    for row in range(100):
        expected = _reference_naive_resample(pool, counts[row])
        assert {key: values[row] for key, values in resampled.items()} == pytest.approx(expected, abs=1e-12)
    estimates = bootstrap.bootstrap_interval(*columns, num_resamples=200)
    expected = _reference_naive_resample(pool, np.ones(30))
    assert {key: estimate.value for key, estimate in estimates.items()} == pytest.approx(expected, abs=1e-12)
    assert set(estimates) == set(bootstrap.BOOTSTRAP_METRICS)
    for estimate in estimates.values():
        assert estimate.low <= estimate.value + 0.05
        assert estimate.value - 0.05 <= estimate.high


def test_pairs_share_their_questions_whatever_the_order_and_number_of_responses() -> None:
    before, after = _pool(), _pool(seed=7)
    order = np.random.default_rng(1).permutation(len(after.confidence))
    shuffled = bootstrap.ScoredResponses(after.confidence[order], after.correct[order], after.question_index[order])
    changes = bootstrap.paired_bootstrap(before, after, num_resamples=64, seed=2)
    again = bootstrap.paired_bootstrap(before, shuffled, num_resamples=64, seed=2)
    counts = np.concatenate(list(bootstrap.resample_counts(30, num_resamples=64, seed=2)))
    first, second = ([_reference_naive_resample(pool, row)[BRIER] for row in counts] for pool in (before, after))
    expected = np.quantile(np.subtract(second, first), [0.025, 0.975])
    assert [changes[BRIER].change.low, changes[BRIER].change.high] == pytest.approx(expected)
    assert [again[BRIER].change.low, again[BRIER].change.high] == pytest.approx(expected)
    ratio = np.quantile(np.divide(second, first), [0.025, 0.975])
    assert [changes[BRIER].ratio.low, changes[BRIER].ratio.high] == pytest.approx(ratio)
    assert again[ECE].change.high == pytest.approx(changes[ECE].change.high)


def test_undefined_resamples_are_left_out_and_counted() -> None:
    # One question is right, one wrong: half of the resamples draw the same question twice and have no AUROC.
    mixed = [0.9, 0.1], [True, False], [0, 1]
    estimate = bootstrap.bootstrap_interval(*mixed, metrics=[AUROC], num_resamples=1000)[AUROC]
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)
    assert 400 < estimate.num_undefined < 600
    right = [0.9, 0.8], [True, True], [0, 1]
    never = bootstrap.bootstrap_interval(*right, metrics=[AUROC, WITHIN_QUESTION_AUROC], num_resamples=10)
    assert set(never.values()) == {bootstrap.Estimate(None, None, None, 10)}


def test_one_question_has_no_intervals() -> None:
    before, after = (bootstrap.ScoredResponses(c, [1, 1, 0], ["q"] * 3) for c in ([0.9, 0.8, 0.3], [0.9, 0.2, 0.3]))
    for row in bootstrap.paired_bootstrap(before, after, num_resamples=20).values():
        for found in (row.before, row.after, row.change, row.ratio):
            assert found.value is not None
            assert (found.low, found.high, found.is_positive) == (None, None, None)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"`metrics` .* \['ECE'\]"):
        bootstrap.question_bootstrap([0.5], [True], [0], metrics=["ECE"])
    with pytest.raises(ValueError, match=r"`level` .* 95"):
        bootstrap.bootstrap_interval([0.5], [True], [0], level=95.0)
    one, other = (bootstrap.ScoredResponses([0.5], [True], [number]) for number in range(2))
    with pytest.raises(ValueError, match=r"same questions, .* \[0, 1\]"):
        bootstrap.paired_bootstrap(one, other)


def _reference_mixture_cost(cost: np.ndarray, value: np.ndarray, target: float) -> float | None:
    """Cheapest setting that is good enough, or mixture of two settings that follow each other on the envelope."""
    points: list[tuple[float, float]] = []
    for price, reached in sorted(zip(cost, value, strict=True), key=lambda p: (p[0], -p[1])):
        if not points or reached > points[-1][1]:
            points.append((price, reached))
    if points[0][1] >= target:
        return points[0][0]
    for (c0, v0), (c1, v1) in itertools.pairwise(points):
        if v1 >= target:
            share = (target - v0) / (v1 - v0)
            return (1 - share) * c0 + share * c1
    return None


@pytest.mark.parametrize("seed", range(30))
def test_cost_to_reach_against_a_plain_walk(seed: int) -> None:
    generator = np.random.default_rng(seed)
    # Coarse numbers make equal costs and equal values.
    cost, value = generator.integers(1, 9, size=12) / 2.0, generator.integers(0, 7, size=12) / 8.0
    for target in np.linspace(0.0, 1.0, 21):
        expected = _reference_mixture_cost(cost, value, target)
        found = curves.cost_to_reach(cost, value, float(target))
        assert found == (None if expected is None else pytest.approx(expected)), target


def test_budgets_and_break_even_by_hand() -> None:
    cost, value = np.array([1.0, 2.0, 4.0, 3.0]), np.array([0.5, 0.75, 1.0, 0.75])
    assert curves.setting_within(cost, 3.5) == 3  # the dearest, whatever it reaches
    assert curves.best_setting_within(cost, value, 3.5) == 1  # the best, the cheaper of two equals
    assert curves.best_setting_within(cost, value, 0.5) is curves.setting_within(cost, 0.5) is None
    assert curves.cheapest_setting_reaching(cost, np.array([0.5, 0.5, 0.5, 0.75]), 0.7) == 3
    assert curves.cheapest_setting_reaching(cost, value, 0.75) == 1
    assert curves.break_even(10.0, 4.0) == 3  # after two questions 8 are earned, after three 12
    assert curves.break_even(0.0, 1.0) == 0
    assert {curves.break_even(10.0, saved) for saved in (-1.0, 0.0, None, math.nan)} == {None}


@pytest.mark.parametrize("seed", range(5))
def test_risk_coverage_without_ties_has_the_area_of_aurc(seed: int) -> None:
    generator = np.random.default_rng(seed)
    scores, labels = generator.permutation(50) / 50.0, generator.random(50) < 0.6
    curve = curves.risk_coverage(scores, labels)
    assert curve.risk.mean() == pytest.approx(aurc(scores, labels))
    assert curve.coverage[-1] == 1.0
    assert curve.risk[-1] == pytest.approx(1.0 - labels.mean())


def test_resample_weights_are_the_draws_of_the_other_bootstraps() -> None:
    values = np.random.default_rng(0).random((2, 7))
    found = values @ bootstrap.resample_weights(7, num_resamples=100, seed=3)
    counts = np.concatenate(list(bootstrap.resample_counts(7, num_resamples=100, seed=3)))
    np.testing.assert_allclose(found[:, 0], values.mean(axis=1))
    np.testing.assert_allclose(found[0, 1:], [np.repeat(values[0], row.astype(int)).mean() for row in counts])


def test_an_interval_that_reaches_into_never_is_open() -> None:
    column = np.array([3.0, *np.arange(1.0, 98.0), np.nan, np.nan, np.nan])
    cost = bootstrap.estimate_or_never(column, never=math.inf)
    assert (cost.low, cost.high, cost.num_undefined) == (3.0, None, 3)
    saving = bootstrap.estimate_or_never(-column, never=-math.inf)
    assert (saving.low, saving.high) == (None, -3.0)
    nothing = bootstrap.estimate_or_never(np.array([np.nan, 1.0]), never=math.inf)
    assert (nothing.value, nothing.low, nothing.high) == (None, None, None)
