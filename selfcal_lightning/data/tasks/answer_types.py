"""When two answers are equal, by answer type."""

import json
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from selfcal_lightning.data.tasks import extraction
from selfcal_lightning.data.tasks.base import AnswerType
from selfcal_lightning.data.tasks.expressions import is_text, is_within_limits, normalise_expression, read_expression
from selfcal_lightning.data.tasks.math_processes import MathComparer, default_comparer
from selfcal_lightning.data.tasks.rows import as_text

TOLERANCE = Fraction(1, 1_000_000)
MAX_DECIMAL_ERROR = Fraction(1, 10_000)

_PLAIN = re.compile(r"-?(?:\d+(?:\.\d+)?|\\frac\{-?\d+\}\{\d+\}|\d+\\frac\{\d+\}\{\d+\})")
_BASED = re.compile(r"(\w+)_\{?(\d+)\}?")


def numbers_equal(answer: str | None, reference: str | None) -> bool:
    """Return whether two numbers differ by at most 1e-6 (relative below 1), or are long and written alike."""
    left, right = _number(answer), _number(reference)
    if left is None or right is None:
        return answer is not None and answer == reference and extraction.is_number(answer)
    return _close(left, right)


def split_aliases(reference: str) -> list[str]:
    """Return the names of a reference: itself, or the strings of a JSON list; [0,1] is an interval."""
    if not reference.startswith("["):
        return [reference]
    try:
        aliases = json.loads(reference)
    except json.JSONDecodeError:
        return [reference]
    return aliases if all(isinstance(alias, str) for alias in aliases) else [reference]


def expressions_equal(answer: str | None, reference: str | None, *, comparer: MathComparer | None = None) -> bool:
    """Return whether two expressions are mathematically equal; None equals nothing."""
    if answer is None or reference is None:
        return False
    left, right = (normalise_expression(text, keep_percent=True) for text in (answer, reference))
    return bool(left and right) and _equal(left, right, comparer)


def group_equal(answers: Sequence[str | None], equal: Callable[[str, str], bool]) -> list[str | None]:
    """Return ``answers`` with each replaced by the first seen that it equals, both ways round; None stays None."""
    representatives: dict[str, str] = {}
    for answer in answers:
        if answer is None or answer in representatives:
            continue
        seen = dict.fromkeys(representatives.values())
        equals = (other for other in seen if equal(answer, other) and equal(other, answer))
        representatives[answer] = next(equals, answer)
    return [None if answer is None else representatives[answer] for answer in answers]


def _number(text: str | None) -> Fraction | None:
    values = [] if text is None else extraction.number_values(text, longest=extraction.MAX_CANONICAL_LENGTH)
    return values[0] if values else None


def _close(left: Fraction, right: Fraction) -> bool:
    return abs(left - right) <= TOLERANCE * min(Fraction(1), max(abs(left), abs(right)))


def _equal(left: str, right: str, comparer: MathComparer | None) -> bool:
    if left == right:
        return True
    if left.endswith(r"\%") != right.endswith(r"\%"):
        percent, other = (left, right) if left.endswith(r"\%") else (right, left)
        number = percent.removesuffix(r"\%")
        value = _plain_value(number)
        return _equal(number, other, comparer) or (
            value is not None and _equal(extraction.format_number(value / 100), other, comparer)
        )
    left, right = left.removesuffix(r"\%"), right.removesuffix(r"\%")
    if (decided := _equal_without_algebra(left, right)) is not None:
        return decided
    ours, theirs = _entries(left), _entries(right)
    if ours is not None and theirs is not None and (left[0] == right[0] or right[0] == "("):
        return len(ours) == len(theirs) and all(
            _equal(one, other, comparer) for one, other in zip(ours, theirs, strict=True)
        )
    if not (is_within_limits(left) and is_within_limits(right)):
        return False
    return (comparer or default_comparer()).equal(left, right) is True


def _equal_without_algebra(left: str, right: str) -> bool | None:
    """Decide numbers, numerals with a base, words and single letters; None for everything else."""
    values = _plain_value(left), _plain_value(right)
    if values[0] is not None and values[1] is not None:
        return _close(values[0], values[1]) or _is_rounded((left, values[0]), (right, values[1]))
    numerals = _BASED.fullmatch(left), _BASED.fullmatch(right)
    if numerals[0] or numerals[1]:
        both = numerals[0] is not None and numerals[1] is not None
        return not both and left.partition("_")[0] == right.partition("_")[0]
    if is_text(left) or is_text(right) or len(left) == len(right) == 1:
        return left.lower() == right.lower()
    return None


