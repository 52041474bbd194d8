"""Response consistency against the recorded values and by hand; the registry's names."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.strategy_pools import make_entry

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.estimators import ResponseConsistency
from selfcal_lightning.confidence.registry import ESTIMATORS, estimator_settings


def entry_of(answers: list[str | None], name: str = "q") -> Any:
    return make_entry(answers, [0.5] * len(answers), name=name)


def test_the_formula_equals_the_vectors(vectors: Callable[[str], dict[str, Any]]) -> None:
    """The reference draws k samples and takes the share of the commonest; the draw is replayed here."""
    compared = 0
    for case in vectors("response_consistency")["cases"]:
        drawn = random.Random(case["seed"]).sample(case["parsed"], case["k"])
        commonest = case["out"]["most_common_answer"]
        scores = ResponseConsistency().score([entry_of(drawn)])[0]
        if commonest is None:  # there None is an answer, here it has no confidence
            assert scores == [None] * len(drawn)
            continue
        assert drawn.count(commonest) == case["out"]["answer_frequency"], "the draw is not the reference's"
        assert max(score for score in scores if score is not None) == pytest.approx(case["out"]["confidence"])
        compared += 1
    assert compared >= 3


def test_by_hand() -> None:
    pool = [entry_of(["7", "7", "8", None]), entry_of([None]), entry_of([])]
    assert ResponseConsistency().score(pool) == [[0.5, 0.5, 0.25, None], [None], []]
    assert ResponseConsistency(num_samples=9).score(pool[:1]) == [[0.5, 0.5, 0.25, None]]


def test_the_draw_is_without_replacement_and_by_question() -> None:
    entry = entry_of([str(i) for i in range(8)])
    row = ResponseConsistency(num_samples=3).score([entry])[0]
    assert sorted(row) == [0.0] * 5 + [pytest.approx(1 / 3)] * 3
    assert ResponseConsistency(num_samples=3).score([entry_of(["b"]), entry])[1] == row, "alone or not"
    others = [ResponseConsistency(num_samples=3).score([entry_of(list("abcdefgh"), f"q{i}")])[0] for i in range(9)]
    assert len({tuple(other) for other in others}) > 1
    assert ResponseConsistency(num_samples=3, seed=1).score([entry])[0] != row
    with pytest.raises(ValueError, match="`num_samples` to be a positive integer, but got 0"):
        ResponseConsistency(num_samples=0)


def test_unreadable_samples_count_among_the_k() -> None:
    # Of 4 readable equal answers and 4 unreadable, any draw of 4 gives the number of readable ones in it over 4.
    entry = entry_of(["7", None] * 4)
    row = ResponseConsistency(num_samples=4).score([entry])[0]
    assert row[1::2] == [None] * 4
    assert len(set(row[::2])) == 1
    assert row[0] in {0.0, 0.25, 0.5, 0.75, 1.0}


def test_what_looks_at_other_responses_says_so() -> None:
    assert set(STORED) <= set(ESTIMATORS)
    among = {"sasc_std", "sasc_certainty", "sasc_double"}
    meanings = {"semantic_share", "semantic_entropy", "cocoa", "two_sample_hybrid"}
    looking = {name for name, kind in ESTIMATORS.items() if kind.needs_pool}
    assert looking == {"response_consistency", *among, *meanings}


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"got 'self_certanty'\. Did you mean 'self_certainty'\?"):
        ESTIMATORS["self_certanty"]


def test_settings_are_the_defaults_with_changes() -> None:
    consistency = ESTIMATORS["response_consistency"](**estimator_settings("response_consistency", num_samples=1))
    entry = entry_of(["7", "8"])
    assert sorted(consistency.score([entry])[0]) == [0.0, 1.0]
    assert consistency.score([replace(entry, samples=())]) == [[]]
