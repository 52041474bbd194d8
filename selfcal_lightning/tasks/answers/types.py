"""The four answer types, each with the same beats: canonical gold, extract, verify, group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

from selfcal_lightning.tasks.answers.expressions import normalise_expression, read_expression
from selfcal_lightning.tasks.answers.extraction import (
    LETTERS,
    canonical_number,
    format_number,
    normalise_short_text,
    read_letter,
    read_number,
    read_short_text,
)
from selfcal_lightning.tasks.answers.math_processes import MathPool
from selfcal_lightning.tasks.answers.verification import (
    expressions_equal,
    group_equal,
    letters_equal,
    numbers_equal,
    short_texts_equal,
)
from selfcal_lightning.tasks.base import AnswerType


class Answers(Protocol):
    """How answers of one type are read and judged.

    Attributes:
        answer_type: Name of the type.
        hint: What the prompt asks for in the answer field, with an example.
    """

    answer_type: AnswerType
    hint: str

    def canonical(self, gold: Any) -> str | None:
        """Return a data set's gold answer in canonical form, or None when it is no answer of this type."""
        ...

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the canonical answer that a response gives, or None; of a cut one only what it states."""
        ...

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether an answer equals the reference."""
        ...

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers with equal ones replaced by the first seen of their class."""
        ...


class NumberAnswers:
    """Numbers, compared within 1e-6.

    Example:
        >>> numbers = NumberAnswers()
        >>> numbers.canonical(51.0), numbers.extract("Answer: $1,234.50"), numbers.group(["1/2", "0.5"])
        ('51', '1234.5', ['1/2', '1/2'])
    """

    answer_type: AnswerType = "number"
    hint = "one number, for example 42"

    def canonical(self, gold: Any) -> str | None:
        """Return the number that ``gold`` (a number or text) holds, or None."""
        if isinstance(gold, bool) or gold is None:
            return None
        if isinstance(gold, float):
            return format_number(Fraction(repr(gold))) if abs(gold) < float("inf") else None
        return canonical_number(str(gold))

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the number that a response gives, or None."""
        return read_number(text, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the answer is the reference within 1e-6."""
        return numbers_equal(answer, reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers with equal numbers replaced by the first seen."""
        return group_equal(answers, numbers_equal)


class LetterAnswers:
    """Option letters.

    Args:
        letters: The letters that options have, in order.
        digits: Whether 1, 2, ... stand for the letters, too.

    Example:
        >>> LetterAnswers(digits=True).canonical("3"), LetterAnswers().extract("Answer: (b)")
        ('C', 'B')
    """

    answer_type: AnswerType = "option letter"
    hint = "the letter of one option, for example B"

    def __init__(self, letters: str = LETTERS, *, digits: bool = False) -> None:
        self.letters = letters
        self.digits = digits

    def canonical(self, gold: Any) -> str | None:
        """Return the letter that ``gold`` names, in upper case, or None."""
        text = "" if gold is None else str(gold).strip().upper()
        if self.digits and text.isdecimal() and 1 <= int(text) <= len(self.letters):
            return self.letters[int(text) - 1]
        return text if len(text) == 1 and text in self.letters else None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the option letter that a response gives, or None."""
        return read_letter(text, self.letters, digits=self.digits, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the answer is the reference's letter."""
        return letters_equal(answer, reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers as they are: canonical letters are equal only when their text is."""
        return list(answers)


class ExpressionAnswers:
    r"""Mathematical expressions, compared by normal form and math-verify.

    Args:
        pool: The processes that compare; None takes the process-wide pool.

    Example:
        >>> expressions = ExpressionAnswers()
        >>> expressions.extract(r"\boxed{\dfrac12}"), expressions.group([r"\frac{1}{2}", "0.5", None])
        ('\\frac{1}{2}', ['\\frac{1}{2}', '\\frac{1}{2}', None])
    """

    answer_type: AnswerType = "expression"
    hint = r"one expression in LaTeX, for example $\frac{3}{4}$"

    def __init__(self, pool: MathPool | None = None) -> None:
        self.pool = pool

    def canonical(self, gold: Any) -> str | None:
        """Return the normal form of ``gold``, with its percent sign, or None when it is empty."""
        return None if gold is None else normalise_expression(str(gold), keep_percent=True) or None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the normal form of the expression that a response gives, or None."""
        return read_expression(text, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the answer is mathematically equal to the reference."""
        return expressions_equal(answer, reference, pool=self.pool)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers with mathematically equal ones replaced by the first seen."""
        return group_equal(answers, lambda left, right: expressions_equal(left, right, pool=self.pool))


class ShortTextAnswers:
    """Names and short phrases, compared after normalisation with every alias of the reference.

    Example:
        >>> texts = ShortTextAnswers()
        >>> texts.canonical(["The Beatles", "Fab Four"]), texts.verify("beatles", '["beatles", "fab four"]')
        ('["beatles", "fab four"]', True)
    """

    answer_type: AnswerType = "short text"
    hint = "a few words, for example Marie Curie"

    def canonical(self, gold: Any) -> str | None:
        """Return the normalised name, or a JSON list where ``gold`` is a list of aliases; None when it is empty."""
        if gold is None:
            return None
        names = [gold] if isinstance(gold, str) or not isinstance(gold, Sequence) else list(gold)
        aliases = [alias for name in names if (alias := normalise_short_text(str(name)))]
        if len(aliases) > 1:
            return json.dumps(aliases, ensure_ascii=False)
        return aliases[0] if aliases else None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the normalised short answer that a response gives, or None."""
        return read_short_text(text, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the answer is the reference or one of its aliases."""
        return short_texts_equal(answer, reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers as they are: normalised texts are equal only when their text is."""
        return list(answers)
