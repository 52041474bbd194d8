"""Equations in a response, checked by exact arithmetic: a reward that needs no label.

Nothing is evaluated as code: expressions are parsed into fractions, token by token. Letters, powers and open brackets
are not plain arithmetic and are skipped.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

_NUMBER = r"[0-9]+(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
# An "x" multiplies what begins with a digit, a point or a bracket: in "3x - 2 = 7" it is an unknown.
_TIMES = r"\\times|\\cdot|(?<=[0-9 ])x(?=[0-9]| +[0-9.$(])"
_RUN = re.compile(rf"(?:[0-9.,+\-*/×÷·−()%$= \t]|{_TIMES}|\\div)+")
_TOKEN = re.compile(rf"{_NUMBER}|{_TIMES}|\\div|[-+*/×÷·−()%.,]")
_SIGN = {"×": "*", "·": "*", "x": "*", r"\times": "*", r"\cdot": "*", "÷": "/", r"\div": "/", "−": "-"}
_PUNCTUATION = (".", ",")
# Markup around numbers, and what may follow one directly: `\(2 + 3 = 5\)`, `**20**`, `\boxed{20}`, `20\text{ dollars}`.
# `2**3` is a power.
_MARKUP = re.compile(r"(?<![\w)*])\*\*(?=\S)|(?<=\S)\*\*(?![\w(*])|(?<!\\)\\(?:boxed\{|[()\[\]$]|(?=%))")
_TEXT_BEHIND = re.compile(r"\\text\s*\{")
_REMAINDER = re.compile(r",?\s*(?:with\s+)?(?:a\s+)?(?:remainder|R\s*[0-9])", re.IGNORECASE)  # "17 / 5 = 3 remainder 2"
_CUT_OFF = ("...", "…")
# Exact arithmetic on longer sides costs time, and neither people nor models write them.
_MOST_TOKENS, _LONGEST_NUMBER = 60, 40


@dataclass(frozen=True)
class Equation:
    left: str
    right: str
    holds: bool
    value: Fraction
    start: int
    end: int


class _Token(NamedTuple):
    text: str
    start: int
    end: int


class _Side(NamedTuple):
    start: int
    end: int
    value: Fraction
    is_computed: bool


def find_equations(text: str) -> list[Equation]:
    """Return the equations between arithmetic expressions in a text; ``a = b = c`` is two.

    A right side with decimals holds when the left side rounds to it, as in ``10 / 3 = 3.33``, or begins with it, as in
    ``2 / 3 = 0.66...``. One side has to compute something: ``half of 20 = 10`` is no equation.
    """
    # Markup becomes as many spaces, so that places stay; for display mathematics line breaks, which end an equation.
    plain = _MARKUP.sub(lambda mark: ("\n" if mark[0] in ("\\[", "\\]") else " ") * len(mark[0]), text)
    return [found for run in _RUN.finditer(plain) if "=" in run.group() for found in _of_run(text, plain, run)]


def equation_validity(texts: Sequence[str], answers: Sequence[Fraction | None] | None = None) -> list[float | None]:
    """Return 1 for responses whose every equation holds (and whose answer is the last result), 0 for others."""
    rewards: list[float | None] = []
    for text, answer in zip(texts, [None] * len(texts) if answers is None else answers, strict=True):
        found = find_equations(text)
        is_result = answers is None or (bool(found) and answer == found[-1].value)
        rewards.append(float(is_result and all(equation.holds for equation in found)) if found else None)
    return rewards


def arithmetic_value(expression: str) -> Fraction | None:
    """Return the exact value of an expression of numbers, ``+ - * / ( )`` and per cent signs; else None."""
    others = re.sub(r"[\s$]", "", _TOKEN.sub("", expression))
    return None if others else _value(_TOKEN.findall(expression))


def _of_run(text: str, plain: str, run: re.Match[str]) -> Iterator[Equation]:
    sides, position = [], run.start()
    for side in run.group().split("="):
        sides.append([_Token(m.group(), position + m.start(), position + m.end()) for m in _TOKEN.finditer(side)])
        position += len(side) + 1
    is_chained = False
    for at, (before, after) in enumerate(pairwise(sides)):
        left = _last_expression(plain, before, is_first=at == 0)
        right = _first_expression(plain, after, is_last=at == len(sides) - 2)
        if left is None or right is None or not (left.is_computed or right.is_computed or is_chained):
            is_chained = False
            continue
        is_cut_off = plain.startswith(_CUT_OFF, right.end)
        holds = _holds(left.value, right.value, plain[right.start : right.end], is_cut_off=is_cut_off)
        sides_as_written = text[left.start : left.end], text[right.start : right.end]
        yield Equation(*sides_as_written, holds, right.value, left.start, right.end)
        is_chained = not any(token.text in _PUNCTUATION for token in after)


def _last_expression(text: str, tokens: list[_Token], *, is_first: bool) -> _Side | None:
    """Return the expression directly before an equals sign; None if it belongs to something else."""
    cut = max((at + 1 for at, token in enumerate(tokens) if token.text in _PUNCTUATION), default=0)
    own = tokens[cut:]
    if len(own) > _MOST_TOKENS:
        return None
    while own and own[0].text == "(" and _depth(own) > 0:  # "(3 + 4 = 7)"
        own = own[1:]
    if own and is_first and cut == 0:
        before = text[max(own[0].start - 8, 0) : own[0].start].rstrip("$")
        # "x^2 + 1", "f(2)", "30 % of 20", and "x - 3": the expression begins further left than numbers do.
        is_inside = before[-1:].isalnum() or before[-1:] in tuple("^_{}\\√!|&]")
        is_binary = own[0].text in "-−" and text[own[0].end : own[0].end + 1] == " "
        if is_inside or is_binary or before.rstrip().endswith((" of", "Of")):
            return None
    return _side(own)


def _first_expression(text: str, tokens: list[_Token], *, is_last: bool) -> _Side | None:
    """Return the expression directly after an equals sign; None if it belongs to something else."""
    cut = next((at for at, token in enumerate(tokens) if token.text in _PUNCTUATION), len(tokens))
    own = tokens[:cut]
    if len(own) > _MOST_TOKENS or (own and _REMAINDER.match(text, own[-1].end)):
        return None
    while own and own[-1].text == ("(" if _depth(own) > 0 else ")") and _depth(own) != 0:  # "... = 7 (since"
        own = own[:-1]
    end = own[-1].end if own and is_last and cut == len(tokens) else len(text)
    behind = "" if _TEXT_BEHIND.match(text, end) else text[end : end + 1]
    return None if behind.isalnum() or behind in tuple("^_{\\!") else _side(own)


def _depth(tokens: list[_Token]) -> int:
    return sum((token.text == "(") - (token.text == ")") for token in tokens)


def _side(tokens: list[_Token]) -> _Side | None:
    value = _value([token.text for token in tokens])
    is_signed = bool(tokens) and tokens[0].text in "-−"  # a sign computes nothing
    return None if value is None else _Side(tokens[0].start, tokens[-1].end, value, len(tokens) > 1 + is_signed)


def _holds(left: Fraction, right: Fraction, written: str, *, is_cut_off: bool) -> bool:
    """Return whether the values are equal, or the right one is the left one rounded to its decimals, or cut off."""
    if written.endswith("%") and left == right * 100:  # ".2 * 100 = 20%"
        return True
    decimals = re.fullmatch(r"[-−]?[ $]*[0-9,]*\.([0-9]+)", written)
    if decimals is None:
        return left == right
    unit = Fraction(1, 10 ** len(decimals[1]))
    return abs(left - right) <= (unit if is_cut_off else unit / 2)


def _value(tokens: Sequence[str]) -> Fraction | None:
    if not 0 < len(tokens) <= _MOST_TOKENS or max(map(len, tokens)) > _LONGEST_NUMBER:
        return None
    try:
        value, rest = _sum([_SIGN.get(token, token) for token in tokens])
    except (ZeroDivisionError, IndexError, ValueError):
        return None
    return None if rest else value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, rest = _product(tokens)
    while rest and rest[0] in "+-":
        term, after = _product(rest[1:])
        value, rest = (value + term if rest[0] == "+" else value - term), after
    return value, rest


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """Parse a product; a bracket after a factor multiplies it."""
    value, rest = _factor(tokens)
    while rest and rest[0] in "*/(":
        factor, after = _factor(rest if rest[0] == "(" else rest[1:])
        value, rest = (value / factor if rest[0] == "/" else value * factor), after
    return value, rest


def _factor(tokens: list[str]) -> tuple[Fraction, list[str]]:
    """Parse a number or a bracketed sum, or the negative of either, with per cent signs after it."""
    first, rest = tokens[0], tokens[1:]
    if first == "-":
        value, rest = _factor(rest)
        return -value, rest
    if first == "(":
        value, rest = _sum(rest)
        if rest[0] != ")":
            raise ValueError("an open bracket")
        rest = rest[1:]
    else:
        value = Fraction(first.replace(",", ""))
    while rest and rest[0] == "%":
        value, rest = value / 100, rest[1:]
    return value, rest


_STEP_TOKEN = re.compile(rf"{_NUMBER}|\\[A-Za-z]+|[^\W\d_]+|[^\s\w]")
_SIGNS = _SIGN | {"x": "x", "times": "*", "plus": "+", "minus": "-", "equals": "="}  # x may be an unknown here
_OPERATORS = frozenset("+*-/()")
_LEFT_OUT = {"$", "\\left", "\\right", "\\", "{", "}"}
_FRACTION = re.compile(r"\\d?frac\{([^{}]{1,40})\}\{([^{}]{1,40})\}")
_DIGITS = frozenset("0123456789")


def canonical_step(text: str) -> tuple[str, ...]:
    found: list[str] = []
    for token in _STEP_TOKEN.findall(_FRACTION.sub(r" \1 / \2 ", text)):
        if token in _LEFT_OUT:
            continue
        word = _number(token) if is_number(token) else token.lower()
        found.append("*" if word == "x" and found and is_number(found[-1]) else _SIGNS.get(word, word))
    return tuple(found)


def is_number(token: str) -> bool:
    """Return whether a token is a number in ASCII digits; ``²`` and ``①`` are signs."""
    return token.lstrip(".")[:1] in _DIGITS


def step_numbers(text: str) -> frozenset[str]:
    return frozenset(_number(token) for token in re.findall(_NUMBER, text))


def step_key(text: str) -> tuple[str, ...]:
    """Return a key that is equal for steps that say the same: canonical tokens, with operands of one sign sorted."""
    sides = " ".join(canonical_step(text)).split("=")
    return tuple(" ".join(_sorted_operands(side.split())) for side in sides)


def _sorted_operands(side: Sequence[str]) -> list[str]:
    signs = _OPERATORS.intersection(side)
    if len(signs) != 1 or not signs <= {"+", "*"}:
        return list(side)
    (sign,) = signs
    operands = " ".join(side).split(f" {sign} ")
    return f" {sign} ".join(sorted(operands)).split()


def _number(token: str) -> str:
    plain = token.replace(",", "")
    return plain if len(plain) > _LONGEST_NUMBER else str(Fraction(plain))
