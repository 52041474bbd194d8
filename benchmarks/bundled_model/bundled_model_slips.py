"""Solutions as a pupil writes them: now and then a carry or a borrow is forgotten, and the slip is carried through.

A corpus without slips makes a model whose every sampled error is one that it believes in, for entropy-based dynamic
temperature draws what is nearly certain greedily: sixteen votes are then no better than one, and no verifier can tell
its right responses from its wrong ones. A forgotten carry is a choice of two where the model knows the likelier.
"""

from __future__ import annotations

import random

from selfcal_lightning.data.tasks.word_problems import CONNECTIVES, Equation, Problem, write_solution


def add_forgetfully(left: int, right: int, rng: random.Random, chance: float) -> int:
    """Add column by column, each carry forgotten with probability ``chance``.

    Example:
        >>> add_forgetfully(47, 85, random.Random(0), 0.0), add_forgetfully(47, 85, random.Random(0), 1.0)
        (132, 22)
    """
    total, carry, place = 0, 0, 1
    while left or right or carry:
        carry, digit = divmod(left % 10 + right % 10 + carry, 10)
        total += place * digit
        if carry and rng.random() < chance:
            carry = 0
        left, right, place = left // 10, right // 10, place * 10
    return total


def subtract_forgetfully(left: int, right: int, rng: random.Random, chance: float) -> int:
    """Subtract the smaller ``right`` column by column, each borrow forgotten with probability ``chance``.

    Example:
        >>> subtract_forgetfully(132, 85, random.Random(0), 0.0), subtract_forgetfully(132, 85, random.Random(0), 1.0)
        (47, 157)
    """
    difference, borrow, place = 0, 0, 1
    while left:
        digit = left % 10 - right % 10 - borrow
        borrow = int(digit < 0)
        difference += place * (digit % 10)
        left, right, place = left // 10, right // 10, place * 10
        if borrow and rng.random() < chance:
            borrow = 0
    return difference


def multiply_forgetfully(number: int, digit: int, rng: random.Random, chance: float) -> int:
    """Multiply by one digit column by column, each carry forgotten with probability ``chance``.

    Example:
        >>> multiply_forgetfully(47, 8, random.Random(0), 0.0), multiply_forgetfully(47, 8, random.Random(0), 1.0)
        (376, 26)
    """
    product, carry, place = 0, 0, 1
    while number or carry:
        carry, column = divmod(number % 10 * digit + carry, 10)
        product += place * column
        if carry and rng.random() < chance:
            carry = 0
        number, place = number // 10, place * 10
    return product


def compute_forgetfully(equation: Equation, rng: random.Random, chance: float) -> int:
    """Return the result of an equation as a pupil gets it; divisions and products of long numbers are always right."""
    left, right = equation.left, equation.right
    if equation.operator == "+":
        return add_forgetfully(left, right, rng, chance)
    if equation.operator == "-" and left > right:
        return subtract_forgetfully(left, right, rng, chance)
    if equation.operator == "*" and min(left, right) < 10:
        return multiply_forgetfully(max(left, right), min(left, right), rng, chance)
    return equation.result


def write_pupil_solution(problem: Problem, rng: random.Random, chance: float) -> str:
    """Write a solution whose carries are forgotten with probability ``chance``, later steps using what was written.

    Where a slip would lead to a step that makes no sense (nothing left, or more taken away than there is), the right
    solution is written.
    """
    written: dict[int, int] = {}
    parts: list[str] = []
    result = 0
    for index, equation in enumerate(problem.equations):
        left = written.get(equation.left, equation.left)
        right = equation.right if equation.operator == "/" else written.get(equation.right, equation.right)
        step = Equation(left, equation.operator, right)
        result = compute_forgetfully(step, rng, chance) if step.result > 0 else 0
        if result <= 0:
            return write_solution(problem, rng)
        if result != equation.result:
            written[equation.result] = result
        connective = CONNECTIVES[0] if index == 0 else rng.choice(CONNECTIVES[1:])
        parts.append(f"{connective} {left}{equation.operator}{right}={result}.")
    return " ".join([*parts, f"The answer is {result}."])
