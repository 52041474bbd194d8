"""What samples cost in tokens."""

from __future__ import annotations

from collections.abc import Iterable

from selfcal_lightning.records import Sample
from selfcal_lightning.tasks.judging import is_failed


def sample_tokens(sample: Sample, query_tokens: int) -> int | None:
    """Return what a sample cost: tokens drawn, and those of the confidence query; None where its length is unknown.

    Example:
        >>> sample = Sample("q", 0, 0, "It is 4.", (7, 8, 9), "stop", "4", None)
        >>> sample_tokens(sample, 5)
        8
    """
    if is_failed(sample):
        return 0
    return None if sample.drawn_tokens is None else sample.drawn_tokens + query_tokens


def total_tokens(samples: Iterable[Sample], query_tokens: int) -> int | None:
    """Return what ``samples`` cost together; None where the length of one is unknown."""
    total = 0
    for sample in samples:
        cost = sample_tokens(sample, query_tokens)
        if cost is None:
            return None
        total += cost
    return total
