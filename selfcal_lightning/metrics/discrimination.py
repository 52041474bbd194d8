"""Discrimination over all processes. Exact, so every response is kept: 8 bytes a number."""

from __future__ import annotations

from typing import Any, Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.discrimination import auroc, within_question_discrimination
from selfcal_lightning.metrics.base import ExactMetric, check_vectors
from selfcal_lightning.metrics.drawing import axes_to_draw_on, draw_roc


class ConfidenceAUROC(ExactMetric):
    """Chance that a right response has more confidence than a wrong one; a tie counts one half.

    As input to ``update``:
        confidence: Scores [B]; any real numbers.
        correct: Labels [B], 0 or 1.

    As output of ``compute``: the area in [0, 1] as a float64 scalar; NaN unless there are right and wrong responses.

    Args:
        kwargs: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = ConfidenceAUROC()
        >>> metric.update(torch.tensor([0.9, 0.5, 0.5, 0.1]), torch.tensor([1, 1, 0, 0]))
        >>> metric.compute()
        tensor(0.8750, dtype=torch.float64)

    Reference:
        Fawcett, An introduction to ROC analysis, 2006, section 7.
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_rows("responses", width=2, dtype=torch.float64)

    def update(self, confidence: Tensor, correct: Tensor) -> None:
        """Keep the responses."""
        check_vectors(confidence=confidence, correct=correct)
        self.responses.append(torch.stack([confidence.detach().double(), correct.double()], dim=1))

    def compute(self) -> Tensor:
        """Return the area over all responses of all processes."""
        responses = self.rows("responses").cpu()
        return _scalar(auroc(responses[:, 0], responses[:, 1]), self.device)

    def _diagram(self, ax: Axes | None) -> tuple[Figure, Axes]:
        """Draw the ROC curve."""
        with self.synced():
            responses = self.rows("responses").cpu()
        figure, axes = axes_to_draw_on(ax)
        draw_roc(axes, responses[:, 0], responses[:, 1])
        return figure, axes


class WithinQuestionAUROC(ExactMetric):
    """AUROC among the responses to each question, averaged over the questions that have right and wrong responses.

    As input to ``update``:
        confidence: Scores [B]; any real numbers.
        correct: Labels [B], 0 or 1.
        question_index: The question of each response [B], the same number in every process.

    As output of ``compute``: a float64 scalar in [0, 1]; NaN where no question has right and wrong responses.

    Args:
        average: "question" for the mean over questions, "pair" for the share of concordant pairs of all questions.
        kwargs: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = WithinQuestionAUROC()
        >>> metric.update(torch.tensor([0.9, 0.5, 0.6, 0.6]), torch.tensor([1, 0, 1, 0]), torch.tensor([0, 0, 1, 1]))
        >>> metric.compute()
        tensor(0.7500, dtype=torch.float64)
    """

    higher_is_better = True
    plot_lower_bound = 0.0
    plot_upper_bound = 1.0

    def __init__(self, *, average: Literal["question", "pair"] = "question", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if average not in ("question", "pair"):
            raise InputError(f'Expected `average` to be "question" or "pair", but got {average!r}.')
        self.average = average
        self.add_rows("responses", width=2, dtype=torch.float64)
        self.add_rows("questions", width=1, dtype=torch.int64)

    def update(self, confidence: Tensor, correct: Tensor, question_index: Tensor) -> None:
        """Keep the responses and their questions."""
        check_vectors(confidence=confidence, correct=correct, question_index=question_index)
        self.responses.append(torch.stack([confidence.detach().double(), correct.double()], dim=1))
        self.questions.append(question_index.long()[:, None])

    def compute(self) -> Tensor:
        """Return the value over all responses of all processes."""
        responses, questions = self.rows("responses").cpu(), self.rows("questions").cpu()
        result = within_question_discrimination(responses[:, 0], responses[:, 1], questions[:, 0])
        return _scalar(result.mean if self.average == "question" else result.pooled, self.device)


def _scalar(value: float | None, device: torch.device) -> Tensor:
    """Return ``value`` as a float64 scalar; None as NaN."""
    return torch.tensor(float("nan") if value is None else value, dtype=torch.float64, device=device)
