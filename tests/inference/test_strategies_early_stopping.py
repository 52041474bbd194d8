"""Early stopping: the first confident sample, and what happens where there is none."""

from __future__ import annotations

from typing import get_args

import pytest
from support.vote_cases import (
    SCORE,
    outcome_of,
    score_entry,
    verdict_of,
)

from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.stopping import EarlyStopping, Fallback

FALLBACKS = get_args(Fallback)


def test_it_stops_at_the_first_that_reaches_the_threshold() -> None:
    # An unreadable answer and one without confidence cost a sample and stop nothing; reaching it is enough.
    verdict = verdict_of(EarlyStopping(0.75, confidence=SCORE), ["a", None, "c", "b", "a"], [0.7, 0.9, None, 0.75, 1.0])
    assert outcome_of(verdict) == ("b", 4, True)
    assert (verdict.confidence, verdict.correct) == (0.75, False)


def test_at_the_last_sample_of_the_budget_it_still_stopped() -> None:
    assert outcome_of(verdict_of(EarlyStopping(0.75, 2, SCORE), ["a", "b", "a"], [0.5, 0.8, 0.9])) == ("b", 2, True)
    assert outcome_of(verdict_of(EarlyStopping(0.75, 1, SCORE), ["a", "b", "a"], [0.5, 0.8, 0.9])) == ("a", 1, False)


@pytest.mark.parametrize(
    ("fallback", "answer", "confidence"),
    [("weighted_vote", "b", 0.4), ("best", "a", 0.5), ("last", "c", 0.1)],
)
def test_fallbacks_by_hand(fallback: Fallback, answer: str, confidence: float) -> None:
    # b has .4 + .4 of the weight, a the single best, c the last vote; the confidence is the best of the answer's.
    answers, scores = ["b", "a", "b", "c", None, "a"], [0.4, 0.5, 0.4, 0.1, 0.8, None]
    verdict = verdict_of(EarlyStopping(0.9, confidence=SCORE, fallback=fallback), answers, scores)
    assert outcome_of(verdict) == (answer, 6, False)
    assert verdict.confidence == confidence


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_without_votes_there_is_no_answer(fallback: Fallback) -> None:
    verdict = verdict_of(EarlyStopping(0.0, confidence=SCORE, fallback=fallback), [None, "a"], [0.9, None])
    assert outcome_of(verdict) == (None, 2, False)
    assert (verdict.confidence, verdict.correct) == (None, False)


def test_it_asks_for_one_sample_at_a_time_and_for_none_too_many() -> None:
    samples = score_entry(["a", "b", "a"], [0.1, 0.2, 0.9]).samples
    solving = EarlyStopping(0.9, max_samples=3, confidence=SCORE).solve(score_entry([], []).question)
    assert next(solving) == Ask(1)
    assert solving.send([samples[0]]) == Ask(1)
    assert solving.send([samples[1]]) == Ask(1)
    with pytest.raises(StopIteration) as done:
        solving.send([samples[2]])
    assert outcome_of(done.value.value) == ("a", 3, True)