def _plain_value(text: str) -> Fraction | None:
    return _number(text) if _PLAIN.fullmatch(text) and len(text) <= extraction.MAX_CANONICAL_LENGTH else None


def _is_rounded(left: tuple[str, Fraction], right: tuple[str, Fraction]) -> bool:
    """Return whether one side is a decimal close to the other, a fraction that no decimal equals."""
    (_, decimal), (other, exact) = (left, right) if "." in left[0] else (right, left)
    if "." not in left[0] + right[0] or "." in other or "/" not in extraction.format_number(exact):
        return False
    return abs(decimal - exact) <= MAX_DECIMAL_ERROR * abs(exact)


def _entries(text: str) -> list[str] | None:
    """Return the entries of ``(a,b,...)`` or ``[a,b,...]``, or None where it is neither or an entry is infinite."""
    if text[:1] + text[-1:] not in ("()", "[]") or r"\infty" in text:
        return None
    entries, depth = [""], 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and position < len(text) - 1:
            return None
        if character == "," and depth == 1:
            entries.append("")
        elif 0 < position < len(text) - 1:
            entries[-1] += character
    return entries if len(entries) > 1 and all(entries) else None


class Answers(ABC):
    """How answers of one type are read and verified."""

    answer_type: AnswerType
    hint: str

    @abstractmethod
    def canonical(self, gold: Any) -> str | None:
        """Return a data set's gold answer in canonical form, or None if it is not an answer of this type."""

    @abstractmethod
    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the canonical answer of a response, or None; of a truncated one, only an explicitly stated answer."""

    @abstractmethod
    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether an answer equals the reference."""

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers with equal ones replaced by the first seen; by default only equal texts are equal."""
        return list(answers)


class NumberAnswers(Answers):
    """Numbers, compared within 1e-6."""

    answer_type: AnswerType = "number"
    hint = "one number, for example 42"

    def canonical(self, gold: Any) -> str | None:
        if isinstance(gold, bool) or gold is None:
            return None
        if isinstance(gold, float):
            return extraction.format_number(Fraction(repr(gold))) if abs(gold) < float("inf") else None
        return extraction.canonical_number(str(gold).rpartition("####")[2])  # GSM8K: the answer follows the solution

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        return extraction.read_number(text, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        return numbers_equal(answer, reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        return group_equal(answers, numbers_equal)


class LetterAnswers(Answers):
    """Option letters; with ``digits``, 1 stands for A and so on.

    Example:
        >>> LetterAnswers(digits=True).canonical("3"), LetterAnswers().extract("Answer: (b)")
        ('C', 'B')
    """

    answer_type: AnswerType = "option letter"
    hint = "the letter of one option, for example B"

    def __init__(self, letters: str = extraction.LETTERS, *, digits: bool = False) -> None:
        self.letters, self.digits = letters, digits

    def canonical(self, gold: Any) -> str | None:
        text = "" if gold is None else str(gold).strip().upper()
        if self.digits and text.isdecimal() and 1 <= int(text) <= len(self.letters):
            return self.letters[int(text) - 1]
        return text if len(text) == 1 and text in self.letters else None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        return extraction.read_letter(text, self.letters, digits=self.digits, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        return answer is not None and answer.upper() == reference.upper()


class ExpressionAnswers(Answers):
    r"""Mathematical expressions, compared by normal form and math-verify.

    Example:
        >>> expressions = ExpressionAnswers()
        >>> expressions.extract(r"\boxed{\dfrac12}"), expressions.group([r"\frac{1}{2}", "0.5", None])
        ('\\frac{1}{2}', ['\\frac{1}{2}', '\\frac{1}{2}', None])
    """

    answer_type: AnswerType = "expression"
    hint = r"one expression in LaTeX, for example $\frac{3}{4}$"

    def canonical(self, gold: Any) -> str | None:
        return None if gold is None else normalise_expression(str(gold), keep_percent=True) or None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        return read_expression(text, finished=finished)

    def verify(self, answer: str | None, reference: str) -> bool:
        return expressions_equal(answer, reference)

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        return group_equal(answers, expressions_equal)


class ShortTextAnswers(Answers):
    """Names and short phrases, normalised and compared with every alias of the reference.

    Example:
        >>> texts = ShortTextAnswers()
        >>> texts.canonical(["The Beatles", "Fab Four"]), texts.verify("beatles", '["beatles", "fab four"]')
        ('["beatles", "fab four"]', True)
    """

    answer_type: AnswerType = "short text"
    hint = "a few words, for example Marie Curie"

    def canonical(self, gold: Any) -> str | None:
        if gold is None:
            return None
        names = [gold] if isinstance(gold, str) or not isinstance(gold, Sequence) else gold
        aliases = [alias for name in names if (alias := extraction.normalise_short_text(as_text(name)))]
        return json.dumps(aliases, ensure_ascii=False) if len(aliases) > 1 else next(iter(aliases), None)

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        stated = extraction.stated_short_text(text, finished=finished)
        return None if stated is None else extraction.normalise_short_text(stated)

    def verify(self, answer: str | None, reference: str) -> bool:
        said = extraction.normalise_short_text(answer or "")
        return said != "" and said in map(extraction.normalise_short_text, split_aliases(reference))


_COPULA = re.compile(r"\b(?:is|are|was|were|be|called|named)\b")
_ALTERNATIVE = re.compile(r"\b(?:or|either|versus|vs)\b")
_NEGATION = re.compile(r"\b(?:not|never|no|nor|neither|isnt|arent|wasnt|werent|than|except|without)(?: \w+){0,2} ?$")
_LIST = re.compile(r"\s*(?:[,;/\uff0c]|\band\b)\s*")
_ONE_WORD = {"yes", "no", "true", "false"}


class FreeTextAnswers(ShortTextAnswers):
    """Names and short phrases that may occur inside a sentence.

    An answer is right if it equals the reference or an alias, or contains one as whole words. Case, accents,
    punctuation and articles do not matter. An answer that negates the reference or names alternatives, with "or" or in
    a list of three or more, is wrong; yes, no, true and false must be the first word. In votes, a sentence counts for
    what stands before or after its verb.

    Example:
        >>> texts = FreeTextAnswers()
        >>> texts.verify(texts.extract("The capital of Germany is Berlin."), "berlin")
        True
        >>> [texts.verify(texts.extract(text), "berlin") for text in ("Bonn, not Berlin", "Berlin, Bonn, Mainz")]
        [False, False]
        >>> texts.group(["capital of germany is berlin", "bonn", "berlin"])
        ['capital of germany is berlin', 'bonn', 'capital of germany is berlin']
    """

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        stated = extraction.stated_short_text(text, finished=finished)
        if stated is None:
            return None
        parts = [part for piece in _LIST.split(stated) if (part := extraction.normalise_short_text(piece))]
        is_list = len(parts) > 2 and all(len(part.split()) <= 3 for part in parts)
        return ", ".join(parts) if is_list else extraction.normalise_short_text(stated)

    def verify(self, answer: str | None, reference: str) -> bool:
        if answer is None:
            return False
        said = _folded(answer)
        return any(_gives(said, _folded(extraction.normalise_short_text(alias))) for alias in split_aliases(reference))

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        return group_equal(answers, lambda one, other: _says(one, other) or _says(other, one))


def _folded(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text)
    return "".join(character for character in plain if not unicodedata.combining(character))


def _words(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if word != "and"]


def _gives(said: str, wanted: str) -> bool:
    if not wanted or _words(said) == _words(wanted):
        return wanted != ""
    if wanted in _ONE_WORD:
        return said.split()[:1] == [wanted]
    if "," in said or _ALTERNATIVE.search(said.replace(wanted, "")):
        return False
    found = re.search(rf"(?<!\S){re.escape(wanted)}(?!\S)", said)
    return found is not None and _NEGATION.search(said[: found.start()]) is None


def _says(sentence: str, answer: str) -> bool:
    """Return whether a sentence is the answer, or says it before or after its verb."""
    said, wanted = _folded(sentence), _folded(answer)
    verb = None if _NEGATION.search(said) or _ALTERNATIVE.search(said) else _COPULA.search(said)
    return wanted in ({said} if verb is None else {said, said[: verb.start()].strip(), said[verb.end() :].strip()})
