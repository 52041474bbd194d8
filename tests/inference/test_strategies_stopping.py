import math
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice, product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.house import Vectors
from support.strategy_pools import drive, make_entry, outcome_of, verdict_of

from selfcal_lightning.inference.adaptive_consistency import (
    AdaptiveConsistency,
    beta_leader_probability,
    dirichlet_leader_probability,
    normalised_entropy,
)
from selfcal_lightning.inference.base import Ask
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.stopping import CGES, EarlyStopping, Fallback, Mode, WindowStopping, fit_evidence
from selfcal_lightning.inference.vectorised import PoolArrays
from selfcal_lightning.records import Sample, Verdict

MODES = get_args(Mode)
BY_HAND: dict[str, list[tuple[Any, str, list[float | None] | float, tuple[str | None, int, bool], float | None]]] = {
    "an unreadable answer and one without confidence cost a sample and stop nothing; reaching it is enough": [
        (EarlyStopping(0.75), "a-cba", [0.7, 0.9, None, 0.75, 1.0], ("b", 4, True), 0.75),
        (CGES(0.6), "a-b", [None, 0.99, 0.6], ("b", 3, True), 0.6),
        (CGES(0.0), "-a", [0.9, None], (None, 2, False), None),
        *((EarlyStopping(0.0, fallback=one), "-a", [0.9, None], (None, 2, False), None) for one in get_args(Fallback)),
        # One vote does not make two, however many samples were drawn; the first "b" is no vote.
        (AdaptiveConsistency(threshold=1.0), "-a-ab", 0.5, ("a", 4, True), 1.0),
        (AdaptiveConsistency("confidence_ratio", 0.8), "baba", [None, 0.5, 0.25, 0.5], ("a", 4, True), 0.8),
        (AdaptiveConsistency("beta"), "--", 0.5, (None, 2, False), None),
        *((WindowStopping(3, mode=mode), "a-a--ab", None, ("a", 6, True), 1.0) for mode in MODES),
        *((WindowStopping(3, 5, mode=mode), "a-a--a", None, ("a", 5, False), 1.0) for mode in MODES),
    ],
    "at the last sample of the budget it still stopped": [
        (EarlyStopping(0.75, 2), "aba", [0.5, 0.8, 0.9], ("b", 2, True), 0.8),
        (EarlyStopping(0.75, 1), "aba", [0.5, 0.8, 0.9], ("a", 1, False), 0.5),
        (AdaptiveConsistency("majority", max_samples=2), "aa", 0.5, ("a", 2, True), 1.0),
        (AdaptiveConsistency("majority", max_samples=2), "ab", 0.5, ("a", 2, False), 0.5),
    ],
    "b has .4 + .4 of the weight, a the single best, c the last vote; the confidence is the best of the answer's": [
        (EarlyStopping(0.9, fallback=one), "babc-a", [0.4, 0.5, 0.4, 0.1, 0.8, None], (answer, 6, False), best)
        for one, answer, best in (("weighted_vote", "b", 0.4), ("best", "a", 0.5), ("last", "c", 0.1))
    ],
    "a b b a | a a c c: sliding windows see b b at once, disjoint ones of two are ab, ba, aa, of three abb, aaa": [
        (WindowStopping(2, mode="sliding"), "abbaaacc", None, ("b", 3, True), 2 / 3),
        (WindowStopping(2, mode="disjoint"), "abbaaacc", None, ("a", 6, True), 2 / 3),
        *((WindowStopping(3, mode=mode), "abbaaacc", None, ("a", 6, True), 2 / 3) for mode in MODES),
        (WindowStopping(4, mode="sliding"), "abbaaacc", None, ("a", 8, False), 0.5),
        (WindowStopping(1, mode="disjoint"), "abbaaacc", None, ("a", 1, True), 1.0),
    ],
    "a window that agrees need not be the majority; its confidence is its share of the votes": [
        (WindowStopping(2, mode="sliding"), "abacc", None, ("c", 5, True), 0.4),
    ],
    "without evidence further samples are copies; with 1/2 three count as 3 / (1 + 2/2) = 1.5, of those that vote": [
        (CGES(1.0, evidence=0.0), "aaa", 0.6, ("a", 3, False), 0.6),
        (CGES(1.0, evidence=0.5), "aaa", 0.6, ("a", 3, False), 7.5**1.5 / (7.5**1.5 + 5)),
        (CGES(1.0, evidence=0.5), "a-aa", 0.6, ("a", 4, False), 7.5**1.5 / (7.5**1.5 + 5)),
    ],
    "certainty is clamped": [
        (CGES(1.0), "a", 1.0, ("a", 1, False), 0.999),
        (CGES(1.0, clamp=0.2), "a", 1.0, ("a", 1, False), 0.8),
    ],
    "no weight is no agreement": [
        (AdaptiveConsistency("confidence_ratio", 0.0), "aab", 0.0, ("a", 3, False), None),
    ],
    "ties go to the first seen": [
        (AdaptiveConsistency("majority", 1.0), "baab", 0.5, ("b", 4, False), 0.5),
        (AdaptiveConsistency("confidence_ratio", 1.0), "baab", [0.25, 0.25, 0.5, 0.5], ("b", 4, False), 0.5),
    ],
    "the confidence is what the rule compares: 3/4; 13/16 from Beta(4, 2); one minus H(1/4) in bits": [
        (AdaptiveConsistency(criterion, min_samples=5), "aaab", [0.2, 0.2, 0.2, 0.3], ("a", 4, False), wanted)
        for criterion, wanted in (
            ("count_ratio", 0.75), ("majority", 0.75), ("confidence_ratio", 0.6 / 0.9), ("beta", 0.8125),
            ("dirichlet", 0.8125), ("entropy", 1 - 0.8112781244591328),
        )
    ],
    "a minimum of one stops as the reference's beta rule; a phantom rival keeps entropy from stopping at one": [
        (AdaptiveConsistency("beta", 0.75, min_samples=1), "aa", 0.5, ("a", 1, True), 0.75),
        (AdaptiveConsistency("beta", 0.75), "aa", 0.5, ("a", 2, True), 0.875),
        (AdaptiveConsistency("entropy", 0.95, min_samples=1), "aa", 0.5, ("a", 2, True), 5 / 3 - math.log2(3)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "answers", "scores", "outcome", "confidence"),
    [pytest.param(*case, id=f"{rule}-{n}") for rule, cases in BY_HAND.items() for n, case in enumerate(cases)],
)
def test_rules_by_hand(strategy: Any, answers: str, scores: Any, outcome: tuple, confidence: float | None) -> None:
    """The answer "-" is unreadable; one score stands for all."""
    given = scores if isinstance(scores, list) else [scores] * len(answers)
    verdict = replay(strategy, make_entry([None if answer == "-" else answer for answer in answers], given))
    assert outcome_of(verdict) == outcome
    assert verdict.confidence == pytest.approx(confidence, abs=1e-12)
    assert verdict.correct == (verdict.answer == "a")


@pytest.mark.parametrize(
    ("strategy", "answers", "asks", "outcome"),
    [
        (EarlyStopping(0.9, max_samples=3), "aba", [1, 1, 1], ("a", 3, True)),
        (CGES(0.9), "aa", [1, 1], ("a", 2, True)),
        (AdaptiveConsistency("count_ratio", 0.6, min_samples=3), "abcaa", [3, 1, 1], ("a", 5, True)),
        (AdaptiveConsistency(max_samples=1, min_samples=4), "a", [1], ("a", 1, False)),
        # a, none, a; one more is missing: b. Then b b b agree. With five the budget ends in a window: a a b b.
        (WindowStopping(3, 8), "a-abbbbb", [3, 1, 3], ("b", 7, True)),
        (WindowStopping(3, 5), "a-abbbbb", [3, 1, 1], ("a", 5, False)),
        (WindowStopping(3, mode="sliding"), "a-", [1, 1, 1], ("a", 2, False)),
    ],
)
def test_samples_are_asked_for_as_they_are_needed(strategy: Any, answers: str, asks: list[int], outcome: tuple) -> None:
    scores = [0.6] * (len(answers) - 1) + [0.9]
    entry = make_entry([None if answer == "-" else answer for answer in answers], scores)
    left, found = iter(entry.samples), []

    def reply(ask: Ask) -> list[Sample]:
        found.append(ask)
        return list(islice(left, ask.num_samples))

    assert outcome_of(drive(strategy, entry.question, reply)) == outcome
    assert found == [Ask(number) for number in asks]


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


def _reference_posterior(answers: Sequence[str], confidences: Sequence[float], wrong_answers: int) -> dict[str, float]:
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


@pytest.mark.parametrize("wrong_answers", [1, 2, 5, 40])
def test_the_posterior_is_bayes_rule(wrong_answers: int) -> None:
    draw = random.Random(wrong_answers)
    for _ in range(40):
        answers = [draw.choice("abcd") for _ in range(draw.randint(1, 8))]
        confidences = [draw.uniform(0.05, 0.95) for _ in answers]
        wanted = _reference_posterior(answers, confidences, wrong_answers)
        found = _cges(answers, confidences, wrong_answers=wrong_answers)
        assert found.answer == max(dict.fromkeys(answers), key=wanted.__getitem__)
        assert found.confidence == pytest.approx(wanted[str(found.answer)], abs=1e-9)


def test_votes_are_weighed_by_what_they_say_not_counted() -> None:
    assert _cges(["a", "a", "b"], [0.05, 0.05, 0.3]).answer == "b"
    assert _cges(["a", "a"], [0.05, 0.05]).confidence < 0.05, "two votes lower it below an unseen answer"
    assert _cges(["a", "b", "b", "b"], [1.0, 0.9, 0.9, 0.9]).answer == "b", "one certainty does not outweigh three"
    assert _cges(["a", "a"], [0.0, 0.0]).answer == "a"
    assert _cges(["a", "a"], [0.6, 0.5], wrong_answers=2).confidence == 0.75, "to the last bit"
    # Three different confidences in another order add up to the same evidence, to the last bit: the first seen leads.
    found = _cges(list("bbbaaa"), [0.8, 0.6, 0.3, 0.3, 0.8, 0.6])
    assert (found.answer, found.confidence) == ("b", pytest.approx(0.5, abs=0.05))
    assert _cges(["a", "b", "a"], [None, 0.6, 0.6]).answer == "b", "the first vote counts, not the first sample"


def test_the_fit_is_the_best_evidence_and_needs_labels() -> None:
    pool = _simulate(5, num_questions=300, copies=0.6)
    losses = {value: _reference_numpy_log_loss(pool, value) for value in (fit_evidence(pool), *np.linspace(0, 1, 51))}
    assert next(iter(losses.values())) <= min(losses.values()) + 1e-6
    assert max(losses.values()) > min(losses.values()) + 0.1
    with pytest.raises(ValueError, match="Expected `pool` to hold right answers"):
        fit_evidence(replace(pool, correct=np.zeros_like(pool.correct)))


# ---- rules of adaptive consistency


def _reference_exact_dirichlet(counts: list[int]) -> Fraction:
    """P(Gamma(v1 + 1) is the largest) by expanding prod (1 - e^-x sum x^j / j!) into terms that integrate exactly."""
    lead, *rivals = sorted(counts, reverse=True)
    total = Fraction(0)
    for chosen in product(*[[None, *range(rival + 1)] for rival in rivals]):
        powers = [power for power in chosen if power is not None]
        order, rate = lead + sum(powers), 1 + len(powers)
        factor = Fraction((-1) ** len(powers), math.prod(math.factorial(power) for power in powers))
        total += factor * Fraction(math.factorial(order), math.factorial(lead) * rate ** (order + 1))
    return total


def test_rules_equal_the_vectors(vectors: Vectors) -> None:
    cases = vectors("adaptive_consistency")["cases"]
    for case in cases:
        counts = list(case["counts"].values())
        beta, entropy = case["beta@0.95"], case["entropy@0.75"]
        assert beta_leader_probability(counts) == pytest.approx(beta["prob"], abs=1e-6)
        assert beta_leader_probability(counts) == pytest.approx(case["beta_closed_form"], abs=1e-9)
        assert (beta_leader_probability(counts) >= 0.95) == beta["stop"]
        if sum(counts) > 1:  # the reference judges a single vote by -1
            assert normalised_entropy(counts) == pytest.approx(entropy["prob"], abs=1e-6)
            assert (normalised_entropy(counts) <= 0.75) == entropy["stop"]
    assert len(cases) >= 10


def test_dirichlet_equals_the_vectors(vectors: Vectors) -> None:
    cases = vectors("adaptive_consistency_dirichlet")["cases"]
    for case in cases:
        column = next(value for name, value in case.items() if name.startswith("reference_P"))
        assert dirichlet_leader_probability(case["counts_desc"]) == pytest.approx(column, abs=0.02)
        assert dirichlet_leader_probability(case["counts_desc"], top=10) == pytest.approx(column, abs=0.003)
        assert dirichlet_leader_probability(case["counts_desc"]) == pytest.approx(case["same_top5"], abs=0.003)
    assert len(cases) >= 5


def test_beta_is_exact_and_dirichlet_of_two_answers() -> None:
    pairs = [(first, second) for first in range(40) for second in range(first + 1)]
    # P(Beta(v1 + 1, v2 + 1) > 1/2): at most v1 heads in v1 + v2 + 1 throws of a fair coin.
    wanted = [sum(math.comb(v1 + v2 + 1, heads) for heads in range(v1 + 1)) / 2 ** (v1 + v2 + 1) for v1, v2 in pairs]
    assert beta_leader_probability(pairs) == pytest.approx(wanted, abs=1e-12)
    assert beta_leader_probability([1]) == 0.75
    assert beta_leader_probability([0, 0]) == 0.5
    pairs = [(first, second) for first in range(64) for second in range(first + 1)]
    assert dirichlet_leader_probability(pairs) == pytest.approx(beta_leader_probability(pairs), abs=1e-11)
    assert dirichlet_leader_probability([900, 850]) == pytest.approx(beta_leader_probability([900, 850]), abs=1e-10)
    assert dirichlet_leader_probability([3]) == beta_leader_probability([3])


@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 1, 1], [7, 4, 3], [5, 5, 5], [4, 3, 2, 1], [2, 2, 2, 2, 2], [9, 0]])
def test_dirichlet_is_exact(counts: list[int]) -> None:
    rivals = [count for count in sorted(counts, reverse=True)[1:] if count] or [0]
    wanted = _reference_exact_dirichlet([max(counts), *rivals])
    assert dirichlet_leader_probability(counts) == pytest.approx(float(wanted), abs=2e-12)


