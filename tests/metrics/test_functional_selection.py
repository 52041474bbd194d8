"""Choosing by scores against recorded vectors, sorting, and every order of equal scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from selfcal_lightning.adaptation.picking import (
    select_best,
)

Vectors = Callable[[str], dict[str, Any]]
SCORE = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
SCORES = st.lists(st.one_of(st.none(), SCORE), max_size=10)
QUESTIONS = st.lists(st.tuples(SCORE, SCORE), min_size=1, max_size=5)


def _reference_listed_selective(scores: list[float], capability: list[float], asked: int) -> tuple[float, float]:
    """Return mean capability and lost answers of the first ones, averaged over every order that sorts the scores."""
    orders = [
        order
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    gained = [sum(capability[at] for at in order[:asked]) for order in orders]
    mean = sum(gained) / len(gained)
    return mean / asked, 1.0 - mean / sum(capability)


@settings(deadline=None)
@given(SCORES, st.lists(st.sampled_from(["7", "", None]), min_size=10, max_size=10))
def test_the_best_is_the_first_of_the_highest(scores: list[float | None], answers: list[str | None]) -> None:
    answers = answers[: len(scores)]
    for readable, found in (
        ([True] * len(scores), select_best(scores)),
        ([bool(answer) for answer in answers], select_best(scores, answers)),
    ):
        allowed = [s for s, r in zip(scores, readable, strict=True) if r and s is not None]
        if not allowed:
            assert found is None
            continue
        assert scores[found] == max(allowed)
        assert not any(readable[at] and scores[at] == scores[found] for at in range(found))
    assert select_best([math.nan, 0.1]) == 1
