"""Equations in text against Python's own arithmetic on random expressions, and by hand on what is none."""

from __future__ import annotations

import itertools
import random
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfcal_lightning.adaptation.equations import arithmetic_value, equation_share, equation_validity, find_equations
from selfcal_lightning.data.tasks.word_problems import stream_problems, write_solution

EXPRESSIONS = st.recursive(
    st.integers(0, 50).map(str),
    lambda inner: (
        st.builds("{}{}{}".format, inner, st.sampled_from([" + ", "-", "*", " / "]), inner)
        | inner.map("({})".format)
        | inner.map("-({})".format)
    ),
    max_leaves=8,
)


def _reference_python_value(expression: str) -> Fraction | None:
    """Return the value that Python gives to fractions in place of the numbers."""
    exact = re.sub(r"\d+", lambda match: f"Fraction({match[0]})", expression)
    try:
        return Fraction(eval(exact, {"Fraction": Fraction}))  # noqa: S307 - an expression of our own
    except ZeroDivisionError:
        return None


def _found(text: str) -> list[tuple[str, str, bool]]:
    return [(equation.left, equation.right, equation.holds) for equation in find_equations(text)]


@settings(deadline=None, max_examples=300)
@given(EXPRESSIONS)
def test_values_equal_python(expression: str) -> None:
    assert arithmetic_value(expression) == _reference_python_value(expression)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(-1, 1)), max_size=5))
def test_equations_between_words_are_all_found(sums: list[tuple[int, int, int]]) -> None:
    text = " ".join(f"So we get {a}+{b}={a + b + error}." for a, b, error in sums)
    assert _found(text) == [(f"{a}+{b}", str(a + b + error), error == 0) for a, b, error in sums]
    for equation in find_equations(text):
        assert text[equation.start : equation.end] == f"{equation.left}={equation.right}"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Each costs $3. 4 × 3 = $12. Then 6 × 2 = $13.", [("4 × 3", "12", True), ("6 × 2", "13", False)]),
        ("3*(2+1) = 9 = 9.0 = 10", [("3*(2+1)", "9", True), ("9", "9.0", True), ("9.0", "10", False)]),
        ("x = 3 + 4 = 7.", [("3 + 4", "7", True)]),
        ("10/3 = 3.33 and 10/3 = 3.34", [("10/3", "3.33", True), ("10/3", "3.34", False)]),
        ("10/3 = 3", [("10/3", "3", False)]),
        ("1,000 + 234 = 1,234", [("1,000 + 234", "1,234", True)]),
        ("50% * 20 = 10, 0.2 * 100 = 20%", [("50% * 20", "10", True), ("0.2 * 100", "20%", True)]),
        (r"3 \times 5 = 15, 6 \div 2 = 3", [(r"3 \times 5", "15", True), (r"6 \div 2", "3", True)]),
        ("3 x 5 = 15 and 3x5=16", [("3 x 5", "15", True), ("3x5", "16", False)]),
        ("2(3) = 6, so 6 = 2(3)", [("2(3)", "6", True), ("6", "2(3)", True)]),
        ("-3 + 5 = 2; 2 - 5 = -3", [("-3 + 5", "2", True), ("2 - 5", "-3", True)]),
        ("10 = 5 × 2 (since 5 + 5)", [("10", "5 × 2", True)]),
        ("109+58=167. 4+5=9", [("109+58", "167", True), ("4+5", "9", True)]),
        ("(34+75=109), ((3 + 4 = 7", [("34+75", "109", True), ("3 + 4", "7", True)]),
    ],
)  # fmt: skip
def test_what_is_an_equation(text: str, wanted: list[tuple[str, str, bool]]) -> None:
    assert _found(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "2x = 4", "x + 3 = 7", "x - 3 = 4", "7 = x + 3", "7 = 3 + x", "7 = 3x", "x^2 + 3 = 7", "8 = 2^3", "f(3) = 9",
        "30% of 20 = 6", "half of 20 = 10", "5! = 120", "1/0 = 5", "a2+3=5", "= 5", "3 = ", "3 == 3", "3 <= 4 + 5",
        "5 km + 3 km = 8 km", "3 + = 7", "", "=" * 50, "1" * 500 + "+1=2",
    ],
)  # fmt: skip
def test_what_is_none(text: str) -> None:
    assert find_equations(text) == []


def test_validity_needs_every_equation_and_the_answer() -> None:
    texts = ["1+1=2. 2+2=4. The answer is 4.", "1+1=2. 2+2=5. The answer is 5.", "The answer is 4.", "3+1=4."]
    assert equation_validity(texts) == [1.0, 0.0, None, 1.0]
    answers = [Fraction(5), Fraction(5), Fraction(4), None]
    assert equation_validity(texts, answers) == [0.0, 0.0, None, 0.0]
    assert equation_share(texts) == [1.0, 0.5, None, 1.0]


def test_solutions_of_the_bundled_task_hold_and_changed_digits_do_not() -> None:
    rng, problems = random.Random(0), stream_problems("test_id")
    solutions = [write_solution(problem, rng) for problem in itertools.islice(problems, 50)]
    assert equation_validity(solutions) == [1.0] * 50
    wrong = []
    for solution in solutions:
        equation = find_equations(solution)[0]
        wrong.append(solution.replace(f"={equation.right}", f"={int(equation.right) + 1}", 1))
    assert equation_validity(wrong) == [0.0] * 50


@pytest.mark.parametrize("part", [" ", "1", "(", "-", "1+", "= ", "1 = ", ") ", "1,"])
def test_long_runs_end(part: str) -> None:
    """Long runs of spaces, digits, brackets and signs, on which a backtracking pattern would not come back."""
    for text in ("1" + part * 50_000 + "x", part * 50_000 + "=1", "1+0=" + part * 50_000):
        assert all(equation.right == "1" for equation in find_equations(text))
