import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.vote_cases import SCORE, score_entry, verdict_of

from selfcal_lightning.inference.base import Ask, Strategy
from selfcal_lightning.inference.vectorised import PoolArrays, first_crossing
from selfcal_lightning.inference.voting import CISC, BestOfN, BordaVoting, PassAtN, SelfConsistency, StandardisedVoting

WHOLE_BUDGET = (
    SelfConsistency(), SelfConsistency(confidence="p_true"), BestOfN(), PassAtN(), CISC(), BordaVoting(),
    StandardisedVoting(confidence="p_true"),
)  # fmt: skip


@pytest.mark.parametrize("strategy", WHOLE_BUDGET, ids=repr)
def test_all_ask_once_for_the_budget_and_never_stop_early(strategy: Strategy) -> None:
    solving = strategy.solve(score_entry([], []).question)
    assert next(solving) == Ask(16)
    verdict = verdict_of(strategy, [None, None], [0.5, 0.5])
    assert (verdict.answer, verdict.confidence, verdict.correct) == (None, None, False)
    assert (verdict.samples_used, verdict.stopped_early) == (2, False)


WEIGHTED = SelfConsistency(confidence=SCORE)


@pytest.mark.parametrize(
    ("strategy", "answers", "scores", "answer", "confidence"),
    [
        # a and b have two votes of five, a came first; weighted .75 of .75 + .5 + 0, and .75 of .25 + .75 + 0.
        (SelfConsistency(), "ab-bac", [0.75, 0.25, 1.0, 0.25, None, 0.0], "a", 0.4),
        (WEIGHTED, "ab-bac", [0.75, 0.25, 1.0, 0.25, None, 0.0], "a", 0.6),
        (WEIGHTED, "ab-bac", [0.25, 0.5, 1.0, 0.25, None, 0.0], "b", 0.75),
        (WEIGHTED, "-baa", [0.9, 0.0, 0.0, 0.0], "b", None),  # without weight the first seen wins and has no share
        (SelfConsistency(max_samples=3), "abbbb", None, "b", 2 / 3),
        (SelfConsistency(max_samples=1), "abbbb", None, "a", 1.0),
        (SelfConsistency(max_samples=99), "abb", None, "b", 2 / 3),
        (BestOfN(confidence=SCORE), "b-aca", [0.5, 0.99, 0.75, 0.75, None], "a", 0.75),
        (BestOfN(confidence=SCORE), "ba", [-7.0, -3.0], "a", -3.0),
        (PassAtN(), "-bba", None, "a", None),
        (PassAtN(max_samples=3), "-bba", None, "b", None),
        (PassAtN(), "ba", None, "a", None),
        # At T = .5 weights are exp(2 c): a has e^2 = 7.39, b 2 e^.9 = 4.92; at T = 5 2 exp(.09) > exp(.2).
        (CISC(0.5, confidence=SCORE), "abb", [1.0, 0.45, 0.45], "a", math.exp(2) / (math.exp(2) + 2 * math.exp(0.9))),
        (CISC(5.0, confidence=SCORE), "abb", [1.0, 0.45, 0.45], "b",
         2 * math.exp(0.09) / (2 * math.exp(0.09) + math.exp(0.2))),
        # The unreadable one has no rank, so N = 4 and the points are 4, 1, 3, -, 2: equal for a and b; 1 + sqrt 3 > 2.
        (BordaVoting(1.0, confidence=SCORE), "abb-c", [0.9, 0.1, 0.8, 1.0, 0.5], "a", 0.4),
        (BordaVoting(0.5, confidence=SCORE), "abb-c", [0.9, 0.1, 0.8, 1.0, 0.5], "b",
         (1 + math.sqrt(3)) / (3 + math.sqrt(3) + math.sqrt(2))),
        # Mean 2 and deviation 1 over the votes: z = -1, 1; what lies beyond the budget has no say.
        (StandardisedVoting(confidence=SCORE), "a-ba", [1.0, 9.0, 3.0, None], "b", math.e / (math.e + math.exp(-1))),
        (StandardisedVoting(max_samples=1, confidence=SCORE), "a-ba", [1.0, 9.0, 3.0, None], "a", 1.0),
    ],
)  # fmt: skip
def test_votes_by_hand(strategy: Any, answers: str, scores: list | None, answer: str, confidence: float | None) -> None:
    verdict = verdict_of(strategy, [None if one == "-" else one for one in answers], scores)
    assert (verdict.answer, verdict.correct) == (answer, answer == "a")
    assert verdict.confidence == pytest.approx(confidence, abs=1e-9)  # z-scores have a tiny term below the fraction
    assert verdict.samples_used == min(len(answers), strategy.max_samples)


def test_weights_of_equal_scores() -> None:
    samples = score_entry(["a", "b"], [0.1, 0.1]).samples
    assert BordaVoting(1.0, confidence=SCORE).weigh(samples) == pytest.approx({"a": 2, "b": 1}), "by order"
    assert StandardisedVoting(confidence=SCORE).weigh(samples) == pytest.approx({"a": 1, "b": 1})


def test_plain_votes_ignore_the_confidence_of_a_pool() -> None:
    entry = score_entry(["a", "b", "a"], [0.1, 0.9, None])
    pool = PoolArrays.from_samples([entry], confidence=SCORE)
    assert SelfConsistency().curve(pool, [3]).answer.tolist() == [[0]]
    assert SelfConsistency(confidence=SCORE).curve(pool, [3]).answer.tolist() == [[1]]
    assert PassAtN().curve(pool, [3]).answer.tolist() == [[0]]


def test_a_first_seen_answer_without_its_confidence_does_not_win_a_tie() -> None:
    # a is read first, but its first *vote* comes after that of b.
    answers, scores = ["a", "b", "a"], [None, 0.5, 0.5]
    for strategy in (SelfConsistency(confidence=SCORE), CISC(confidence=SCORE), BestOfN(confidence=SCORE)):
        assert verdict_of(strategy, answers, scores).answer == "b"
        pool = PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE)
        assert strategy.curve(pool, [3]).answer.tolist() == [[1]]


def test_negative_weights_are_refused() -> None:
    answers, scores = ["a", "b"], [-1.0, -2.5]
    with pytest.raises(ValueError, match=r"got -2\.5\. .*best_of_n, borda"):
        verdict_of(WEIGHTED, answers, scores)
    with pytest.raises(ValueError, match=r"got -2\.5"):
        WEIGHTED.curve(PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE), [2])
    for other in (BestOfN, CISC, BordaVoting, StandardisedVoting):
        assert verdict_of(other(confidence=SCORE), answers, scores).answer == "a"


def test_cisc_holds_scores_far_apart() -> None:
    # exp(-3000) is 0 in a float: among the first two the larger must still win, and later ones must not be lost.
    answers, scores = ["a", "b", "c", "c"], [-4000.0, -3000.0, 0.0, -3000.0]
    pool = PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE)
    for temperature in (1.0, 1e-6):
        strategy = CISC(temperature, confidence=SCORE)
        assert strategy.curve(pool, [1, 2, 3, 4]).answer.ravel().tolist() == [0, 1, 2, 2]
        verdicts = [verdict_of(replace(strategy, max_samples=n), answers, scores) for n in (1, 2, 3, 4)]
        assert [verdict.answer for verdict in verdicts] == ["a", "b", "c", "c"]


def test_a_score_that_is_unknown_reaches_nothing() -> None:
    assert first_crossing(np.array([[np.nan, 0.4, 1.0]]), [0.4, 0.3, 2.0]).tolist() == [[1], [1], [3]]
