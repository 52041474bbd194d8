"""Where a response to a word problem goes wrong, character by character: dense labels to learn verification from."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from selfcal_lightning.data.tasks.word_problems import Equation, Operator, Problem

_EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
_ANSWER = "The answer is "

Flags = NDArray[np.bool_]


def mark_wrong_characters(problem: Problem, response: str) -> Flags:
    """Return which characters of ``response`` stand in a step at or after its first wrong character [len(response)].

    A step is judged by itself: its numbers may come from a wrong step before. Sums and products may be written either
    way round. A response with too few or too many steps has a wrong answer sentence.
    """
    wrong = np.zeros(len(response), dtype=bool)
    matches = list(_EQUATION.finditer(response))
    written: dict[int, int] = {}
    for equation, match in zip(problem.equations, matches, strict=False):
        due = _due_step(equation, match, written)
        _mark(wrong, match.start(), f"{due}.", response[match.start() : match.end() + 1])
        if int(match[4]) != equation.result:
            written[equation.result] = int(match[4])
    start = response.rfind(_ANSWER)
    if start >= 0:
        complete = bool(matches) and len(matches) == len(problem.equations)
        due_text = f"{_ANSWER}{int(matches[-1][4])}." if complete else ""
        _mark(wrong, start, due_text, response[start:])
    return wrong


def _due_step(equation: Equation, match: re.Match[str], written: dict[int, int]) -> Equation:
    """Return the equation that is due, with the numbers that the response wrote before, the way round it has them."""
    operator: Operator = equation.operator
    left = written.get(equation.left, equation.left)
    right = equation.right if operator == "/" else written.get(equation.right, equation.right)  # divisors are given
    if operator in "+*" and (int(match[3]), match[2], int(match[1])) == (left, operator, right):
        left, right = right, left
    return Equation(left, operator, right)


def _mark(wrong: Flags, start: int, due: str, got: str) -> None:
    """Set ``wrong`` from the first character of ``got``, which begins at ``start``, that differs from ``due``."""
    differing = (index for index, character in enumerate(got) if due[index : index + 1] != character)
    first = next(differing, None)
    if first is not None:
        wrong[start + first : start + len(got)] = True
