import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from scipy import stats
from sklearn.calibration import calibration_curve
from sklearn.metrics import brier_score_loss
from support.house import Vectors

from selfcal_lightning.capability.evaluation import share_error_bounds
from selfcal_lightning.metrics import bootstrap, calibration, discrimination
from selfcal_lightning.metrics.arrays import ECE
from selfcal_lightning.metrics.calibration import brier_score, expected_calibration_error, reliability_bins
from selfcal_lightning.metrics.streaming import BinnedCalibrationError, WithinQuestionAUROC

CHANCES = st.one_of(st.floats(0.0, 1.0), st.integers(0, 20).map(lambda n: n / 20))


def _responses(size: int = 500, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    confidence = generator.random(size) ** 2
    return confidence, generator.random(size) < confidence


def _reference_naive_errors(confidence: list[float], correct: list[bool], edges: np.ndarray) -> tuple[float, float]:
    """Return ECE and MCE by one loop over bins and one over responses."""
    expected, maximum = 0.0, 0.0
    for lower, upper in itertools.pairwise(edges):
        last = upper == edges[-1]
        inside = [
            (c, y) for c, y in zip(confidence, correct, strict=True) if lower <= c < upper or (last and c == upper)
        ]
        if inside:
            gap = abs(sum(c for c, _ in inside) - sum(y for _, y in inside)) / len(inside)
            expected += gap * len(inside) / len(confidence)
            maximum = max(maximum, gap)
    return expected, maximum


def test_calibration_and_auroc_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("calibration_discrimination")["cases"]:
        confidence, correct = case["confidences"], case["correct"]
        assert expected_calibration_error(confidence, correct) == pytest.approx(case["ece10"], abs=1e-6)
        assert reliability_bins(confidence, correct).maximum_error == pytest.approx(case["mce"], abs=1e-6)
        assert brier_score(confidence, correct) == pytest.approx(case["brier"], abs=1e-6)
        assert discrimination.auroc(confidence, correct) == pytest.approx(case["auroc_correct_ties_half"], abs=1e-6)
    cases = vectors("ece_auroc_selfcal")["cases"]
    for case in cases:
        error = expected_calibration_error(case["scores"], case["y"])
        assert error == pytest.approx(case["ece_last_bin_closed"], abs=1e-6)
    assert len(cases) >= 5


@given(st.lists(st.tuples(CHANCES, st.booleans()), min_size=1, max_size=40), st.sampled_from([1, 2, 7, 10]))
def test_errors_equal_naive_loops(responses: list[tuple[float, bool]], num_bins: int) -> None:
    confidence, correct = [c for c, _ in responses], [y for _, y in responses]
    bins = reliability_bins(confidence, correct, num_bins=num_bins)
    edges = np.append(bins.lower, 1.0)
    expected, maximum = _reference_naive_errors(confidence, correct, edges)
    assert expected_calibration_error(confidence, correct, num_bins=num_bins) == pytest.approx(expected, abs=1e-12)
    assert bins.maximum_error == pytest.approx(maximum, abs=1e-12)
    assert bins.count.sum() == len(responses)


def test_reliability_and_brier_equal_sklearn() -> None:
    confidence, correct = _responses()
    bins = reliability_bins(confidence, correct)
    accuracy, mean_confidence = calibration_curve(correct, confidence, n_bins=10)
    assert_allclose(bins.accuracy[bins.count > 0], accuracy, atol=1e-12)
    assert_allclose(bins.confidence[bins.count > 0], mean_confidence, atol=1e-12)
    assert brier_score(confidence, correct) == pytest.approx(brier_score_loss(correct, confidence), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_and_sequences_give_the_same(dtype: torch.dtype) -> None:
    confidence, correct = (torch.tensor(column) for column in _responses(100))
    rounded = confidence.to(dtype).requires_grad_()
    plain = rounded.detach().double().tolist()
    assert expected_calibration_error(rounded, correct) == expected_calibration_error(plain, correct.tolist())
    assert brier_score(rounded, correct) == brier_score(np.array(plain), correct.numpy())


@pytest.mark.parametrize("num_bins", [1, 3, 10, 15])
def test_streamed_bins_and_errors_equal_the_functions_also_on_edges(num_bins: int) -> None:
    edges = torch.linspace(0.0, 1.0, num_bins + 1, dtype=torch.float64)
    tenths = torch.arange(11, dtype=torch.float64) / 10
    confidence = torch.cat([edges, tenths, tenths.float().double()])
    correct = torch.arange(len(confidence)) % 2
    function = reliability_bins(confidence, correct, num_bins=num_bins)
    for norm, error in (("l1", function.expected_error), ("max", function.maximum_error)):
        metric = BinnedCalibrationError(num_bins, norm=norm)
        for rows in torch.arange(len(confidence)).split(9):
            metric.update(confidence[rows], correct[rows])
        for name in ("lower", "upper", "count", "confidence", "accuracy"):
            assert_allclose(getattr(metric.bins(), name), getattr(function, name), atol=1e-12)
        assert metric.compute().dtype == torch.float64
        assert metric.compute().item() == pytest.approx(error, abs=1e-12)


NUM_SETS, NUM_QUESTIONS, NUM_RESPONSES, NUM_RESAMPLES = 200, 150, 6, 200

# A share of NUM_SETS intervals that hold the truth lies above this unless their level is below 95 % (three sigma).
ENOUGH = 0.95 - 3.0 * math.sqrt(0.95 * 0.05 / NUM_SETS)


def simulate(excess: float, draw: np.random.Generator, *, number: int = NUM_QUESTIONS) -> bootstrap.ScoredResponses:
    """Draw responses that are right with their confidence less ``excess``; those to one question depend on each other.

    Confidences lie between .3 and .95, so that no chance is cut off and the population's ECE is ``excess``.
    """
    ease = draw.uniform(0.35, 0.9, size=(number, 1))
    confidence = ease + draw.uniform(-0.05, 0.05, size=(number, NUM_RESPONSES))
    shared, own = draw.random((number, 1)), draw.random(confidence.shape)
    luck = np.where(draw.random(confidence.shape) < 0.5, shared, own)
    question = np.repeat(np.arange(number), NUM_RESPONSES)
    return bootstrap.ScoredResponses(confidence.ravel(), (luck < confidence - excess).ravel(), question)


def columns(pool: bootstrap.ScoredResponses) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.asarray(pool.confidence), np.asarray(pool.correct), np.asarray(pool.question_index)


@pytest.mark.slow
@pytest.mark.parametrize("excess", [0.0, 0.03, 0.25])
def test_intervals_hold_the_truth(excess: float) -> None:
    draw = np.random.default_rng(7)
    held, plain, value = 0, 0, []
    for number in range(NUM_SETS):
        pool = simulate(excess, draw)
        options = {"metrics": [ECE], "num_resamples": NUM_RESAMPLES, "seed": number}
        found = bootstrap.bootstrap_interval(*columns(pool), **options)[ECE]
        assert found.value == pytest.approx(expected_calibration_error(pool.confidence, pool.correct))
        assert 0.0 <= found.low <= found.value <= found.high <= 1.0
        held += found.low <= excess <= found.high
        low, high = np.quantile(bootstrap.question_bootstrap(*columns(pool), **options)[ECE], [0.025, 0.975])
        plain += low <= excess <= high
        value.append(found.high - found.low)
    assert held / NUM_SETS >= ENOUGH
    if excess == 0.0:
        assert plain == 0, "percentiles of the resampled error never reach 0"
    if excess == 0.25:
        # Where all gaps have one sign, the interval is hardly wider than the percentiles' one.
        assert plain / NUM_SETS >= ENOUGH
    assert np.mean(value) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(0.25, 0.0), (0.25, 0.03), (0.03, 0.0), (0.03, 0.03)])