def test_many_answers_do_not_overflow_the_keys() -> None:
    # Twelve counts of up to 80 need 12 log2(81) = 76 bits, more than a key holds.
    rows = np.random.default_rng(1).integers(0, 81, (50, 12))
    rows[25:] = rows[:25]
    together = dirichlet_leader_probability(rows, top=12)
    assert together.tolist() == [float(dirichlet_leader_probability(row, top=12)) for row in rows]


def test_entropy_by_hand() -> None:
    assert normalised_entropy([2, 2, 2]) == 1.0
    assert normalised_entropy([3, 1]) == pytest.approx(-(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)), abs=1e-12)
    # Two equal votes and the phantom: H(2/3, 1/3) in bits.
    assert normalised_entropy([2]) == pytest.approx(-(2 / 3) * math.log2(2 / 3) - (1 / 3) * math.log2(1 / 3), abs=1e-12)
    # Exactly 3/4; like the reference's float, ours must stay above it, since its rule continues here.
    assert 0.75 < normalised_entropy([8, 3, 1]) < 0.75 + 1e-15
    # Without a vote everything is open.
    assert normalised_entropy([0, 0]) == 1.0


@given(counts=st.lists(st.integers(0, 12), min_size=1, max_size=6), order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_zeros_and_batches_do_not_matter(counts: list[int], order: Any) -> None:
    shuffled = [*counts, 0, 0]
    order.shuffle(shuffled)
    other = [5, 4, *[0] * len(counts)]
    for rule in (normalised_entropy, beta_leader_probability, dirichlet_leader_probability):
        alone = float(rule(counts))
        assert 0.0 <= alone <= 1.0
        batch = rule([[[*counts, 0, 0], other], [other, shuffled]])
        assert batch.shape == (2, 2)
        # Strategies compare with thresholds one question at a time and a thousand at once: not one bit may differ.
        assert batch[0, 0] == alone
        assert batch[1, 1] == pytest.approx(alone, abs=1e-15)
