"""Strategies that look at their whole budget: plain and weighted votes, best-of-N, CISC, Borda, and the oracle."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support.vote_cases import (
    SCORE,
    score_entry,
    verdict_of,
)

from selfcal_lightning.inference.base import Ask, Strategy
from selfcal_lightning.inference.vectorised import PoolArrays, first_crossing, vote_leader, votes_of, walk_votes
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


def test_majority_and_weighted_vote_by_hand() -> None:
    answers, scores = ["a", "b", None, "b", "a", "c"], [0.75, 0.25, 1.0, 0.25, None, 0.0]
    plain = verdict_of(SelfConsistency(), answers, scores)
    assert (plain.answer, plain.correct, plain.samples_used) == ("a", True, 6)  # a and b have two votes, a came first
    assert plain.confidence == 0.4  # 2 of 5: the unreadable one is no vote
    weighted = verdict_of(SelfConsistency(confidence=SCORE), answers, scores)
    assert (weighted.answer, weighted.confidence) == ("a", 0.6)  # .75 of .75 + .5 + 0
    turned = verdict_of(SelfConsistency(confidence=SCORE), answers, [0.25, 0.5, 1.0, 0.25, None, 0.0])
    assert (turned.answer, turned.correct, turned.confidence) == ("b", False, 0.75)


def test_plain_votes_ignore_the_confidence_of_a_pool() -> None:
    entry = score_entry(["a", "b", "a"], [0.1, 0.9, None])
    pool = PoolArrays.from_samples([entry], confidence=SCORE)
    assert SelfConsistency().curve(pool, [3]).answer.tolist() == [[0]]
    assert SelfConsistency(confidence=SCORE).curve(pool, [3]).answer.tolist() == [[1]]
    assert PassAtN().curve(pool, [3]).answer.tolist() == [[0]]


def test_only_the_budget_is_looked_at() -> None:
    assert verdict_of(SelfConsistency(max_samples=3), list("abbbb")).samples_used == 3
    assert verdict_of(SelfConsistency(max_samples=1), list("abbbb")).answer == "a"
    assert verdict_of(SelfConsistency(max_samples=99), list("abb")).samples_used == 3


def test_without_weight_the_first_seen_wins_and_has_no_share() -> None:
    verdict = verdict_of(SelfConsistency(confidence=SCORE), [None, "b", "a", "a"], [0.9, 0.0, 0.0, 0.0])
    assert (verdict.answer, verdict.confidence) == ("b", None)


def test_a_first_seen_answer_without_its_confidence_does_not_win_a_tie() -> None:
    # a is read first, but its first *vote* comes after that of b.
    answers, scores = ["a", "b", "a"], [None, 0.5, 0.5]
    for strategy in (SelfConsistency(confidence=SCORE), CISC(confidence=SCORE), BestOfN(confidence=SCORE)):
        assert verdict_of(strategy, answers, scores).answer == "b"
        pool = PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE)
        assert strategy.curve(pool, [3]).answer.tolist() == [[1]]


def test_negative_weights_are_refused() -> None:
    answers, scores = ["a", "b"], [-1.0, -2.5]
    strategy = SelfConsistency(confidence=SCORE)
    with pytest.raises(ValueError, match=r"got -2\.5\. .*best_of_n, borda"):
        verdict_of(strategy, answers, scores)
    with pytest.raises(ValueError, match=r"got -2\.5"):
        strategy.curve(PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE), [2])
    for other in (
        BestOfN(confidence=SCORE),
        CISC(confidence=SCORE),
        BordaVoting(confidence=SCORE),
        StandardisedVoting(confidence=SCORE),
    ):
        assert verdict_of(other, answers, scores).answer == "a"


def test_best_of_n_by_hand() -> None:
    answers, scores = ["b", None, "a", "c", "a"], [0.5, 0.99, 0.75, 0.75, None]
    verdict = verdict_of(BestOfN(confidence=SCORE), answers, scores)
    assert (verdict.answer, verdict.confidence, verdict.samples_used) == ("a", 0.75, 5)
    assert verdict_of(BestOfN(confidence=SCORE), ["b", "a"], [-7.0, -3.0]).answer == "a"


def test_the_oracle_by_hand() -> None:
    assert verdict_of(PassAtN(), [None, "b", "b", "a"]).answer == "a"
    assert verdict_of(PassAtN(max_samples=3), [None, "b", "b", "a"]).answer == "b"
    verdict = verdict_of(PassAtN(), ["b", "a"])
    assert (verdict.correct, verdict.confidence, verdict.samples_used) == (True, None, 2)


def test_cisc_by_hand() -> None:
    # At T = .5 weights are exp(2 c): a has e^2 = 7.39, b has 2 e^.9 = 4.92.
    answers, scores = ["a", "b", "b"], [1.0, 0.45, 0.45]
    verdict = verdict_of(CISC(temperature=0.5, confidence=SCORE), answers, scores)
    assert verdict.answer == "a"
    assert verdict.confidence == pytest.approx(math.exp(2) / (math.exp(2) + 2 * math.exp(0.9)), abs=1e-12)
    # At T = 5 the two less sure votes win: 2 exp(.09) > exp(.2).
    verdict = verdict_of(CISC(temperature=5.0, confidence=SCORE), answers, scores)
    assert verdict.answer == "b"
    assert verdict.confidence == pytest.approx(2 * math.exp(0.09) / (2 * math.exp(0.09) + math.exp(0.2)), abs=1e-12)


def test_cisc_against_the_softmax() -> None:
    draw = random.Random(0)
    for _ in range(200):
        answers = draw.choices("abcd", k=12)
        scores = [draw.uniform(-3.0, 3.0) for _ in answers]
        temperature = 10 ** draw.uniform(-2, 2)
        verdict = verdict_of(CISC(temperature=temperature, confidence=SCORE), answers, scores)
        shares = _reference_softmax_shares(answers, scores, temperature)
        assert verdict.answer == max(shares, key=shares.__getitem__)
        assert verdict.confidence == pytest.approx(max(shares.values()), abs=1e-12)


def _reference_softmax_shares(answers: list[str], scores: list[float], temperature: float) -> dict[str, float]:
    import torch

    weights = torch.softmax(torch.tensor(scores, dtype=torch.float64) / temperature, dim=0).tolist()
    return {a: sum(w for b, w in zip(answers, weights, strict=True) if a == b) for a in dict.fromkeys(answers)}


def test_cisc_holds_scores_far_apart() -> None:
    # exp(-3000) is 0 in a float: among the first two the larger must still win, and later ones must not be lost.
    answers, scores = ["a", "b", "c", "c"], [-4000.0, -3000.0, 0.0, -3000.0]
    pool = PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE)
    for temperature in (1.0, 1e-6):
        strategy = CISC(temperature, confidence=SCORE)
        assert strategy.curve(pool, [1, 2, 3, 4]).answer.ravel().tolist() == [0, 1, 2, 2]
        verdicts = [verdict_of(replace(strategy, max_samples=n), answers, scores) for n in (1, 2, 3, 4)]
        assert [verdict.answer for verdict in verdicts] == ["a", "b", "c", "c"]


def test_borda_by_hand() -> None:
    # Ranks of a, b, b, None, c: the unreadable one has none, so N = 4 and the points are 4, 1, 3, -, 2.
    answers, scores = ["a", "b", "b", None, "c"], [0.9, 0.1, 0.8, 1.0, 0.5]
    votes = BordaVoting(power=1.0, confidence=SCORE).weigh(score_entry(answers, scores).samples)
    assert votes == {"a": 4.0, "b": 4.0, "c": 2.0}
    verdict = verdict_of(BordaVoting(power=1.0, confidence=SCORE), answers, scores)
    assert (verdict.answer, verdict.confidence) == ("a", 0.4)  # first seen of the two
    assert verdict_of(BordaVoting(power=0.5, confidence=SCORE), answers, scores).answer == "b"  # 1 + sqrt 3 > 2
    # Equal confidences: the first seen ranks higher.
    assert BordaVoting(power=1.0, confidence=SCORE).weigh(score_entry(["a", "b"], [0.5, 0.5]).samples) == {
        "a": 2,
        "b": 1,
    }


def test_standardised_votes_by_hand() -> None:
    # Mean 2 and deviation 1 over the three votes with a confidence that are read: z = -1, 1 and, of the first two, 0.
    answers, scores = ["a", None, "b", "a"], [1.0, 9.0, 3.0, None]
    votes = StandardisedVoting(confidence=SCORE).weigh(score_entry(answers, scores).samples)
    assert votes == {"a": pytest.approx(math.exp(-1)), "b": pytest.approx(math.e)}
    verdict = verdict_of(StandardisedVoting(confidence=SCORE), answers, scores)
    assert (verdict.answer, verdict.confidence) == ("b", pytest.approx(math.e / (math.e + math.exp(-1))))
    first = StandardisedVoting(max_samples=1, confidence=SCORE)
    assert verdict_of(first, answers, scores).answer == "a", "what lies beyond the budget has no say"
    assert StandardisedVoting(confidence=SCORE).weigh(score_entry(["a", "b"], [0.1, 0.1]).samples) == {"a": 1, "b": 1}


def test_limits_of_cisc_and_borda() -> None:
    draw = random.Random(1)
    for _ in range(100):
        answers = draw.choices("abc", k=9)
        scores = [draw.random() for _ in answers]
        majority = verdict_of(SelfConsistency(), answers, scores).answer
        best = verdict_of(BestOfN(confidence=SCORE), answers, scores).answer
        assert verdict_of(CISC(1e9, confidence=SCORE), answers, [0.5] * 9).answer == majority
        assert verdict_of(CISC(1e-6, confidence=SCORE), answers, scores).answer == best
        assert verdict_of(BordaVoting(0.0, confidence=SCORE), answers, scores).answer == majority
        assert verdict_of(BordaVoting(100.0, confidence=SCORE), answers, scores).answer == best


@pytest.mark.parametrize("weighted", [False, True])
def test_walk_of_votes_against_counting(weighted: bool) -> None:
    draw = random.Random(2)
    entries = [
        score_entry(
            [draw.choice(["a", "b", "c", None]) for _ in range(8)],
            [draw.choice([None, 0.0, 0.25, 0.5]) for _ in range(8)],
        )
        for _ in range(50)
    ]
    votes = votes_of(PoolArrays.from_samples(entries, confidence=SCORE), weighted=weighted)
    for step in walk_votes(votes):
        assert vote_leader(votes, votes.weight[:, : step.num_samples]).tolist() == step.leader.tolist()
        for row, entry in enumerate(entries):
            tally: Counter[str] = Counter()
            for sample in entry.samples[: step.num_samples]:
                weight = sample.confidences.get(SCORE) if weighted else 1.0
                if sample.answer is not None and weight is not None:
                    tally[sample.answer] += weight  # type: ignore[assignment]
            codes = list(dict.fromkeys(s.answer for s in entry.samples if s.answer is not None))
            best = tally.most_common(1)  # the first seen of equals
            assert step.leader[row] == (codes.index(best[0][0]) if best else -1)
            assert step.lead_weight[row] == (best[0][1] if best else 0.0)
            assert step.total_weight[row] == sum(tally.values())
            assert [step.totals[row, codes.index(answer)] for answer in tally] == list(tally.values())


def test_first_crossing_against_a_loop() -> None:
    generator = np.random.default_rng(3)
    scores = generator.integers(0, 6, size=(60, 7)) / 5.0
    scores[generator.random(scores.shape) < 0.3] = -np.inf
    scores[generator.random(scores.shape) < 0.2] = np.nan
    grid = [0.4, 0.0, 1.0, 0.3, 0.4, -1.0, 2.0]
    found = first_crossing(scores, grid)
    for (index, value), (row, line) in itertools.product(enumerate(grid), enumerate(scores)):
        assert found[index, row] == next((n for n, score in enumerate(line) if score >= value), 7)
    assert first_crossing(np.zeros((0, 3)), grid).shape == (7, 0)
    assert first_crossing(np.zeros((2, 0)), [0.0]).tolist() == [[0, 0]]
