import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.house import Vectors

from selfcal_lightning.inference.adaptive_consistency import (
    beta_leader_probability,
    dirichlet_leader_probability,
    normalised_entropy,
)

COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=6)
RULES = (normalised_entropy, beta_leader_probability, dirichlet_leader_probability)


def _reference_exact_beta(first: int, second: int) -> Fraction:
    """P(Beta(v1 + 1, v2 + 1) > 1/2): at most v1 heads in v1 + v2 + 1 throws of a fair coin."""
    throws = first + second + 1
    return Fraction(sum(math.comb(throws, heads) for heads in range(first + 1)), 2**throws)


def _reference_exact_dirichlet(counts: list[int]) -> Fraction:
    """P(Gamma(v1 + 1) is the largest) by expanding prod (1 - e^-x sum x^j / j!) into terms that integrate exactly."""
    lead, *rivals = sorted(counts, reverse=True)
    total = Fraction(0)
    for chosen in itertools.product(*[[None, *range(rival + 1)] for rival in rivals]):
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
    wanted = [float(_reference_exact_beta(*pair)) for pair in pairs]
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


@given(counts=COUNTS, order=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_zeros_and_batches_do_not_matter(counts: list[int], order: Any) -> None:
    shuffled = [*counts, 0, 0]
    order.shuffle(shuffled)
    other = [5, 4, *[0] * len(counts)]
    for rule in RULES:
        alone = float(rule(counts))
        assert 0.0 <= alone <= 1.0
        batch = rule([[[*counts, 0, 0], other], [other, shuffled]])
        assert batch.shape == (2, 2)
        # Strategies compare with thresholds one question at a time and a thousand at once: not one bit may differ.
        assert batch[0, 0] == alone
        assert batch[1, 1] == pytest.approx(alone, abs=1e-15)
