import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.house import Vectors
from support.strategy_pools import SCORE, assert_curve_equals_solve, make_entry, random_pool, score_entry, verdict_of

from selfcal_lightning.inference.adaptive_consistency import THRESHOLDS, AdaptiveConsistency
from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import CGES, EarlyStopping, WindowStopping
from selfcal_lightning.inference.vectorised import PoolArrays, first_crossing
from selfcal_lightning.inference.voting import CISC, BestOfN, BordaVoting, PassAtN, SelfConsistency, StandardisedVoting
from selfcal_lightning.records import QuestionSamples

VOTES = (
    SelfConsistency(),
    SelfConsistency(confidence="p_true"),
    BestOfN(),
    PassAtN(),
    *(CISC(temperature=value) for value in (0.5, 1e-3, 1e-6, 1e3)),
    *(BordaVoting(power=value) for value in (0.5, 0.0, 1.0, 100.0)),
    StandardisedVoting(confidence="p_true"),
)
STOPPING: tuple[Any, ...] = (
    *(EarlyStopping(fallback=fallback) for fallback in ("weighted_vote", "best", "last")),
    *(AdaptiveConsistency(criterion) for criterion in THRESHOLDS),
    *(AdaptiveConsistency(criterion, max_samples=4, min_samples=3) for criterion in THRESHOLDS),
    AdaptiveConsistency(max_samples=5, min_samples=1),
    AdaptiveConsistency(max_samples=1),
    *(CGES(evidence=value) for value in (1.0, 0.4, 0.0)),
    CGES(max_samples=4, wrong_answers=2, evidence=0.4),
    *(WindowStopping(mode=mode) for mode in ("sliding", "disjoint")),
)
GRIDS: dict[str, tuple[float, ...]] = {
    "max_samples": tuple(range(1, 12)),
    "threshold": (0.0, 0.25, 0.5, 0.3, 2 / 3, 0.75, 0.8, 0.95, 0.999, 1.0),
    "window": (3, 1, 2, 4, 9, 20),
}
SMALL = [replace(s, max_samples=budget) for s in STOPPING if s.max_samples == 16 for budget in (1, 3)]
every_strategy = pytest.mark.parametrize("strategy", [*VOTES, *STOPPING, *SMALL], ids=repr)


@every_strategy
def test_curve_equals_solve(strategy: Any) -> None:
    assert_curve_equals_solve(strategy, GRIDS[strategy.grid_parameter], [random_pool(seed) for seed in range(4)])


def long_pool() -> list[QuestionSamples]:
    """More answers than the rules look at, or assume, and up to thirty samples."""
    draw = random.Random(7)
    pool = []
    for question in range(10):
        length = 30 if question == 0 else draw.randint(20, 30)
        favoured = [*"abcdefghi", *"a" * draw.randint(0, 12)]
        answers = [None if draw.random() < 0.1 else draw.choice(favoured) for _ in range(length)]
        confidences = [None if draw.random() < 0.1 else draw.randint(0, 20) / 20 for _ in range(length)]
        pool.append(make_entry(answers, confidences, name=f"q{question}"))
    return pool


@pytest.mark.parametrize("strategy", [s for s in STOPPING if s.max_samples == 16], ids=repr)
def test_curve_equals_solve_on_long_pools(strategy: Any) -> None:
    longer = replace(strategy, max_samples=28)
    outcome = assert_curve_equals_solve(longer, GRIDS[strategy.grid_parameter], [long_pool()])
    assert outcome.stopped_early.any()
    assert not outcome.stopped_early.all()


@every_strategy
def test_curve_of_nothing(strategy: Any) -> None:
    grid = [1.0, 1.0] if strategy.grid_parameter == "threshold" else [1, 4]
    assert strategy.curve(PoolArrays.from_samples([]), grid).answer.shape == (2, 0)
    mute = [score_entry([], []), score_entry([None], [1.0])]
    outcome = strategy.curve(PoolArrays.from_samples(mute, confidence=strategy.confidence), grid)
    assert outcome.answer.tolist() == [[-1, -1]] * 2
    assert outcome.used.tolist() == [[0, 1]] * 2
    assert not outcome.stopped_early.any()


# ---- reference vectors; those of curves are held by tests/evaluation/test_protocol_paper.py

