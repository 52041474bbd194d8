"""Stopping rules by hand, against Bayes' rule by enumeration, and in simulations."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from support.strategy_pools import make_entry
from support.vote_cases import (
    SCORE,
    outcome_of,
    score_entry,
    verdict_of,
)

from selfcal_lightning.inference.adaptive_consistency import THRESHOLDS, AdaptiveConsistency, Criterion
from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import CGES, EarlyStopping, Fallback, Mode, WindowStopping, fit_evidence
from selfcal_lightning.inference.vectorised import PoolArrays
from selfcal_lightning.records import Verdict

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


MODES = get_args(Mode)
WINDOWS = (3, 1, 2, 4, 9, 20)


@pytest.mark.parametrize(
    ("mode", "window", "outcome"),
    [
        # a b b a | a a c c: the sliding windows see "b b" at once, the disjoint ones are ab, ba, aa.
        ("sliding", 2, ("b", 3, True)),
        ("disjoint", 2, ("a", 6, True)),
        ("sliding", 3, ("a", 6, True)),
        # abb, aaa
        ("disjoint", 3, ("a", 6, True)),
        ("sliding", 4, ("a", 8, False)),
        ("disjoint", 1, ("a", 1, True)),
    ],
)
def test_windows_by_hand(mode: Mode, window: int, outcome: tuple[str, int, bool]) -> None:
    assert outcome_of(verdict_of(WindowStopping(window, mode=mode), list("abbaaacc"))) == outcome


def test_a_window_that_agrees_need_not_be_the_majority() -> None:
    verdict = verdict_of(WindowStopping(2, mode="sliding"), list("abacc"))
    assert outcome_of(verdict) == ("c", 5, True)
    assert verdict.confidence == 0.4  # its share of the votes


@pytest.mark.parametrize("mode", MODES)
def test_unreadable_answers_are_skipped_and_cost_a_sample(mode: Mode) -> None:
    verdict = verdict_of(WindowStopping(3, mode=mode), ["a", None, "a", None, None, "a", "b"])
    assert outcome_of(verdict) == ("a", 6, True)
    assert verdict.confidence == 1.0
    assert outcome_of(verdict_of(WindowStopping(3, 5, mode=mode), ["a", None, "a", None, None, "a"])) == ("a", 5, False)


def test_disjoint_windows_are_asked_for_at_once_and_filled_up() -> None:
    samples = score_entry(["a", None, "a", "b", "b", "b", "b", "b"], [None] * 8).samples
    asks, verdict = _asks(WindowStopping(3, 8), samples)
    # a, none, a; one more is missing: b. Then b b b agree.
    assert asks == [Ask(3), Ask(1), Ask(3)]
    assert outcome_of(verdict) == ("b", 7, True)
    asks, verdict = _asks(WindowStopping(3, 5), samples)
    assert asks == [Ask(3), Ask(1), Ask(1)]  # the budget ends in a window
    assert outcome_of(verdict) == ("a", 5, False)  # a a b b: the first seen
    asks, verdict = _asks(WindowStopping(3, mode="sliding"), samples[:2])
    assert asks == [Ask(1), Ask(1), Ask(1)]


def _asks(strategy: WindowStopping, samples: Sequence[Any]) -> tuple[list[Ask], Any]:
    solving, asks, position = strategy.solve(score_entry([], []).question), [], 0
    try:
        asks.append(next(solving))
        while True:
            number = asks[-1].num_samples
            batch, position = list(samples[position : position + number]), position + number
            asks.append(solving.send(batch))
    except StopIteration as stop:
        return asks, stop.value


@pytest.mark.parametrize("mode", MODES)
def test_against_windows_cut_from_a_string(mode: Mode) -> None:
    draw = random.Random(4)
    for _ in range(300):
        answers = draw.choices("ab", weights=[2, 1], k=draw.randint(1, 12))
        window = draw.randint(1, 5)
        step = 1 if mode == "sliding" else window
        starts = range(0, len(answers) - window + 1, step)
        hit = next((start for start in starts if len(set(answers[start : start + window])) == 1), None)
        majority = "a" if answers.count("a") * 2 > len(answers) else "b" if "b" in answers else "a"
        if answers.count("a") * 2 == len(answers):
            majority = answers[0]
        wanted = (majority, len(answers), False) if hit is None else (answers[hit], hit + window, True)
        assert outcome_of(verdict_of(WindowStopping(window, mode=mode), answers)) == wanted


def _cges(answers: Sequence[str | None], confidences: Sequence[float | None], **settings: Any) -> Verdict:
    return replay(CGES(**{"threshold": 1.0, **settings}), make_entry(answers, confidences))


def _reference_enumerated_posterior(
    answers: Sequence[str], confidences: Sequence[float], wrong_answers: int
) -> dict[str, float]:
    """Bayes' rule over every possible truth, seen or not, with the products written out."""
    seen = list(dict.fromkeys(answers))
    possible = [*seen, *(f"not seen {i}" for i in range(wrong_answers + 1 - len(seen)))]
    likelihood = {
        truth: math.prod(
            c if answer == truth else (1 - c) / (len(possible) - 1)
            for answer, c in zip(answers, confidences, strict=True)
        )
        for truth in possible
    }
    total = sum(likelihood.values())
    return {truth: value / total for truth, value in likelihood.items()}