def test_changes_and_ratios_hold_the_truth(before: float, after: float) -> None:
    draw = np.random.default_rng(8)
    held = np.zeros(2)
    for number in range(NUM_SETS):
        pair = simulate(before, draw), simulate(after, draw)
        found = bootstrap.paired_bootstrap(*pair, metrics=[ECE], num_resamples=NUM_RESAMPLES, seed=number)[ECE]
        truths = (found.change, after - before), (found.ratio, after / before)
        held += [part.low <= truth <= part.high for part, truth in truths]
        assert all(part.low <= part.value <= part.high for part, _ in truths)
    assert (held / NUM_SETS >= ENOUGH).all()


def test_debiasing_by_simulation_of_its_formula() -> None:
    """The expected absolute gaps by drawing them, instead of the folded normal's mean."""
    draw = np.random.default_rng(11)
    confidence, correct, question = columns(simulate(0.05, draw, number=80))
    slot = np.minimum((confidence * 10).astype(int), 9)
    gaps, errors = np.zeros(10), np.zeros(10)
    for bin_number in range(10):
        by_question = np.bincount(question, weights=(correct - confidence) * (slot == bin_number))
        gaps[bin_number] = by_question.sum() / len(confidence)
        errors[bin_number] = by_question.std() * math.sqrt(len(by_question)) / len(confidence)
    drawn = np.abs(gaps + errors * draw.normal(size=(400_000, 10))).sum(axis=1).mean()
    expected = 2.0 * np.abs(gaps).sum() - drawn
    assert calibration.debiased_calibration_error(confidence, correct, question) == pytest.approx(expected, abs=2e-4)
    assert calibration.debiased_calibration_error([], [], []) is None


