import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.house import Vectors
from support.strategy_pools import assert_curve_equals_solve, make_entry, random_pool
from support.vote_cases import SCORE, outcome_of, score_entry, verdict_of

from selfcal_lightning.inference.adaptive_consistency import THRESHOLDS, AdaptiveConsistency
from selfcal_lightning.inference.stopping import CGES, EarlyStopping, WindowStopping
from selfcal_lightning.inference.vectorised import PoolArrays
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
            assert outcome_of(verdict) == (wanted["answer"], wanted["used"], wanted["stopped"]), criterion


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