def _simulate(seed: int, *, num_questions: int, copies: float) -> PoolArrays:
    """A pool of 16 samples a question: each is right with its confidence, and with chance ``copies`` repeats one draw.

    Answer 0 is right, 1 to 5 are wrong; the confidence is the question's own chance of a right answer.
    """
    rng = np.random.default_rng(seed)
    shape = num_questions, 16
    chance = rng.uniform(0.05, 0.95, (num_questions, 1))
    draw = lambda size: np.where(rng.random(size) < chance, 0, rng.integers(1, 6, size))  # noqa: E731
    answer = np.where(rng.random(shape) < copies, draw((num_questions, 1)), draw(shape)).astype(np.int32)
    return PoolArrays(
        question_ids=tuple(f"q{i}" for i in range(num_questions)),
        length=np.full(num_questions, 16),
        answer=answer,
        confidence=np.broadcast_to(chance, shape).copy(),
        correct=answer == 0,
        tokens=np.ones(shape, dtype=np.int64),
    )


def _reference_numpy_log_loss(pool: PoolArrays, evidence: float) -> float:
    """The loss of the fit over all prefixes of a simulated pool, whose truth is one of the answers 0 to 5."""
    is_answer = pool.answer[:, :, None] == np.arange(6)
    ratio = np.log(pool.confidence * 5 / (1 - pool.confidence))[:, :, None] * is_answer
    number = np.arange(1, 17)[:, None]
    scores = np.cumsum(ratio, axis=1) / (1 + (number - 1) * (1 - evidence))
    posterior = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    seen = np.cumsum(is_answer, axis=1) > 0
    # On ties the first seen leads.
    first = np.where(seen, is_answer.argmax(axis=1)[:, None, :], 99)
    best = np.where(seen, posterior, -1.0)
    leader = np.where(best >= best.max(axis=2, keepdims=True) - 1e-12, first, 99).argmin(axis=2)
    chance = np.take_along_axis(posterior, leader[:, :, None], axis=2)[:, :, 0].clip(1e-12, 1 - 1e-12)
    return float(-np.log(np.where(leader == 0, chance, 1 - chance)).mean())


def _stopped_precision(pool: PoolArrays, strategy: CGES) -> float:
    """Share of right answers among the questions that the strategy stops early."""
    outcome = strategy.curve(pool, [strategy.threshold])
    stopped = outcome.stopped_early[0]
    assert stopped.sum() > 100
    return float((outcome.answer[0] == 0)[stopped].mean())


