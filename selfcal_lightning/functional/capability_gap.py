"""Response- and capability-calibration: how far apart their targets are, a verdict on one response and c* itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from selfcal_lightning.functional.base import Array, as_rates, as_scores, check_same_length
from selfcal_lightning.functional.discrimination import kendall, spearman


@dataclass(frozen=True)
class TargetGap:
    """How far the verdicts on one response a question are from the capabilities.

    Attributes:
        mae: Mean absolute difference; 0 where every question is answered always or never.
        spearman: Rank correlation; None where one of them is constant.
        kendall: Kendall's tau-b; likewise.
    """

    mae: float
    spearman: float | None
    kendall: float | None


def target_gap(correct: Array, expected_accuracy: Array) -> TargetGap | None:
    """Compare the verdicts on one response to each question with the capabilities.

    Args:
        correct: y of one response to each question [Q], 0 or 1.
        expected_accuracy: c* of each question [Q], in [0, 1].

    Returns:
        The gap; None without questions.

    Raises:
        ValueError: If lengths differ or a value is out of its range.

    Example:
        >>> target_gap([0, 1], [0.25, 0.75])
        TargetGap(mae=0.25, spearman=1.0, kendall=1.0)

    Reference:
        arXiv 2602.13540 (the difference between response and capability calibration).
    """
    verdicts, truth = as_rates(correct, "correct"), as_rates(expected_accuracy, "expected_accuracy")
    check_same_length(correct=verdicts, expected_accuracy=truth)
    if not len(truth):
        return None
    return TargetGap(float(np.abs(verdicts - truth).mean()), spearman(verdicts, truth), kendall(verdicts, truth))


def drawn_verdicts(expected_accuracy: Array, *, seed: int = 0) -> np.ndarray:
    """Return the verdict on one response to each question [Q], drawn with its capability: 0.0 or 1.0.

    Example:
        >>> drawn_verdicts([0.0, 1.0]).tolist()
        [0.0, 1.0]
    """
    truth = as_scores(expected_accuracy, "expected_accuracy")
    return (np.random.default_rng(seed).random(len(truth)) < truth).astype(np.float64)
