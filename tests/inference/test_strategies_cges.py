"""CGES against Bayes' rule by enumeration, simulations, and the curve against the replay."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.strategy_pools import make_entry

from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import CGES, fit_evidence
from selfcal_lightning.inference.vectorised import PoolArrays
from selfcal_lightning.records import Verdict


def _run(answers: Sequence[str | None], confidences: Sequence[float | None], **settings: Any) -> Verdict:
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
    assert _run(["a"], [confidence], **settings).confidence == confidence
    assert _run(["a", "b"], [confidence, 0.5], threshold=confidence, **settings).samples_used == 1


def test_two_samples_by_hand() -> None:
    # Two wrong answers possible. Agreement: 3/5 * 1/2 against 2/5 * 1/2 shared by two twice: .30 : .05 : .05.
    found = _run(["a", "a"], [0.6, 0.5], wrong_answers=2)
    assert (found.answer, found.confidence) == ("a", pytest.approx(0.75, abs=1e-12))
    # Disagreement: a .6 * .25, b .2 * .5, the third .2 * .25, together .30.
    found = _run(["a", "b"], [0.6, 0.5], wrong_answers=2)
    assert (found.answer, found.confidence) == ("a", pytest.approx(0.5, abs=1e-12))


@pytest.mark.parametrize("wrong_answers", [1, 2, 5, 40])
def test_the_posterior_is_bayes_rule(wrong_answers: int) -> None:
    draw = random.Random(wrong_answers)
    for _ in range(40):
        answers = [draw.choice("abcd") for _ in range(draw.randint(1, 8))]
        confidences = [draw.uniform(0.05, 0.95) for _ in answers]
        wanted = _reference_enumerated_posterior(answers, confidences, wrong_answers)
        found = _run(answers, confidences, wrong_answers=wrong_answers)
        assert found.answer == max(dict.fromkeys(answers), key=wanted.__getitem__)
        assert found.confidence == pytest.approx(wanted[str(found.answer)], abs=1e-9)


def test_evidence_discounts_further_samples() -> None:
    # 0: further samples are copies of the first. Three of .6 are one of .6.
    assert _run(["a"] * 3, [0.6] * 3, evidence=0.0).confidence == pytest.approx(0.6, abs=1e-12)
    # 1/2: three samples count as 3 / (1 + 2/2) = 1.5; log-odds of .6 against one of five wrong answers are log 7.5.
    seven = 7.5**1.5
    assert _run(["a"] * 3, [0.6] * 3, evidence=0.5).confidence == pytest.approx(seven / (seven + 5), abs=1e-9)
    # An unreadable sample is not among those counted.
    assert _run(["a", None, "a", "a"], [0.6] * 4, evidence=0.5).confidence == pytest.approx(
        seven / (seven + 5), abs=1e-9
    )


def test_low_confidence_speaks_against_an_answer() -> None:
    found = _run(["a", "a", "b"], [0.05, 0.05, 0.3])
    assert found.answer == "b"
    # Votes are counted by what they say, not by how many they are; a's two votes lower it below an unseen answer.
    assert _run(["a", "a"], [0.05, 0.05]).confidence < 0.05


def test_it_starts_with_the_first_sample_and_asks_one_by_one() -> None:
    entry = make_entry(["a", "a"], [0.6, 0.9])
    solving = CGES(threshold=0.9).solve(entry.question)
    assert next(solving) == Ask(1)
    assert solving.send([entry.samples[0]]) == Ask(1)
    with pytest.raises(StopIteration) as stop:
        solving.send([entry.samples[1]])
    assert (stop.value.value.answer, stop.value.value.samples_used, stop.value.value.stopped_early) == ("a", 2, True)


def test_samples_without_evidence() -> None:
    found = _run(["a", None, "b"], [None, 0.99, 0.6], threshold=0.6)
    assert (found.answer, found.samples_used, found.stopped_early, found.confidence) == ("b", 3, True, 0.6)
    mute = _run([None, "a"], [0.9, None], threshold=0.0)
    assert (mute.answer, mute.confidence, mute.correct, mute.stopped_early) == (None, None, False, False)


def test_ties_go_to_the_first_seen() -> None:
    # Three different confidences in another order add up to the same evidence, to the last bit.
    found = _run(list("bbbaaa"), [0.8, 0.6, 0.3, 0.3, 0.8, 0.6])
    assert (found.answer, found.confidence) == ("b", pytest.approx(0.5, abs=0.05))
    # "a" was seen first, but its first sample has no confidence, so the first vote is for "b".
    assert _run(["a", "b", "a"], [None, 0.6, 0.6]).answer == "b"


def test_certainty_is_clamped() -> None:
    assert _run(["a"], [1.0]).confidence == 0.999
    assert _run(["a"], [1.0], clamp=0.2).confidence == pytest.approx(0.8, abs=1e-12)
    # One mistaken certainty does not outweigh three.
    assert _run(["a", "b", "b", "b"], [1.0, 0.9, 0.9, 0.9]).answer == "b"
    assert _run(["a", "a"], [0.0, 0.0]).answer == "a"


def test_the_threshold_is_met_from_above() -> None:
    posterior = _run(["a", "a"], [0.6, 0.5], wrong_answers=2).confidence
    assert posterior == 0.75
    assert _run(["a", "a", "b"], [0.6, 0.5, 0.5], wrong_answers=2, threshold=0.75).samples_used == 2


def test_more_answers_than_assumed_are_all_possible() -> None:
    # Four answers seen, two assumed: the truth is one of the four.
    wanted = _reference_enumerated_posterior("abcd", [0.5] * 4, 1)
    assert len(wanted) == 4
    found = _run("abcd", [0.5] * 4, wrong_answers=1)
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
