from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support.house import Vectors

from selfcal_lightning.metrics import discrimination
from selfcal_lightning.metrics.streaming import ConfidenceAUROC, WithinQuestionAUROC

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


def _reference_naive_aurc(confidence: list[float], correct: list[bool]) -> float:
    """Return the mean over every order of the responses that the scores allow."""
    areas = []
    for order in permutations(range(len(confidence))):
        if all(confidence[i] >= confidence[j] for i, j in pairwise(order)):
            risks = [sum(not correct[i] for i in order[:k]) / k for k in range(1, len(order) + 1)]
            areas.append(sum(risks) / len(risks))
    return sum(areas) / len(areas)


def test_auroc_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("calibration_discrimination")["cases"]:
        expected = case["auroc_correct_ties_half"]
        value = discrimination.auroc(case["confidences"], case["correct"])
        assert value == (None if expected is None else pytest.approx(expected, abs=1e-6))


@settings(deadline=None)
@given(RESPONSES)
def test_auroc_equals_naive_pairs(responses: list[tuple[float, bool, int]]) -> None:
    confidence, correct, _ = _columns(responses)
    concordant, count = _reference_naive_pairs(confidence, correct)
    assert discrimination.auroc(confidence, correct) == (pytest.approx(concordant / count) if count else None)
    if count:
        false_positive, true_positive, _ = discrimination.roc_curve(confidence, correct)
        assert np.trapezoid(true_positive, false_positive) == pytest.approx(concordant / count)


@settings(deadline=None)
@given(RESPONSES)
def test_within_question_equals_naive_loops(responses: list[tuple[float, bool, int]]) -> None:
    confidence, correct, question_index = _columns(responses)
    expected = _reference_naive_within(confidence, correct, question_index)
    value = discrimination.within_question_discrimination(confidence, correct, question_index)
    assert value.num_questions == expected.num_questions
    assert value.mean == pytest.approx(expected.mean)
    assert value.pooled == pytest.approx(expected.pooled)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6))
def test_aurc_is_the_mean_over_the_orders_of_ties(responses: list[tuple[int, bool]]) -> None:
    confidence, correct = [float(c) for c, _ in responses], [y for _, y in responses]
    assert discrimination.aurc(confidence, correct) == pytest.approx(_reference_naive_aurc(confidence, correct))


def test_spearman_equals_scipy() -> None:
    first = np.random.default_rng(1).integers(0, 200, 3000)
    second = first[::-1] ** 2 + np.arange(3000) / 3000
    assert discrimination.spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert discrimination.spearman([1.0, 1.0], [0.0, 1.0]) is None
    assert discrimination.spearman([], []) is None


def test_one_class_is_unknown_and_scores_need_be_no_probabilities() -> None:
    for correct in ([True, True], [False, False]):
        assert discrimination.auroc([0.1, 0.9], correct) is None
        assert discrimination.roc_curve([0.1, 0.9], correct) is None
        assert discrimination.within_question_discrimination(
            [0.1, 0.9], correct, [0, 0]
        ) == discrimination.WithinQuestion(None, None, 0)
    assert discrimination.auroc([], []) is None
    assert discrimination.aurc([], []) is None
    assert discrimination.auroc([-np.inf, -20.0, 3.0], [False, True, True]) == 1.0
    assert discrimination.auroc(torch.tensor([-5.0, 2.0], dtype=torch.bfloat16), torch.tensor([0, 1])) == 1.0


@pytest.mark.parametrize(
    ("correct", "message"),
    [([True, None], "Expected `correct` to be known"), ([0.5, 1.0], "Expected `correct` to hold 0 or 1 only")],
)
def test_labels_must_be_known(correct: list, message: str) -> None:
    for function in (discrimination.auroc, discrimination.aurc, discrimination.roc_curve):
        with pytest.raises(ValueError, match=message):
            function([0.1, 0.2], correct)
    with pytest.raises(ValueError, match="same length"):
        discrimination.within_question_discrimination([0.1, 0.2], [True, False], [0])


def _responses() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    confidence = torch.rand(600, generator=generator).mul(30).round().div(30)
    correct = (torch.rand(600, generator=generator) < confidence).long()
    return confidence, correct, torch.randint(50, (600,), generator=generator)


def test_streamed_values_are_those_of_the_functions() -> None:
    columns = _responses()
    within = discrimination.within_question_discrimination(*columns)
    for metric, num_columns, expected in (
        (ConfidenceAUROC(), 2, discrimination.auroc(*columns[:2])),
        (WithinQuestionAUROC(), 3, within.mean),
    ):
        for rows in torch.arange(600).split(130):
            metric.update(*(column[rows] for column in columns[:num_columns]))
        assert metric.compute().item() == expected
    metric = WithinQuestionAUROC()
    numbers = torch.tensor([2**62, 2**62, 2**62 + 1, 2**62 + 1])
    metric.update(torch.tensor([0.9, 0.1, 0.2, 0.3]), torch.tensor([1, 0, 1, 0]), numbers)
    assert metric.compute().item() == 0.5