ONLINE: dict[str, Callable[[str], Any]] = {
    "sc": lambda value: SelfConsistency(int(value)),
    "sc_conf": lambda value: SelfConsistency(int(value), SCORE),
    "best_of_n": lambda value: BestOfN(int(value), SCORE),
    "earlyexit": lambda value: EarlyStopping(float(value), 1024, SCORE, "last"),
    "asc": lambda value: AdaptiveConsistency("count_ratio", float(value), 100),
    "asc_conf": lambda value: AdaptiveConsistency("confidence_ratio", float(value), 100, SCORE),
}
OFFLINE: dict[str, Callable[[str], Any]] = {
    "threshold_based": lambda value: EarlyStopping(float(value), 1024, SCORE),
    "ESC": lambda value: WindowStopping(int(value), 1024, "sliding"),
    "asc": lambda value: AdaptiveConsistency("count_ratio", float(value), 100),
    "es": lambda value: AdaptiveConsistency("confidence_ratio", float(value), 100, SCORE),
}


def test_online_vectors(vectors: Vectors) -> None:
    compared = dict.fromkeys(ONLINE, 0)
    for case in vectors("online_aggregators")["cases"]:
        # There, an unreadable answer is an answer like others.
        answers = ["unreadable" if answer is None else answer for answer in case["answers"]]
        for key, result in case["results"].items():
            rule, _, value = key.partition("@")
            if rule in ONLINE:
                verdict = verdict_of(ONLINE[rule](value.removeprefix("n=")), answers, case["confidences"])
                wanted = "unreadable" if result["answer"] is None else result["answer"]
                assert (verdict.answer, verdict.samples_used) == (wanted, result["used"]), (case["id"], key)
                if rule not in ("sc", "sc_conf", "best_of_n"):
                    assert verdict.stopped_early == result["stopped_early"], (case["id"], key)
                compared[rule] += 1
    assert min(compared.values()) >= 30, compared


def test_offline_vectors_of_single_questions(vectors: Vectors) -> None:
    compared = dict.fromkeys(OFFLINE, 0)
    for case in vectors("offline_single_question")["cases"]:
        # There, unreadable answers are dropped before anything is counted.
        kept = [(a, c) for a, c in zip(case["answers"], case["confidences"], strict=True) if a is not None]
        for key, result in case["results"].items():
            rule, _, value = key.partition("@")
            if rule in OFFLINE:
                strategy = OFFLINE[rule](value.removeprefix("w="))
                verdict = verdict_of(strategy, [a for a, _ in kept], [c for _, c in kept])
                assert (verdict.answer, verdict.samples_used) == (result["answer"], result["used"]), (case["id"], key)
                if rule in ("threshold_based", "ESC"):  # unreadable answers cost samples, and change no answer
                    assert verdict_of(strategy, case["answers"], case["confidences"]).answer == result["answer"]
                compared[rule] += 1
    assert min(compared.values()) >= 30, compared


def test_original_vectors_of_adaptive_consistency(vectors: Vectors) -> None:
    for case in vectors("adaptive_consistency_online")["cases"]:
        for criterion, wanted in case["results"].items():
            verdict = verdict_of(AdaptiveConsistency(criterion, max_samples=40), case["sequence"])
            found = verdict.answer, verdict.samples_used, verdict.stopped_early
            assert found == (wanted["answer"], wanted["used"], wanted["stopped"]), criterion


def test_vectors_of_borda(vectors: Vectors) -> None:
    for case in vectors("borda_voting")["cases"]:
        strategy = BordaVoting(power=case["power"], confidence=SCORE)
        votes = strategy.weigh(score_entry(case["answers"], case["confidences"]).samples)
        given = {answer: vote for answer, vote in zip(case["answers"], case["votes"], strict=True) if vote}
        assert votes == pytest.approx(given, abs=1e-6)
        assert verdict_of(strategy, case["answers"], case["confidences"]).answer == case["selected"]


def test_vectors_of_best_weighted_and_majority(vectors: Vectors) -> None:
    made = {"naive": BestOfN(confidence=SCORE), "weighted": SelfConsistency(confidence=SCORE),
            "majority": SelfConsistency()}  # fmt: skip
    for case in vectors("bon_naive_weighted_majority")["cases"]:
        for key, strategy in made.items():
            (wanted,) = case[key].values()
            answer = verdict_of(strategy, case["canonical"], case["scores"]).answer
            assert f"\\boxed{{{answer}}}" == wanted, key


def test_vectors_of_standardised_votes(vectors: Vectors) -> None:
    strategy = StandardisedVoting(confidence=SCORE)
    for case in vectors("sasc_strategies")["cases"]:
        answers = [response["extracted_answer"].removesuffix(".0") for response in case["responses"]]
        for key, sign, name in (("std_topk_entropy", -1, "w_std"), ("avg_certainty", 1, "w_cert")):
            scores = [sign * response[key] for response in case["responses"]]
            found = strategy.weigh(score_entry(answers, scores).samples)
            assert found == pytest.approx({answer: votes[name] for answer, votes in case["votes"].items()}, abs=1e-6)
            assert np.isfinite(list(found.values())).all()


