"""Early stopping: the first confident sample, and what happens where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from support.strategy_pools import assert_curve_equals_solve
from support.vote_cases import (
    SCORE,
    assert_curve_survives_reshuffling,
    curve_entries,
    outcome_of,
    pool_correct,
    score_entry,
    verdict_of,
)

from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.stopping import EarlyStopping, Fallback
from selfcal_lightning.inference.vectorised import PoolArrays

THRESHOLDS = (0.5, 0.0, 0.25, 0.3, 0.75, 1.0, 0.9)
FALLBACKS = get_args(Fallback)


@pytest.mark.parametrize("fallback", FALLBACKS)
@pytest.mark.parametrize("max_samples", [1, 3, 16])
def test_curve_equals_solve(fallback: Fallback, max_samples: int) -> None:
    strategy = EarlyStopping(max_samples=max_samples, fallback=fallback)
    assert_curve_equals_solve(strategy, THRESHOLDS, seeds=range(10))


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_curve_equals_solve_on_reshuffled_pools(fallback: Fallback) -> None:
    assert_curve_survives_reshuffling(EarlyStopping(max_samples=5, fallback=fallback), THRESHOLDS)


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_curve_of_nothing(fallback: Fallback) -> None:
    strategy = EarlyStopping(fallback=fallback, confidence=SCORE)
    assert strategy.curve(PoolArrays.from_samples([]), [0.0, 1.0]).answer.shape == (2, 0)
    outcome = strategy.curve(PoolArrays.from_samples([score_entry([], []), score_entry([None], [1.0])]), [0.0, 1.0])
    assert outcome.answer.tolist() == [[-1, -1], [-1, -1]]
    assert outcome.used.tolist() == [[0, 1], [0, 1]]
    assert not outcome.stopped_early.any()


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


# ----------------------------------------------------------------------------------------------- reference vectors


def test_vectors_of_single_questions(vectors: Callable[[str], Any]) -> None:
    compared = 0
    for case in vectors("offline_single_question")["cases"]:
        kept = [(a, c) for a, c in zip(case["answers"], case["confidences"], strict=True) if a is not None]
        for key, result in case["results"].items():
            kind, _, threshold = key.partition("@")
            if kind != "threshold_based":
                continue
            strategy = EarlyStopping(float(threshold), max_samples=1024, confidence=SCORE)
            verdict = verdict_of(strategy, [a for a, _ in kept], [c for _, c in kept])
            assert (verdict.answer, verdict.samples_used) == (result["answer"], result["used"]), (case["id"], key)
            # Unreadable answers left in cost samples, and change no answer.
            assert verdict_of(strategy, case["answers"], case["confidences"]).answer == result["answer"]
            compared += 1
    assert compared >= 50


def test_vectors_of_the_online_sampler(vectors: Callable[[str], Any]) -> None:
    compared = 0
    for case in vectors("online_aggregators")["cases"]:
        # There, an unreadable answer is an answer like others, and the last sample decides without a stop.
        answers = ["unreadable" if answer is None else answer for answer in case["answers"]]
        for key, result in case["results"].items():
            kind, _, threshold = key.partition("@")
            if kind == "earlyexit":
                strategy = EarlyStopping(float(threshold), 1024, SCORE, "last")
                wanted = "unreadable" if result["answer"] is None else result["answer"]
                found = outcome_of(verdict_of(strategy, answers, case["confidences"]))
                assert found == (wanted, result["used"], result["stopped_early"]), (case["id"], key)
                compared += 1
    assert compared >= 50


def test_vectors_of_offline_curves(vectors: Callable[[str], Any]) -> None:
    for case in vectors("offline_analysis_curves")["cases"]:
        pool = PoolArrays.from_samples(curve_entries(case), confidence=SCORE)
        wanted = case["out"]["threshold_based"]
        # The reference sums steps of .01, so that its .7 lies a rounding above .7.
        outcome = EarlyStopping(max_samples=1024, confidence=SCORE).curve(pool, case["out"]["thresholds_sampled"])
        assert pool_correct(pool, outcome.answer).mean(axis=1) == pytest.approx(wanted["accuracy"], abs=1e-6)
        assert outcome.used.mean(axis=1) == pytest.approx(wanted["avg_used"], abs=1e-6)
        assert np.all(np.diff(outcome.used.mean(axis=1)) >= 0.0)
