"""Adaptive consistency: the recorded vectors, rules worked out by hand, and the curve against the replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.strategy_pools import assert_curve_equals_solve, make_entry

from selfcal_lightning.inference.adaptive_consistency import THRESHOLDS, AdaptiveConsistency, Criterion
from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.vectorised import UNREADABLE, PoolArrays
from selfcal_lightning.records import Question, QuestionSamples, Verdict

Vectors = Callable[[str], dict[str, Any]]
CRITERIA: tuple[Criterion, ...] = ("count_ratio", "confidence_ratio", "beta", "dirichlet", "entropy", "majority")
GRID = (0.0, 0.25, 0.5, 2 / 3, 0.75, 0.8, 0.95, 1.0)
ONLINE = {"asc": "count_ratio", "asc_conf": "confidence_ratio"}
OFFLINE = {"asc": "count_ratio", "es": "confidence_ratio"}


def _run(
    answers: Sequence[str | None], confidences: Sequence[float | None] | None = None, *, criterion: str, **settings: Any
) -> Verdict:
    entry = make_entry(answers, [0.5] * len(answers) if confidences is None else confidences)
    strategy = AdaptiveConsistency(criterion, **{"max_samples": 100, **settings})  # type: ignore[arg-type]
    return replay(strategy, entry)


def test_online_vectors(vectors: Vectors) -> None:
    compared = 0
    for case in vectors("online_aggregators")["cases"]:
        # There, an unreadable answer is an answer like others.
        answers = ["unreadable" if answer is None else answer for answer in case["answers"]]
        for key, wanted in case["results"].items():
            rule, _, threshold = key.partition("@")
            if rule in ONLINE:
                found = _run(answers, case["confidences"], criterion=ONLINE[rule], threshold=float(threshold))
                assert found.answer == (wanted["answer"] or "unreadable"), (case["id"], key)
                assert (found.samples_used, found.stopped_early) == (wanted["used"], wanted["stopped_early"])
                compared += 1
    assert compared >= 100


def test_offline_vectors_of_single_questions(vectors: Vectors) -> None:
    compared = 0
    for case in vectors("offline_single_question")["cases"]:
        # There, unreadable answers are dropped before anything is counted.
        kept = [i for i, answer in enumerate(case["answers"]) if answer is not None]
        answers, confidences = [case["answers"][i] for i in kept], [case["confidences"][i] for i in kept]
        for key, wanted in case["results"].items():
            rule, _, threshold = key.partition("@")
            if rule in OFFLINE:
                found = _run(answers, confidences, criterion=OFFLINE[rule], threshold=float(threshold))
                assert (found.answer, found.samples_used) == (wanted["answer"], wanted["used"]), (case["id"], key)
                compared += 1
    assert compared >= 100


def test_offline_vectors_of_curves(vectors: Vectors) -> None:
    cases = vectors("offline_analysis_curves")["cases"]
    for case in cases:
        questions: dict[str, list[dict[str, Any]]] = {}
        for row in case["rows"]:
            if row["answer"]:
                questions.setdefault(row["prompt"], []).append(row)
        pool = [
            make_entry([r["answer"] for r in rows], [r["confidence"] for r in rows], name=name)
            for name, rows in questions.items()
        ]
        arrays = PoolArrays.from_samples(pool, confidence="p_true")
        for rule, criterion in OFFLINE.items():
            strategy = AdaptiveConsistency(criterion, max_samples=100)  # type: ignore[arg-type]
            outcome = strategy.curve(arrays, case["out"]["thresholds_sampled"])
            is_right = np.array(
                [
                    [rows[arrays.answer[q].tolist().index(code)]["is_correct"] for code in outcome.answer[:, q]]
                    for q, rows in enumerate(questions.values())
                ]
            )
            assert is_right.mean(axis=0) == pytest.approx(case["out"][rule]["accuracy"], abs=1e-9)
            assert outcome.used.mean(axis=1) == pytest.approx(case["out"][rule]["avg_used"], abs=1e-9)
    assert len(cases) >= 2


def test_criteria_of_the_original_vectors(vectors: Vectors) -> None:
    cases = vectors("adaptive_consistency_online")["cases"]
    for case in cases:
        for criterion, wanted in case["results"].items():
            found = _run(case["sequence"], criterion=criterion, max_samples=40)
            assert (found.samples_used, found.answer) == (wanted["used"], wanted["answer"]), criterion
            assert found.stopped_early == wanted["stopped"]
    assert len(cases) >= 5


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("max_samples", "min_samples"), [(16, 2), (4, 3), (5, 1), (1, 2)])
def test_curve_equals_solve(criterion: Criterion, max_samples: int, min_samples: int) -> None:
    strategy = AdaptiveConsistency(criterion, max_samples=max_samples, min_samples=min_samples)
    assert_curve_equals_solve(strategy, GRID, seeds=range(4))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_curve_equals_solve_on_reshuffled_long_pools(criterion: Criterion) -> None:
    """More answers than the Dirichlet rule looks at, and codes that are not in the order seen after the reshuffle."""
    draw = random.Random(7)
    alphabet = [f"answer {i}" for i in range(9)]
    pool, orders = [], np.tile(np.arange(30), (12, 1))
    for question in range(12):
        length = 30 if question == 0 else draw.randint(20, 30)
        favoured = [*alphabet, *[alphabet[0]] * draw.randint(0, 12)]
        answers = [None if draw.random() < 0.1 else draw.choice(favoured) for _ in range(length)]
        confidences = [None if draw.random() < 0.1 else draw.randint(0, 100) / 100 for _ in range(length)]
        pool.append(make_entry(answers, confidences, name=f"q{question}"))
        orders[question, :length] = np.random.default_rng(question).permutation(length)
    strategy = AdaptiveConsistency(criterion, max_samples=28)
    arrays = PoolArrays.from_samples(pool, confidence="p_true")
    outcome = strategy.curve(arrays.reordered(orders), GRID)
    assert outcome.stopped_early.any()
    assert not outcome.stopped_early.all()
    for row, threshold in enumerate(GRID):
        for column, entry in enumerate(pool):
            samples = tuple(entry.samples[i] for i in orders[column, : len(entry.samples)])
            verdict = replay(replace(strategy, threshold=threshold), replace(entry, samples=samples))
            codes = list(dict.fromkeys(s.answer for s in entry.samples if s.answer is not None))
            code = UNREADABLE if verdict.answer is None else codes.index(verdict.answer)
            found = outcome.answer[row, column], outcome.used[row, column], outcome.stopped_early[row, column]
            assert found == (code, verdict.samples_used, verdict.stopped_early), (threshold, column)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_curve_of_empty_and_unreadable_pools(criterion: Criterion) -> None:
    strategy = AdaptiveConsistency(criterion)
    empty = PoolArrays.from_samples([QuestionSamples(Question("q", "t", ()), (), "test")], confidence="p_true")
    mute = PoolArrays.from_samples([make_entry([None, None], [0.5, 0.5])], confidence="p_true")
    for pool, used in ((empty, 0), (mute, 2)):
        outcome = strategy.curve(pool, [0.0, 0.5])
        assert outcome.answer.tolist() == [[UNREADABLE], [UNREADABLE]]
        assert outcome.used.tolist() == [[used], [used]]
        assert not outcome.stopped_early.any()


def test_it_asks_for_the_minimum_then_one_by_one() -> None:
    entry = make_entry(list("abcaa"), [0.5] * 5)
    solving = AdaptiveConsistency("count_ratio", threshold=0.6, min_samples=3).solve(entry.question)
    assert next(solving) == Ask(3)
    assert solving.send(list(entry.samples[:3])) == Ask(1)
    assert solving.send(list(entry.samples[3:4])) == Ask(1)
    with pytest.raises(StopIteration) as stop:
        solving.send(list(entry.samples[4:]))
    assert (stop.value.value.samples_used, stop.value.value.answer) == (5, "a")


def test_the_budget_bounds_the_first_ask() -> None:
    solving = AdaptiveConsistency(max_samples=1, min_samples=4).solve(make_entry(["a"], [0.5]).question)
    assert next(solving) == Ask(1)


def test_unreadable_samples_are_used_but_do_not_vote() -> None:
    # One vote does not make two, however many samples were drawn.
    found = _run([None, "a", None, "a", "b"], criterion="count_ratio", threshold=1.0)
    assert (found.answer, found.samples_used, found.stopped_early) == ("a", 4, True)
    # Without the confidence, the first "b" is no vote either.
    found = _run(["b", "a", "b", "a"], [None, 0.5, 0.25, 0.5], criterion="confidence_ratio", threshold=0.8)
    assert (found.answer, found.samples_used, found.stopped_early) == ("a", 4, True)
    assert found.confidence == 0.8


def test_no_weight_is_no_agreement() -> None:
    found = _run(["a", "a", "b"], [0.0, 0.0, 0.0], criterion="confidence_ratio", threshold=0.0)
    assert (found.answer, found.samples_used, found.stopped_early, found.confidence) == ("a", 3, False, None)
    mute = _run([None, None], criterion="beta")
    assert (mute.answer, mute.confidence, mute.correct, mute.stopped_early) == (None, None, False, False)


def test_a_rule_that_fires_at_the_last_sample_stopped_early() -> None:
    assert _run(["a", "a"], criterion="majority", max_samples=2).stopped_early
    assert not _run(["a", "b"], criterion="majority", max_samples=2).stopped_early


def test_ties_go_to_the_first_seen() -> None:
    assert _run(list("baab"), criterion="majority", threshold=1.0).answer == "b"
    assert _run(list("baab"), [0.25, 0.25, 0.5, 0.5], criterion="confidence_ratio", threshold=1.0).answer == "b"


@pytest.mark.parametrize(
    ("criterion", "wanted"),
    [
        # a a a b: shares 3/4; 13/16 from Beta(4, 2); the same for two answers; one minus H(1/4) in bits.
        ("count_ratio", 0.75),
        ("majority", 0.75),
        ("confidence_ratio", 0.6 / 0.9),
        ("beta", 0.8125),
        ("dirichlet", 0.8125),
        ("entropy", 1 - 0.8112781244591328),
    ],
)
def test_the_confidence_is_what_the_rule_compares(criterion: Criterion, wanted: float) -> None:
    found = _run(list("aaab"), [0.2, 0.2, 0.2, 0.3], criterion=criterion, min_samples=5)
    assert found.confidence == pytest.approx(wanted, abs=1e-9)
    assert (found.answer, found.stopped_early) == ("a", False)


def test_a_minimum_of_one_stops_as_the_beta_rule_of_the_reference() -> None:
    assert _run(["a", "a"], criterion="beta", threshold=0.75, min_samples=1).samples_used == 1
    assert _run(["a", "a"], criterion="beta", threshold=0.75).samples_used == 2
    # The phantom rival keeps a lone answer from stopping the entropy rule.
    assert _run(["a", "a"], criterion="entropy", threshold=0.95, min_samples=1).samples_used == 2


def test_defaults_are_resolved() -> None:
    assert {criterion: AdaptiveConsistency(criterion).threshold for criterion in CRITERIA} == THRESHOLDS
    assert AdaptiveConsistency("confidence_ratio").confidence == "p_true"
    assert AdaptiveConsistency("confidence_ratio", confidence="fused").confidence == "fused"
    assert AdaptiveConsistency("beta").confidence is None
    assert AdaptiveConsistency().name == "adaptive_consistency"
    assert AdaptiveConsistency("beta", threshold=0.0).threshold == 0.0


def test_bad_grids_are_refused() -> None:
    pool = PoolArrays.from_samples([make_entry(["a"], [0.5])])
    with pytest.raises(ValueError, match=r"Expected `threshold` to be a number in \[0, 1\], but got 2.0"):
        AdaptiveConsistency().curve(pool, [0.5, 2.0])


def test_negative_weights_are_refused_by_both_forms() -> None:
    strategy = AdaptiveConsistency("confidence_ratio", confidence="mean_logprob")
    entry = make_entry(["a", "b"], [0.5, 0.5])
    with pytest.raises(ValueError, match="Expected a confidence of at least 0"):
        replay(strategy, entry)
    with pytest.raises(ValueError, match="Expected a confidence of at least 0"):
        strategy.curve(PoolArrays.from_samples([entry], confidence="mean_logprob"), [0.5])
