"""How well a score ranks right responses above wrong ones: scores [N] are any real numbers, labels [N] are 0 or 1.

Every function takes sequences, NumPy arrays or tensors, computes in float64, does not depend on the order of equal
scores, and returns None where it is undefined. Unreadable responses count as wrong.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.metrics import arrays
from selfcal_lightning.metrics.arrays import Array, Floats


@dataclass(frozen=True)
class WithinQuestion:
    """Discrimination among the responses to the same question.

    Attributes:
        mean: Mean AUROC over the questions that have both right and wrong responses; None without any.
        pooled: Share of concordant pairs among all pairs within those questions; None without any.
        num_questions: Number of such questions.
    """

    mean: float | None
    pooled: float | None
    num_questions: int


def auroc(confidence: Array, correct: Array) -> float | None:
    """Compute the chance that a right response scores above a wrong one, in [0, 1]; a tie counts one half.

    None without both right and wrong responses.

    Example:
        >>> auroc([0.9, 0.5, 0.5, 0.1], [True, True, False, False])
        0.875

    Reference:
        Fawcett, An introduction to ROC analysis, 2006, section 7.
    """
    scores, labels = _checked(confidence, correct)
    concordant, pairs = arrays.concordant_pairs(scores, labels, np.zeros(len(scores), dtype=np.int64), 1)
    return float(concordant[0] / pairs[0]) if pairs[0] else None


def within_question_discrimination(confidence: Array, correct: Array, question_index: Array) -> WithinQuestion:
    """Compute AUROC among the responses to each question: does the score tell which response is right?

    AUROC over all responses also rewards a score that only reflects how hard a question is; this does not.

    Args:
        confidence: Scores [N].
        correct: Labels [N].
        question_index: The question of each response [N], as integers or strings.

    Example:
        >>> within_question_discrimination([0.9, 0.5, 0.2, 0.6, 0.6], [True, False, True, True, False], [0, 0, 0, 1, 1])
        WithinQuestion(mean=0.5, pooled=0.5, num_questions=2)
    """
    scores, labels = _checked(confidence, correct)
    questions, codes = arrays.question_codes(question_index)
    arrays.check_same_length(confidence=scores, question_index=codes)
    concordant, pairs = arrays.concordant_pairs(scores, labels, codes, len(questions))
    mixed = pairs > 0
    if not mixed.any():
        return WithinQuestion(None, None, 0)
    mean, pooled = np.mean(concordant[mixed] / pairs[mixed]), concordant.sum() / pairs.sum()
    return WithinQuestion(float(mean), float(pooled), int(mixed.sum()))


def roc_curve(confidence: Array, correct: Array) -> tuple[Floats, Floats, Floats] | None:
    """Return false and true positive rates with their thresholds [P]; None without both right and wrong responses.

    The curve starts at (0, 0) with an infinite threshold and has one point per distinct score.

    Example:
        >>> [column.tolist() for column in roc_curve([0.9, 0.5, 0.5, 0.1], [True, True, False, False])]
        [[0.0, 0.0, 0.5, 1.0], [0.0, 0.5, 1.0, 1.0], [inf, 0.9, 0.5, 0.1]]
    """
    from sklearn import metrics

    scores, labels = _checked(confidence, correct)
    if labels.all() or not labels.any():
        return None
    return metrics.roc_curve(labels, np.nan_to_num(scores), drop_intermediate=False)


def aurc(confidence: Array, correct: Array) -> float | None:
    """Compute the area under the risk-coverage curve, in [0, 1]; lower is better.

    ``AURC = 1/N sum_k r_k`` with ``r_k`` the share of wrong responses among the k with the highest scores. For
    equal scores, ``r_k`` is the expectation over a random order.

    Example:
        >>> aurc([0.9, 0.5, 0.1], [True, True, False])
        0.1111111111111111

    Reference:
        Geifman et al., Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers, 2019, section 3.
    """
    scores, labels = _checked(confidence, correct)
    if not len(scores):
        return None
    _, group, sizes = np.unique(-scores, return_inverse=True, return_counts=True)
    coverage, errors = np.arange(1, len(scores) + 1), np.bincount(group, weights=~labels)
    wrong = np.interp(coverage, np.append(0, np.cumsum(sizes)), np.append(0.0, np.cumsum(errors)))
    return float(np.mean(wrong / coverage))


def pearson(first: Array, second: Array) -> float | None:
    """Compute the linear correlation of two columns [N], in [-1, 1]; None if either is constant.

    Example:
        >>> pearson([0.0, 1.0, 2.0], [3.0, 2.0, 1.0])
        -1.0
    """
    x, y = arrays.as_scores(first, "first"), arrays.as_scores(second, "second")
    arrays.check_same_length(first=x, second=y)
    # Rounding can move a constant off its mean; that is not variation.
    if not len(x) or np.ptp(x) == 0.0 or np.ptp(y) == 0.0:
        return None
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(np.clip((x @ y) / scale, -1.0, 1.0)) if scale else None


def spearman(first: Array, second: Array) -> float | None:
    """Compute the rank correlation of two columns [N], in [-1, 1]; None if either is constant.

    Example:
        >>> spearman([0.1, 0.5, 0.9], [1.0, 2.0, 30.0])
        1.0
    """
    from scipy.stats import rankdata

    columns = arrays.as_scores(first, "first"), arrays.as_scores(second, "second")
    arrays.check_same_length(first=columns[0], second=columns[1])
    return pearson(*map(rankdata, columns))


def kendall(first: Array, second: Array) -> float | None:
    """Compute Kendall's tau-b of two columns [N], in [-1, 1]; None if either is constant.

    ``(concordant - discordant) / sqrt((P - ties of first) (P - ties of second))`` over the P pairs of rows.

    Example:
        >>> kendall([0.1, 0.5, 0.9], [1.0, 2.0, 30.0]), kendall([1.0, 2.0], [0.5, 0.1])
        (1.0, -1.0)
    """
    x, y = arrays.as_scores(first, "first"), arrays.as_scores(second, "second")
    arrays.check_same_length(first=x, second=y)
    if not len(x) or (x == x[0]).all() or (y == y[0]).all():
        return None
    from scipy.stats import kendalltau

    return float(kendalltau(x, y).statistic)


def _checked(confidence: Array, correct: Array) -> tuple[Floats, NDArray[np.bool_]]:
    scores, labels = arrays.as_scores(confidence), arrays.as_labels(correct)
    arrays.check_same_length(confidence=scores, correct=labels)
    return scores, labels