@pytest.mark.parametrize("confidence", [0.02, 0.3, 0.7, 0.9])
@pytest.mark.parametrize("settings", [{}, {"wrong_answers": 1}, {"wrong_answers": 50, "evidence": 0.3}])
def test_one_sample_has_its_own_confidence(confidence: float, settings: dict[str, Any]) -> None:
    assert _cges(["a"], [confidence], **settings).confidence == confidence
    assert _cges(["a", "b"], [confidence, 0.5], threshold=confidence, **settings).samples_used == 1


def test_two_samples_by_hand() -> None:
    # Two wrong answers possible. Agreement: 3/5 * 1/2 against 2/5 * 1/2 shared by two twice: .30 : .05 : .05.
    found = _cges(["a", "a"], [0.6, 0.5], wrong_answers=2)
    assert (found.answer, found.confidence) == ("a", pytest.approx(0.75, abs=1e-12))
    # Disagreement: a .6 * .25, b .2 * .5, the third .2 * .25, together .30.
    found = _cges(["a", "b"], [0.6, 0.5], wrong_answers=2)
    assert (found.answer, found.confidence) == ("a", pytest.approx(0.5, abs=1e-12))


@pytest.mark.parametrize("wrong_answers", [1, 2, 5, 40])
def test_the_posterior_is_bayes_rule(wrong_answers: int) -> None:
    draw = random.Random(wrong_answers)
    for _ in range(40):
        answers = [draw.choice("abcd") for _ in range(draw.randint(1, 8))]
        confidences = [draw.uniform(0.05, 0.95) for _ in answers]
        wanted = _reference_enumerated_posterior(answers, confidences, wrong_answers)
        found = _cges(answers, confidences, wrong_answers=wrong_answers)
        assert found.answer == max(dict.fromkeys(answers), key=wanted.__getitem__)
        assert found.confidence == pytest.approx(wanted[str(found.answer)], abs=1e-9)


def test_evidence_discounts_further_samples() -> None:
    # 0: further samples are copies of the first. Three of .6 are one of .6.
    assert _cges(["a"] * 3, [0.6] * 3, evidence=0.0).confidence == pytest.approx(0.6, abs=1e-12)
    # 1/2: three samples count as 3 / (1 + 2/2) = 1.5; log-odds of .6 against one of five wrong answers are log 7.5.
    seven = 7.5**1.5
    assert _cges(["a"] * 3, [0.6] * 3, evidence=0.5).confidence == pytest.approx(seven / (seven + 5), abs=1e-9)
    # An unreadable sample is not among those counted.
    assert _cges(["a", None, "a", "a"], [0.6] * 4, evidence=0.5).confidence == pytest.approx(
        seven / (seven + 5), abs=1e-9
    )


def test_low_confidence_speaks_against_an_answer() -> None:
    found = _cges(["a", "a", "b"], [0.05, 0.05, 0.3])
    assert found.answer == "b"
    # Votes are counted by what they say, not by how many they are; a's two votes lower it below an unseen answer.
    assert _cges(["a", "a"], [0.05, 0.05]).confidence < 0.05


def test_it_starts_with_the_first_sample_and_asks_one_by_one() -> None:
    entry = make_entry(["a", "a"], [0.6, 0.9])
    solving = CGES(threshold=0.9).solve(entry.question)
    assert next(solving) == Ask(1)
    assert solving.send([entry.samples[0]]) == Ask(1)
    with pytest.raises(StopIteration) as stop:
        solving.send([entry.samples[1]])
    assert (stop.value.value.answer, stop.value.value.samples_used, stop.value.value.stopped_early) == ("a", 2, True)


def test_samples_without_evidence() -> None:
    found = _cges(["a", None, "b"], [None, 0.99, 0.6], threshold=0.6)
    assert (found.answer, found.samples_used, found.stopped_early, found.confidence) == ("b", 3, True, 0.6)
    mute = _cges([None, "a"], [0.9, None], threshold=0.0)
    assert (mute.answer, mute.confidence, mute.correct, mute.stopped_early) == (None, None, False, False)


