"""What a confidence is worth on a pool, in the few numbers that are saved and printed beside every fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from selfcal_lightning.functional.base import Floats, Integers
from selfcal_lightning.functional.calibration import expected_calibration_error
from selfcal_lightning.functional.calibration_bias import debiased_calibration_error
from selfcal_lightning.functional.discrimination import auroc, within_question_discrimination


@dataclass(frozen=True)
class ConfidenceScores:
    """How a confidence relates to correctness on some responses; None where a value is not defined.

    Attributes:
        name: The confidence.
        auroc: Over all responses; also rewards knowing which questions are hard.
        within_question_auroc: Mean over the questions with right and wrong responses: does it know which *response* is
            right?
        ece: Expected calibration error in ten bins, as measured; None where the score is no probability.
        num_mixed_questions: Questions behind ``within_question_auroc``.
        num_responses: Responses scored; unreadable ones are wrong.
        num_left_out: Responses without the confidence, or whose correctness nobody knows.
        ece_debiased: The calibration error less what chance adds to it (``functional.calibration_bias``).
    """

    name: str
    auroc: float | None
    within_question_auroc: float | None
    ece: float | None
    num_mixed_questions: int
    num_responses: int
    num_left_out: int
    ece_debiased: float | None = None

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ConfidenceScores:
        """Read what :meth:`as_json` wrote."""
        return cls(**content)

    def as_json(self) -> dict[str, Any]:
        """Return the scores as plain JSON types."""
        return asdict(self)


def score_confidence(name: str, confidence: Floats, correct: Floats, question: Integers) -> ConfidenceScores:
    """Compute the scores of one confidence.

    Args:
        name: What it is called.
        confidence: Values [N], higher is better; nan where there is none.
        correct: 1 right, 0 wrong, nan unknown [N].
        question: The question of each response [N].

    Example:
        >>> scores = score_confidence("c", np.array([0.9, 0.1, 0.5]), np.array([1.0, 0.0, 1.0]), np.array([0, 0, 1]))
        >>> scores.auroc, scores.within_question_auroc, scores.num_mixed_questions
        (1.0, 1.0, 1)
    """
    known = ~np.isnan(confidence) & ~np.isnan(correct)
    values, labels = confidence[known], correct[known]
    within = within_question_discrimination(values, labels, question[known])
    is_probability = bool(((values >= 0.0) & (values <= 1.0)).all())
    return ConfidenceScores(
        name=name,
        auroc=auroc(values, labels),
        within_question_auroc=within.mean,
        ece=expected_calibration_error(values, labels) if is_probability else None,
        num_mixed_questions=within.num_questions,
        num_responses=int(known.sum()),
        num_left_out=int((~known).sum()),
        ece_debiased=debiased_calibration_error(values, labels, question[known]) if is_probability else None,
    )


def scores_text(scores: Sequence[ConfidenceScores], *, title: str = "") -> str:
    """Return the scores as lines of text, one confidence a line.

    Example:
        >>> print(scores_text([ConfidenceScores("p_true", 0.75, 0.5, None, 3, 12, 0)], title="held-out half"))
        held-out half                AUROC  within question    ECE  responses
        p_true                       0.750            0.500      –         12
    """
    lines = [f"{title:<26}{'AUROC':>8}{'within question':>17}{'ECE':>7}{'responses':>11}"]
    for row in scores:
        cells = (_number(row.auroc), _number(row.within_question_auroc), _number(row.ece))
        lines.append(f"{row.name:<26}{cells[0]:>8}{cells[1]:>17}{cells[2]:>7}{row.num_responses:>11}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
