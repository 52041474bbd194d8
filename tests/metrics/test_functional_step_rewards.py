"""Step rewards: what is the same step, and which steps a response contains."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from selfcal_lightning.adaptation.equations import canonical_step, step_key, step_match, step_numbers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3*5=15", "3 × 5 = 15.0"),
        ("3*5=15", "5 times 3 equals 15"),
        ("3*5=15", r"$3 \times 5 = 15$"),
        ("1,000+2=1002", "2 + 1000 = 1002"),
        (r"\frac{12}{4}=3", "12/4 = 3"),
        ("2+3+4=9", "4+3+2=9"),
        ("3 x 5 = 15", "3*5=15"),
        ("12 ÷ 4 = 3", "12/4=3"),
    ],
)  # fmt: skip
def test_equal_steps(one: str, other: str) -> None:
    assert step_key(one) == step_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("5-3=2", "3-5=2"), ("2+3*4=14", "3+2*4=14"), ("1+1=2", "11+1=21"), ("3*5=15", "15=3*5"), ("x=3", "y=3")],
)
def test_different_steps(one: str, other: str) -> None:
    assert step_key(one) != step_key(other)


def test_a_step_is_no_substring() -> None:
    assert step_match("11+1=21", [["1+1=2"]]) == 0.0
    assert step_match("So 1+1=2, of course", [["1+1=2"]]) == 1.0
    assert step_match("we add 1.5 and 2", [["5"]]) == 0.0


def test_forms_and_order() -> None:
    steps = [["2+2=4"], ["4*3=12", "three times four"], ["12-1=11"]]
    assert step_match("2+2=4. 3*4=12. 12-1=11.", steps) == 1.0
    assert step_match("12-1=11. Three times four. 2+2=4", steps) == 1.0
    assert step_match("12-1=11. Three times four. 2+2=4", steps, in_order=True) == pytest.approx(1 / 3)
    assert step_match("12-1=11. 2+2=4. 3*4=12.", steps, in_order=True) == pytest.approx(2 / 3)
    assert step_match("", steps) == 0.0
    assert step_match("2+2=4", []) is None
    assert step_match("2+2=4", [["  "]]) == 0.0


@given(st.permutations(range(4)))
def test_order_is_the_longest_rising_run(order: list[int]) -> None:
    """Against all subsets."""
    written = ". ".join(f"{number}+{number}={2 * number}" for number in order)
    steps = [[f"{number}+{number}={2 * number}"] for number in range(4)]
    runs = [c for size in range(5) for c in itertools.combinations(order, size) if list(c) == sorted(c)]
    assert step_match(written, steps, in_order=True) == max(map(len, runs)) / 4


def test_numbers_have_one_spelling() -> None:
    assert step_numbers("1,000 or 1000.00 or .5") == {"1000", "1/2"}
    assert canonical_step("x y") == ("x", "y")
    assert canonical_step("9" * 50)[0] == "9" * 50, "no arithmetic with numbers of any length"


@pytest.mark.parametrize("sign", ["²", "₃", "①", "½"])
def test_only_ascii_digits_are_numbers(sign: str) -> None:
    assert step_match(f"So 3{sign} = 9 and {sign} x 4", [["3*3=9"], [f"3{sign} = 9"]]) == 0.5
    assert canonical_step(f"3{sign} {sign} x") == ("3", sign, sign, "x")
    assert step_numbers(f"3{sign}") == {"3"}