def test_ties_of_posteriors_go_to_the_first_seen() -> None:
    # Three different confidences in another order add up to the same evidence, to the last bit.
    found = _cges(list("bbbaaa"), [0.8, 0.6, 0.3, 0.3, 0.8, 0.6])
    assert (found.answer, found.confidence) == ("b", pytest.approx(0.5, abs=0.05))
    # "a" was seen first, but its first sample has no confidence, so the first vote is for "b".
    assert _cges(["a", "b", "a"], [None, 0.6, 0.6]).answer == "b"


def test_certainty_is_clamped() -> None:
    assert _cges(["a"], [1.0]).confidence == 0.999
    assert _cges(["a"], [1.0], clamp=0.2).confidence == pytest.approx(0.8, abs=1e-12)
    # One mistaken certainty does not outweigh three.
    assert _cges(["a", "b", "b", "b"], [1.0, 0.9, 0.9, 0.9]).answer == "b"
    assert _cges(["a", "a"], [0.0, 0.0]).answer == "a"


def test_the_threshold_is_met_from_above() -> None:
    posterior = _cges(["a", "a"], [0.6, 0.5], wrong_answers=2).confidence
    assert posterior == 0.75
    assert _cges(["a", "a", "b"], [0.6, 0.5, 0.5], wrong_answers=2, threshold=0.75).samples_used == 2


def test_more_answers_than_assumed_are_all_possible() -> None:
    # Four answers seen, two assumed: the truth is one of the four.
    wanted = _reference_enumerated_posterior("abcd", [0.5] * 4, 1)
    assert len(wanted) == 4
    found = _cges("abcd", [0.5] * 4, wrong_answers=1)
    assert (found.answer, found.confidence) == ("a", pytest.approx(0.25, abs=1e-12))


def test_independent_samples_stop_with_the_stated_probability() -> None:
    """The simulation is the model, so stopping at .9 is right at least nine times in ten, whenever it stops."""
    pool = _simulate(0, num_questions=1500, copies=0.0)
    assert fit_evidence(pool) > 0.9
    assert 0.9 < _stopped_precision(pool, CGES(threshold=0.9)) < 0.99


def test_correlated_samples_need_the_fitted_evidence() -> None:
    calibration = _simulate(1, num_questions=800, copies=0.7)
    test = _simulate(2, num_questions=3000, copies=0.7)
    naive = CGES(threshold=0.9)
    assert _stopped_precision(test, naive) < 0.75
    evidence = fit_evidence(calibration, naive)
    assert 0.1 < evidence < 0.6
    fitted = _stopped_precision(test, replace(naive, evidence=evidence))
    assert fitted > 0.87


def test_the_fit_is_the_best_evidence() -> None:
    pool = _simulate(5, num_questions=300, copies=0.6)
    losses = {value: _reference_numpy_log_loss(pool, value) for value in (fit_evidence(pool), *np.linspace(0, 1, 51))}
    assert next(iter(losses.values())) <= min(losses.values()) + 1e-6
    assert max(losses.values()) > min(losses.values()) + 0.1


def test_copies_fit_no_further_evidence() -> None:
    assert fit_evidence(_simulate(3, num_questions=500, copies=1.0)) < 0.02


def test_fitting_needs_labels() -> None:
    pool = _simulate(4, num_questions=5, copies=0.5)
    with pytest.raises(ValueError, match="Expected `pool` to hold right answers"):
        fit_evidence(replace(pool, correct=np.zeros_like(pool.correct)))


def test_a_confidence_must_be_a_probability() -> None:
    entry = make_entry(["a", "b"], [0.5, 0.5])
    strategy = CGES(confidence="mean_logprob")
    message = r"Expected the confidence 'mean_logprob' to be a probability in \[0, 1\], but got -1"
    with pytest.raises(ValueError, match=message):
        replay(strategy, entry)
    with pytest.raises(ValueError, match=message):
        strategy.curve(PoolArrays.from_samples([entry], confidence="mean_logprob"), [0.5])


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
