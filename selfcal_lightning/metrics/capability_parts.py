"""The squared error of predicted capability against single responses, taken apart, from one pass over the questions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfcal_lightning.functional.capability_errors import error_parts
from selfcal_lightning.metrics.base import ExactMetric, check_probabilities, check_vectors

RESPONSE_ERROR = "capability/ResponseError"
CAPABILITY_ERROR = "capability/CapabilityError"
RESPONSE_SPREAD = "capability/ResponseSpread"


class CapabilityErrorParts(ExactMetric):
    """Response- against capability-calibration: ``E (p - y)^2 = E (p - c*)^2 + E c* (1 - c*)``.

    The keys of ``compute``:

    - ``capability/ResponseError``: squared error against verdicts on single responses;
    - ``capability/CapabilityError``: the part against capability, which a better prediction could remove; it is the
      debiased ``capability/MSE`` of ``CapabilityMetrics``, and may come out below 0 by chance;
    - ``capability/ResponseSpread``: the rest, which nothing that is known before the response can remove.

    As input to ``update``:
        predicted: Predicted capability of each question [B], in [0, 1].
        num_correct: Right samples of each question [B].
        num_samples: Samples of each question [B], at least 2.

    As output of ``compute``: floats by key; NaN without questions.

    Args:
        kwargs: Of ``torchmetrics.Metric``.

    Example:
        >>> metric = CapabilityErrorParts()
        >>> metric.update(torch.tensor([0.5]), torch.tensor([1]), torch.tensor([2]))
        >>> metric.compute()
        {'capability/ResponseError': 0.25, 'capability/CapabilityError': -0.25, 'capability/ResponseSpread': 0.5}
    """

    higher_is_better = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_rows("questions", width=3, dtype=torch.float64)

    def update(self, predicted: Tensor, num_correct: Tensor, num_samples: Tensor) -> None:
        """Keep the questions."""
        check_vectors(predicted=predicted, num_correct=num_correct, num_samples=num_samples)
        check_probabilities(predicted, "predicted")
        columns = (predicted.detach().double(), num_correct.double(), num_samples.double())
        self.questions.append(torch.stack(columns, dim=1))

    def compute(self) -> dict[str, float]:
        """Return the parts over all questions of all processes, by key."""
        rows = self.rows("questions").cpu().numpy()
        # In one order, however the questions were dealt to processes and batches: sums then agree to the last bit.
        parts = error_parts(*rows[np.lexsort(rows.T)].T)
        values = (np.nan,) * 3 if parts is None else (parts.response, parts.capability, parts.spread)
        return dict(zip((RESPONSE_ERROR, CAPABILITY_ERROR, RESPONSE_SPREAD), map(float, values), strict=True))