def test_bounds_from_sums_and_of_shares_are_those_of_the_responses() -> None:
    """Every question has one estimate, against which its share of right responses is held."""
    draw = np.random.default_rng(3)
    values = draw.uniform(0.05, 0.95, NUM_QUESTIONS)
    right = draw.random((NUM_QUESTIONS, NUM_RESPONSES)) < values[:, None]
    question = np.repeat(np.arange(NUM_QUESTIONS), NUM_RESPONSES)
    of_responses = bootstrap.calibration_error_bounds(
        np.repeat(values, NUM_RESPONSES), right.ravel(), question, num_resamples=NUM_RESAMPLES
    )
    weights = bootstrap.resample_weights(NUM_QUESTIONS, num_resamples=NUM_RESAMPLES)
    found = share_error_bounds(values, right.mean(axis=1), weights)
    assert found.value == pytest.approx(of_responses.value)
    assert found.value == pytest.approx(expected_calibration_error(np.repeat(values, NUM_RESPONSES), right.ravel()))
    assert found.least == pytest.approx(of_responses.least)
    assert found.most == pytest.approx(of_responses.most)


def test_resamples_without_a_response_are_left_out_and_counted() -> None:
    weights = np.array([[0.5, 1.0, 0.0], [0.5, 0.0, 1.0]])
    bounds = calibration.ErrorBounds.from_sums(np.array([[0.5], [0.0]]), np.array([1.0, 0.0]), weights)
    assert np.isnan(bounds.least).tolist() == [False, True]
    assert bootstrap.Estimate.from_bounds(bounds) == bootstrap.Estimate(0.5, 0.5, 0.5, 1)
    nothing = calibration.ErrorBounds.from_sums(np.zeros((2, 1)), np.zeros(2), weights)
    assert bootstrap.Estimate.from_bounds(nothing) == bootstrap.Estimate(None, None, None)
    alone = calibration.ErrorBounds.from_sums(np.array([[0.5]]), np.ones(1), np.ones((1, 1)))
    assert bootstrap.Estimate.from_bounds(alone) == bootstrap.Estimate(0.5, None, None), "of one question"


# ---- discrimination

RESPONSES = st.lists(
    st.tuples(st.integers(-4, 4).map(lambda n: n / 4), st.booleans(), st.integers(0, 4)), min_size=1, max_size=40
)


def _columns(responses: list[tuple[float, bool, int]]) -> tuple[list[float], list[bool], list[int]]:
    return [c for c, _, _ in responses], [y for _, y, _ in responses], [q for _, _, q in responses]


def _reference_naive_pairs(confidence: list[float], correct: list[bool]) -> tuple[float, int]:
    """Return concordant pairs, ties one half, and all pairs of a right and a wrong response."""
    right = [c for c, y in zip(confidence, correct, strict=True) if y]
    wrong = [c for c, y in zip(confidence, correct, strict=True) if not y]
    return sum((r > w) + 0.5 * (r == w) for r in right for w in wrong), len(right) * len(wrong)


