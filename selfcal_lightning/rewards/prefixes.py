"""Prefixes of responses as questions of their own: equal ones are one, whichever responses begin with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

MARK = "#"


class Rate(NamedTuple):
    """How rollouts from a prefix ended: the share of right ones, in [0, 1], and how many there were."""

    share: float
    rollouts: int


def prefix_id(question_id: str, prefix_ids: Sequence[int]) -> str:
    """Return the id of a prefix of responses to a question.

    Args:
        question_id: The question.
        prefix_ids: Token ids of the prefix.

    Example:
        >>> prefix_id("q", [1, 2]) == prefix_id("q", (1, 2)) != prefix_id("q", [12])
        True
    """
    digest = hashlib.sha256(",".join(map(str, prefix_ids)).encode()).hexdigest()
    return f"{question_id}{MARK}{digest[:16]}"
