"""Adaptive consistency: the recorded vectors, rules worked out by hand, and the curve against the replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.strategy_pools import make_entry

from selfcal_lightning.inference.adaptive_consistency import THRESHOLDS, AdaptiveConsistency, Criterion
from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.vectorised import PoolArrays
from selfcal_lightning.records import Verdict

CRITERIA: tuple[Criterion, ...] = ("count_ratio", "confidence_ratio", "beta", "dirichlet", "entropy", "majority")


def _run(
    answers: Sequence[str | None], confidences: Sequence[float | None] | None = None, *, criterion: str, **settings: Any
) -> Verdict:
    entry = make_entry(answers, [0.5] * len(answers) if confidences is None else confidences)
    strategy = AdaptiveConsistency(criterion, **{"max_samples": 100, **settings})  # type: ignore[arg-type]
    return replay(strategy, entry)


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
