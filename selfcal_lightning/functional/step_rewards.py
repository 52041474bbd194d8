r"""Rewards of steps: which key steps a response contains, compared as arithmetic and as words, never as substrings.

A step is compared by its tokens: ``×``, ``\times`` and "times" are one sign, "1,000" and "1000.0" one number, and the
operands of a sum or a product stand in any order. ``1+1=2`` is not inside ``11+1=21``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from selfcal_lightning.functional.equations import find_equations

Token = str
_NUMBER = r"[0-9]+(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
_TOKEN = re.compile(rf"{_NUMBER}|\\[A-Za-z]+|[^\W\d_]+|[^\s\w]")
_SIGNS = {
    "×": "*", "·": "*", "\\times": "*", "\\cdot": "*", "times": "*", "÷": "/", "\\div": "/", "−": "-", "plus": "+",
    "minus": "-", "equals": "=",
}  # fmt: skip
_EQUALS, _OPERATORS = {"="}, frozenset("+*-/()")
_LEFT_OUT = {"$", "\\left", "\\right", "\\", "{", "}"}
_FRACTION = re.compile(r"\\d?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")
_LONGEST_NUMBER = 40
_DIGITS = frozenset("0123456789")


def canonical_step(text: str) -> tuple[Token, ...]:
    r"""Return the tokens of a step in one spelling.

    Example:
        >>> canonical_step("3 × 5 = 15.0"), canonical_step(r"\frac{1,000}{4}")
        (('3', '*', '5', '=', '15'), ('1000', '/', '4'))
    """
    found: list[Token] = []
    for token in _TOKEN.findall(_FRACTION.sub(r" \1 / \2 ", text)):
        if token in _LEFT_OUT:
            continue
        word = _number(token) if is_number(token) else token.lower()
        found.append("*" if word == "x" and found and is_number(found[-1]) else _SIGNS.get(word, word))
    return tuple(found)


def is_number(token: Token) -> bool:
    """Return whether a token is a number, in ASCII digits: ``²`` and ``①`` are signs.

    Example:
        >>> is_number("15"), is_number(".5"), is_number("²"), is_number(".")
        (True, True, False, False)
    """
    return token.lstrip(".")[:1] in _DIGITS


def step_numbers(text: str) -> frozenset[str]:
    """Return the numbers of a text in one spelling.

    Example:
        >>> sorted(step_numbers("1,000 and 2.50"))
        ['1000', '5/2']
    """
    return frozenset(_number(token) for token in re.findall(_NUMBER, text))


def step_key(text: str) -> tuple[Token, ...]:
    """Return what is equal for steps that say the same: the canonical tokens, operands of one sign in order.

    Example:
        >>> step_key("5 * 3 = 15") == step_key("3 times 5 = 15"), step_key("5 - 3 = 2") == step_key("3 - 5 = 2")
        (True, False)
    """
    tokens = canonical_step(text)
    sides: list[list[Token]] = [[]]
    for token in tokens:
        if token in _EQUALS:
            sides.append([])
        else:
            sides[-1].append(token)
    return tuple(" ".join(_sorted_operands(side)) for side in sides)


def step_match(text: str, key_steps: Sequence[Sequence[str]], *, in_order: bool = False) -> float | None:
    """Return the share of key steps of which a response contains a form; a reward for trainers in Python.

    The reward.py of `selfcal export-rl` looks at the answer alone; its rows carry the key steps.

    Args:
        text: A response.
        key_steps: Key steps, each as forms that say the same.
        in_order: Whether only the longest run of steps in their order counts.

    Returns:
        The share, in [0, 1]; None without key steps.

    Example:
        >>> steps = [["3*5=15", "15"], ["15+1=16"]]
        >>> step_match("First 5 × 3 = 15.", steps), step_match("13*5=151", steps), step_match("", [])
        (0.5, 0.0, None)

    Reference:
        Zhang et al., R1-VL, arXiv 2503.12937 (soft key-step matching).
    """
    if not key_steps:
        return None
    tokens = canonical_step(text)
    equations: dict[tuple[Token, ...], list[int]] = {}
    for equation in find_equations(text):
        where = len(canonical_step(text[: equation.start]))
        equations.setdefault(step_key(text[equation.start : equation.end]), []).append(where)
    places = [sorted({place for form in forms for place in _places(form, tokens, equations)}) for forms in key_steps]
    if not in_order:
        return sum(bool(found) for found in places) / len(key_steps)
    return _longest_run(places) / len(key_steps)


def _places(form: str, tokens: Sequence[Token], equations: dict[tuple[Token, ...], list[int]]) -> list[int]:
    """Return where a form stands in a response, as numbers of tokens."""
    wanted = canonical_step(form)
    if not wanted:
        return []
    size = len(wanted)
    as_written = [at for at in range(len(tokens) - size + 1) if tuple(tokens[at : at + size]) == wanted]
    return [*as_written, *equations.get(step_key(form), [])]


def _longest_run(places: Sequence[Sequence[int]]) -> int:
    """Return how many steps can be found one behind the other."""
    ends: list[int] = []  # the earliest place at which a run of each length can end
    for found in places:
        for length in range(len(ends), -1, -1):
            after = ends[length - 1] if length else -1
            place = next((at for at in found if at > after), None)
            if place is None:
                continue
            if length == len(ends):
                ends.append(place)
            else:
                ends[length] = min(ends[length], place)
    return len(ends)


def _sorted_operands(side: Sequence[Token]) -> list[Token]:
    """Return one side of an equation; the operands of a mere sum, or of a mere product, in one order."""
    signs = _OPERATORS.intersection(side)
    if len(signs) != 1 or not signs <= {"+", "*"}:
        return list(side)
    (sign,) = signs
    operands = " ".join(side).split(f" {sign} ")
    return f" {sign} ".join(sorted(operands)).split()


def _number(token: str) -> str:
    plain = token.replace(",", "")
    return plain if len(plain) > _LONGEST_NUMBER else str(Fraction(plain))
