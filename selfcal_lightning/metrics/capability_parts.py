"""The squared error of predicted capability against single responses, taken apart, from one pass over the questions."""

from __future__ import annotations

import numpy as np

from selfcal_lightning.functional.capability_errors import error_parts
from selfcal_lightning.metrics.capability import QuestionRows

RESPONSE_ERROR = "capability/ResponseError"
CAPABILITY_ERROR = "capability/CapabilityError"
RESPONSE_SPREAD = "capability/ResponseSpread"


class CapabilityErrorParts(QuestionRows):
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
        >>> import torch
        >>> metric = CapabilityErrorParts()
        >>> metric.update(torch.tensor([0.5]), torch.tensor([1]), torch.tensor([2]))
        >>> metric.compute()
        {'capability/ResponseError': 0.25, 'capability/CapabilityError': -0.25, 'capability/ResponseSpread': 0.5}
    """

    higher_is_better = False

    def compute(self) -> dict[str, float]:
        """Return the parts over all questions of all processes, by key."""
        parts = error_parts(*self.columns())
        values = (np.nan,) * 3 if parts is None else (parts.response, parts.capability, parts.spread)
        return dict(zip((RESPONSE_ERROR, CAPABILITY_ERROR, RESPONSE_SPREAD), map(float, values), strict=True))
