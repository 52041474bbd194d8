"""Choosing by scores against recorded vectors, sorting, and every order of equal scores."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from selfcal_lightning.adaptation.picking import (
    below_percentile,
    difficulty_level,
    kept,
    relative_weights,
    select_best,
    selective,
    threshold_for_accuracy,
    threshold_for_count,
    threshold_for_share,
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


def test_votes_of_weighted_strategies_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("sasc_strategies")["cases"]:
        rows = case["responses"]
        spread, certainty, steps = (
            np.array([row[name] for row in rows]) for name in ("std_topk_entropy", "avg_certainty", "step_std_entropy")
        )
        weights = {
            "count": np.ones(len(rows)),
            "w_std": relative_weights(spread),
            "w_cert": relative_weights(-certainty),
            "w_double": relative_weights(spread, steps),
        }
        answers = [str(float(row["extracted_answer"])).removesuffix(".0") for row in rows]
        for name, column in weights.items():
            votes: dict[str, float] = defaultdict(float)
            for answer, weight in zip(answers, column, strict=True):
                votes[answer] += weight
            wanted = {answer: row[name] for answer, row in case["votes"].items()}
            assert votes == pytest.approx(wanted, abs=1e-6), name
        few = below_percentile(spread, 80)
        combined: dict[str, float] = defaultdict(float)
        for answer, weight, is_kept in zip(answers, weights["w_std"], few, strict=True):
            combined[answer] += weight if is_kept else 0.0
        assert {a: w for a, w in combined.items() if w} == pytest.approx(case["combo_votes"], abs=1e-6)


def test_levels_equal_the_vectors(vectors: Vectors) -> None:
    for case in vectors("difficulty_level")["cases"]:
        assert difficulty_level([case["value"]], case["quintiles"]).tolist() == [case["level"]["level_x"]]


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


@settings(deadline=None)
@given(SCORES, st.integers(1, 12))
def test_thresholds_keep_at_least_as_many(scores: list[float | None], count: int) -> None:
    known = [score for score in scores if score is not None]
    threshold = threshold_for_count(scores, count)
    assert (threshold is None) == (len(known) < count)
    if threshold is not None:
        assert sum(kept(scores, threshold)) >= count
        assert sum(score > threshold for score in known) < count
    for share in (0.1, 0.35, 1.0):
        needed = math.ceil(round(share * len(scores), 6))
        assert threshold_for_share(scores, share) == threshold_for_count(scores, max(needed, 1))


@settings(deadline=None)
@given(st.lists(st.tuples(SCORE, st.booleans()), min_size=1, max_size=10), st.floats(0.0, 1.0))
def test_the_threshold_for_an_accuracy_is_the_lowest(pairs: list[tuple[float, bool]], accuracy: float) -> None:
    scores, correct = [s for s, _ in pairs], [c for _, c in pairs]

    def reached(threshold: float) -> float:
        mine = [c for s, c in pairs if s >= threshold]
        return sum(mine) / len(mine)

    enough = [score for score in scores if reached(score) >= accuracy - 1e-12]
    assert threshold_for_accuracy(scores, correct, accuracy) == min(enough, default=None)


@settings(deadline=None)
@given(QUESTIONS, st.integers(1, 5))
def test_selective_figures_equal_every_order(questions: list[tuple[float, float]], asked: int) -> None:
    scores, capability = [s for s, _ in questions], [c for _, c in questions]
    asked = min(asked, len(scores))
    found = selective(scores, capability, left_out=1.0 - asked / len(scores))
    if not sum(capability):
        assert found.lost is None
        return
    accuracy, lost = _reference_listed_selective(scores, capability, asked)
    assert found.accuracy == pytest.approx(accuracy, abs=1e-9)
    assert found.lost == pytest.approx(lost, abs=1e-9)
    assert found.coverage == pytest.approx(asked / len(scores))


def test_selective_ends() -> None:
    assert selective([0.5, 0.1], [1.0, 1.0], left_out=0.0).lost == 0.0
    nothing = selective([0.5, 0.1], [1.0, 1.0], left_out=1.0)
    assert (nothing.accuracy, nothing.lost) == (None, 1.0)
    # Knowing the answers one loses least; not knowing them the share that is left out.
    capability = np.random.default_rng(0).beta(0.5, 0.5, 5000)
    assert selective(capability, capability, left_out=0.2).lost < 0.02
    assert selective(np.zeros(5000), capability, left_out=0.2).lost == pytest.approx(0.2)
    assert selective(-capability, capability, left_out=0.2).lost > 0.35


def test_relative_weights_do_not_follow_shift_or_scale() -> None:
    column = np.array([0.1, 0.4, 0.2])
    assert_allclose(relative_weights(5.0 * column + 3.0), relative_weights(column), rtol=1e-6)
    assert relative_weights(column).argmax() == 0
    assert relative_weights([], []).tolist() == []
    assert below_percentile([], 50).tolist() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: threshold_for_count([0.5], 0), "Expected `count` to be a positive integer, but got 0"),
        (lambda: threshold_for_share([0.5], 0.0), r"Expected `share` to lie in \(0, 1\], but got 0.0"),
        (lambda: threshold_for_accuracy([0.5], [True], 1.5), r"Expected `accuracy` to lie in \[0, 1\], but got 1.5"),
        (lambda: selective([0.5], [0.5], left_out=2.0), r"Expected `left_out` to lie in \[0, 1\], but got 2.0"),
        (lambda: selective([0.5], [1.5], left_out=0.5), r"Expected `capability` to lie in \[0, 1\]"),
        (lambda: relative_weights(), "Expected at least one column, but got none"),
        (lambda: below_percentile([0.5], 101), r"Expected `percentile` to lie in \[0, 100\], but got 101"),
        (lambda: difficulty_level([0.5], [0.4, 0.2]), "Expected `edges` to rise"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