def _reference_naive_within(
    confidence: list[float], correct: list[bool], question_index: list[int]
) -> discrimination.WithinQuestion:
    pairs = []
    for question in sorted(set(question_index)):
        rows = [i for i, other in enumerate(question_index) if other == question]
        pairs.append(_reference_naive_pairs([confidence[i] for i in rows], [correct[i] for i in rows]))
    mixed = [(concordant, count) for concordant, count in pairs if count]
    if not mixed:
        return discrimination.WithinQuestion(None, None, 0)
    return discrimination.WithinQuestion(
        mean=sum(concordant / count for concordant, count in mixed) / len(mixed),
        pooled=sum(concordant for concordant, _ in mixed) / sum(count for _, count in mixed),
        num_questions=len(mixed),
    )


@given(RESPONSES)
def test_auroc_equals_naive_pairs(responses: list[tuple[float, bool, int]]) -> None:
    confidence, correct, _ = _columns(responses)
    concordant, count = _reference_naive_pairs(confidence, correct)
    assert discrimination.auroc(confidence, correct) == (pytest.approx(concordant / count) if count else None)
    if count:
        false_positive, true_positive, _ = discrimination.roc_curve(confidence, correct)
        assert np.trapezoid(true_positive, false_positive) == pytest.approx(concordant / count)


@given(RESPONSES)
def test_within_question_equals_naive_loops(responses: list[tuple[float, bool, int]]) -> None:
    confidence, correct, question_index = _columns(responses)
    expected = _reference_naive_within(confidence, correct, question_index)
    value = discrimination.within_question_discrimination(confidence, correct, question_index)
    assert value.num_questions == expected.num_questions
    assert value.mean == pytest.approx(expected.mean)
    assert value.pooled == pytest.approx(expected.pooled)


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_aurc_is_the_mean_over_the_orders_of_ties(responses: list[tuple[int, bool]]) -> None:
    confidence, correct = [float(c) for c, _ in responses], [y for _, y in responses]
    areas = []
    for order in itertools.permutations(range(len(confidence))):
        if all(confidence[i] >= confidence[j] for i, j in itertools.pairwise(order)):
            risks = [sum(not correct[i] for i in order[:k]) / k for k in range(1, len(order) + 1)]
            areas.append(sum(risks) / len(risks))
    assert discrimination.aurc(confidence, correct) == pytest.approx(sum(areas) / len(areas))


def test_spearman_equals_scipy() -> None:
    first = np.random.default_rng(1).integers(0, 200, 3000)
    second = first[::-1] ** 2 + np.arange(3000) / 3000
    assert discrimination.spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert discrimination.spearman([1.0, 1.0], [0.0, 1.0]) is None
    assert discrimination.spearman([], []) is None


def test_one_class_is_unknown_and_scores_need_be_no_probabilities() -> None:
    assert discrimination.roc_curve([0.1, 0.9], [True, True]) is None
    assert discrimination.auroc([], []) is expected_calibration_error([], []) is None
    assert discrimination.aurc([], []) is None
    assert discrimination.auroc([-np.inf, -20.0, 3.0], [False, True, True]) == 1.0
    assert discrimination.auroc(torch.tensor([-5.0, 2.0], dtype=torch.bfloat16), torch.tensor([0, 1])) == 1.0


def test_streamed_questions_may_have_large_numbers() -> None:
    metric = WithinQuestionAUROC()
    numbers = torch.tensor([2**62, 2**62, 2**62 + 1, 2**62 + 1])
    metric.update(torch.tensor([0.9, 0.1, 0.2, 0.3]), torch.tensor([1, 0, 1, 0]), numbers)
    assert metric.compute().item() == 0.5


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (expected_calibration_error, ([0.5, None], [True, True]), "NaN at position 1"),
        (expected_calibration_error, ([0.5, 1.5], [True, True]), "`confidence` .* 0.5 to 1.5"),
        (expected_calibration_error, ([0.5], [True, False]), r"same length, but got \(1, 2\)"),
        (discrimination.auroc, ([0.1, 0.2], [True, None]), "Expected `correct` to be known"),
        (discrimination.aurc, ([0.1, 0.2], [0.5, 1.0]), "Expected `correct` to hold 0 or 1 only"),
    ],
)
def test_wrong_columns_are_named(function: Callable, columns: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(*columns)
