"""A batch of questions, as probes are trained on them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ProbeBatch(NamedTuple):
    """B questions with their features and what their responses show.

    Attributes:
        features: Standardised features, float32 [B, D].
        target: What is learnt, float32 [B], in [0, 1].
        num_correct: Right ones among the responses, float32 [B]; nan where one was not judged.
        num_samples: Responses, int64 [B].
    """

    features: Tensor
    target: Tensor
    num_correct: Tensor
    num_samples: Tensor