# ---- votes by hand, and what is refused

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
    assert next(strategy.solve(score_entry([], []).question)) == Ask(strategy.max_samples), "all at once"
    verdict = verdict_of(strategy, [None if one == "-" else one for one in answers], scores)
    assert (verdict.answer, verdict.correct) == (answer, answer == "a")
    assert verdict.confidence == pytest.approx(confidence, abs=1e-9)  # z-scores have a tiny term below the fraction
    assert verdict.samples_used == min(len(answers), strategy.max_samples)


def test_only_a_weighted_vote_reads_the_confidence_and_the_first_vote_is_not_the_first_sample() -> None:
    weighted = WEIGHTED, CISC(confidence=SCORE), BestOfN(confidence=SCORE)
    for scores, plain, found in (([0.1, 0.9, None], 0, 1), ([None, 0.5, 0.5], 0, 1)):
        pool = PoolArrays.from_samples([score_entry(["a", "b", "a"], scores)], confidence=SCORE)
        for strategy in (SelfConsistency(), PassAtN()):
            assert strategy.curve(pool, [3]).answer.tolist() == [[plain]]
        for strategy in weighted:
            assert strategy.curve(pool, [3]).answer.tolist() == [[found]]
            assert verdict_of(strategy, ["a", "b", "a"], scores).answer == "ab"[found]


def test_scores_far_apart_or_below_zero_or_unknown_or_equal() -> None:
    # exp(-3000) is 0 in a float: among the first two the larger must still win, and later ones must not be lost.
    answers, scores = ["a", "b", "c", "c"], [-4000.0, -3000.0, 0.0, -3000.0]
    pool = PoolArrays.from_samples([score_entry(answers, scores)], confidence=SCORE)
    for temperature in (1.0, 1e-6):
        strategy = CISC(temperature, confidence=SCORE)
        assert strategy.curve(pool, [1, 2, 3, 4]).answer.ravel().tolist() == [0, 1, 2, 2]
        verdicts = [verdict_of(replace(strategy, max_samples=n), answers, scores) for n in (1, 2, 3, 4)]
        assert [verdict.answer for verdict in verdicts] == ["a", "b", "c", "c"]
    for other in (BestOfN, CISC, BordaVoting, StandardisedVoting):
        assert verdict_of(other(confidence=SCORE), ["a", "b"], [-1.0, -2.5]).answer == "a"
    samples = score_entry(["a", "b"], [0.1, 0.1]).samples
    assert BordaVoting(1.0, confidence=SCORE).weigh(samples) == pytest.approx({"a": 2, "b": 1}), "by order"
    assert StandardisedVoting(confidence=SCORE).weigh(samples) == pytest.approx({"a": 1, "b": 1})
    assert first_crossing(np.array([[np.nan, 0.4, 1.0]]), [0.4, 0.3, 2.0]).tolist() == [[1], [1], [3]]


def test_confidences_that_cannot_weigh_are_refused_by_both_forms() -> None:
    for strategy, message in (
        (SelfConsistency(confidence="mean_logprob"), r"got -1\..*best_of_n, borda"),
        (CGES(confidence="mean_logprob"), r"'mean_logprob' to be a probability in \[0, 1\], but got -1"),
        (AdaptiveConsistency("confidence_ratio", confidence="mean_logprob"), "Expected a confidence of at least 0"),
    ):
        entry = make_entry(["a", "b"], [0.5, 0.5])
        with pytest.raises(ValueError, match=message):
            replay(strategy, entry)
        with pytest.raises(ValueError, match=message):
            strategy.curve(PoolArrays.from_samples([entry], confidence="mean_logprob"), [1])


def test_settings_that_a_strategy_does_not_have_are_named() -> None:
    """A strategy that reads no confidence takes none, rather than ignore it."""
    for name, fields, message in (
        ("self_consistancy", {}, r"one of best_of_n, .*'self_consistancy'\. Did you mean 'self_con"),
        ("early_stopping", {"treshold": 0.5}, r"to be among threshold, max_.*'treshold'\. Did you mean 'threshold'\?"),
        ("pass_at_n", {"confidence": "p_true"}, r"pass_at_n to be among max_samples, but got 'confidence'\.$"),
        ("adaptive_consistency", {"criterion": "beta", "confidence": "p_true"}, "to be None .* 'confidence_r"),
        ("early_stopping", {"threshold": math.nan}, "`threshold` .* got nan"),
        ("self_consistency", {"max_samples": True}, "`max_samples` .* got True"),
    ):
        with pytest.raises(ValueError, match=message):
            make_strategy(name, **fields)
