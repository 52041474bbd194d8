"""Mathematical expressions: finding one in a response, its normal form, and the limits that keep sympy safe."""

import math
import re
from itertools import accumulate

from selfcal_lightning.data.tasks import extraction

MAX_ANSWER_LENGTH = 1_000
MAX_EXPRESSION_LENGTH = 400
MAX_NESTING = 12
MAX_DIGITS = 60
MAX_EXPONENT = 1_000
MAX_EXPONENT_PRODUCT = 20_000
MAX_FACTORIAL = 200

_REMOVED = re.compile(
    r"(?<!\\)\\!\s*|(?<!\\)\\[,;:> ]|~|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|q?quad)"
    r"(?![a-zA-Z])|\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![a-zA-Z])|\u00b0|\\\$|\$|(?<!\\)\\[()\[\]]"
)
_RENAMED = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\leq(?:slant)?(?![a-zA-Z])|\u2264"), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![a-zA-Z])|\u2265"), r"\\ge "),
    (re.compile(r"\\neq(?![a-zA-Z])|\u2260"), r"\\ne "),
    (re.compile(r"\\(begin|end)\{(?:array|[bvBV]matrix|smallmatrix)\}(?:\{[lcr|]*\})?"), r"\\\1{pmatrix}"),
    (re.compile(r"\\to(?![a-zA-Z])|\\rightarrow(?![a-zA-Z])"), r"\\to "),
    (re.compile(r"\\operatorname\*?\{([a-zA-Z]+)\}"), r"\\\1 "),
    (re.compile(r"\\(?:mathbf|mathrm|mathit|boldsymbol|mathbb)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\text[a-z]*\s*\{\s*(?:and|or|,)\s*\}"), ", "),
    (re.compile(r"\u03c0"), r"\\pi "),
    (re.compile(r"\u221e|\binfinity\b|\binfty\b(?<!\\infty)"), r"\\infty "),
    (re.compile(r"\u221a\s*\(?(\w+)\)?"), r"\\sqrt{\1}"),
    (re.compile(r"\u00d7|\\times(?![a-zA-Z])"), r"\\times "),
    (re.compile(r"\u00b7|\\cdot(?![a-zA-Z])"), r"\\cdot "),
    (re.compile(r"\*\*"), "^"),
)
_TEXT = r"\\(?:text|mbox|textbf|textrm|textit|textnormal|mathrm)\s*\{([^{}]*)\}"
_TRAILING_UNIT = re.compile(rf"(?<=[\d)}}\].a-z])\s*{_TEXT}(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?$")
_PLAIN_UNIT = re.compile(r"(?P<number>[-+]?[\d.,/]*\d)\s*(?P<unit>[a-zA-Z][a-zA-Z .]*[a-zA-Z](?:\s*\^\s*\{?[23]\}?)?)")
_NO_UNIT = frozenset({"pi", "or", "and", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "to", "by", "if", "mod", "i"})
_DEFINITION = re.compile(r"\s*(?:[a-zA-Z]|\\[a-zA-Z]+|[a-zA-Z]_\{?\w\}?|[a-zA-Z]\([a-zA-Z]\))\s*(?:=|\\in(?![a-zA-Z]))")
_THOUSANDS = re.compile(r"([-+]?)(\d{1,3}(?:,\d{3})+)(\.\d+)?(?![\d,])([^,]*)")
_SHORT_FRACTION = re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9a-zA-Z])\s*(\{[^{}]*\}|[0-9a-zA-Z])")
_SHORT_ROOT = re.compile(r"\\sqrt\s*([0-9a-zA-Z])")
_SHORT_SCRIPT = re.compile(r"([_^])\s*\{\s*([0-9a-zA-Z])\s*\}")
_SLASH = re.compile(r"([-+]?)(\d+)\s*/\s*(\d+)")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+)")
_SPACE_NOT_NEEDED = re.compile(r"(?<![a-zA-Z])\s+|\s+(?![a-zA-Z])")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_SHORT_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]+\}")
_FUNCTIONS = frozenset({"arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sqrt"})
_MATH_SPAN = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_NESTED_NUMERIC_POWER = re.compile(r"\^\s*-?\w\s*\^|\^\s*\{[^{}a-zA-Z]*\^|\^\s*\([^()a-zA-Z]*\^")
_NUMERIC_EXPONENT = re.compile(r"\^\s*[{(]?\s*-?\s*(\d+(?:\.\d+)?)")
_FACTORIAL = re.compile(r"(\d*)[\s)}]*!")


def read_expression(text: str, *, finished: bool = True) -> str | None:
    r"""Return the expression that a response gives, in normal form, or None.

    Order: the last box; the last answer field; the last number of a finished text.
    """
    part = extraction.final_part(text)
    if part is None:
        return None
    if boxed := normalise_expression(extraction.last_boxed(part) or ""):
        return boxed
    for field in reversed(extraction.answer_fields(part)):
        if given := _expression_of_field(field):
            return given
    number = extraction.read_number(part, finished=finished)
    return None if number is None else normalise_expression(number)


def normalise_expression(text: str, *, keep_percent: bool = False) -> str:
    r"""Return the normal form of a LaTeX or plain expression; equal expressions often become equal strings."""
    if len(text) > MAX_ANSWER_LENGTH:
        return ""
    text = " ".join(text.split()).replace("\u2212", "-").replace("{,}", ",").rstrip(".,;: ")
    text = _REMOVED.sub(lambda match: "" if match.group() != "\\ " else " ", text).strip()
    for pattern, replacement in _RENAMED:
        text = pattern.sub(replacement, text)
    percent = re.search(r"\\?%\s*$", text) is not None
    text = re.sub(r"\\?%", "", text).strip()
    if match := _TRAILING_UNIT.search(text):
        text = text[: match.start()].strip()
    elif (match := _PLAIN_UNIT.fullmatch(text)) and not _NO_UNIT.intersection(match["unit"].lower().split()):
        text = match["number"]
    text = re.sub(_TEXT, r"\1", text).strip()
    text = re.sub(r"\\\\\s*(?=\\end)", "", text)
    if text.count("=") + len(re.findall(r"\\in(?![a-zA-Z])", text)) == 1 and (match := _DEFINITION.match(text)):
        text = text[match.end() :].strip()
    text = extraction.NUMBER_WORDS.get(text.lower(), text)
    if match := re.fullmatch(r"[(\[]\s*([A-Z])\s*[)\]]", text):
        text = match[1]
    if "(" not in text and (match := _THOUSANDS.fullmatch(text)):
        text = f"{match[1]}{match[2].replace(',', '')}{match[3] or ''}{match[4]}"
    text = _canonical_layout(text).rstrip(".,;: ")
    return text + r"\%" if percent and keep_percent and text else text


def is_text(expression: str) -> bool:
    r"""Return whether a normal form holds a word of four letters or more, so that algebra does not apply."""
    bare = _ENVIRONMENT.sub("", expression)
    return any(word.lower() not in _FUNCTIONS for word in _WORD.findall(bare))


def is_within_limits(expression: str) -> bool:
    """Return whether an expression is small enough for sympy: length, nesting, digits, exponents."""
    if len(expression) > MAX_EXPRESSION_LENGTH or re.search(rf"\d{{{MAX_DIGITS + 1}}}", expression):
        return False
    depths = accumulate((character in "({[") - (character in ")}]") for character in expression)
    if max(depths, default=0) > MAX_NESTING or _NESTED_NUMERIC_POWER.search(expression):
        return False
    exponents = [float(exponent) for exponent in _NUMERIC_EXPONENT.findall(expression)]
    product = math.prod(exponent for exponent in exponents if exponent > MAX_NESTING)
    if max(exponents, default=0.0) > MAX_EXPONENT or product > MAX_EXPONENT_PRODUCT:
        return False
    factorials = _FACTORIAL.findall(expression)
    return "!!" not in expression and all(digits and int(digits) <= MAX_FACTORIAL for digits in factorials)


def _canonical_layout(text: str) -> str:
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SHORT_FRACTION.sub(lambda match: rf"\frac{{{match[1].strip('{} ')}}}{{{match[2].strip('{} ')}}}", text)
    text = _SHORT_SCRIPT.sub(r"\1\2", text)
    text = _SPACE_NOT_NEEDED.sub("", text)
    if match := _SLASH.fullmatch(text):
        return rf"{match[1].strip('+')}\frac{{{match[2]}}}{{{match[3]}}}"
    if _DECIMAL.fullmatch(text):
        return extraction.canonical_number(text) or text
    return text


def _expression_of_field(field: str) -> str | None:
    if spans := _MATH_SPAN.findall(field):
        return normalise_expression(next(part for part in spans[-1] if part)) or None
    sentence = re.split(r"(?<=[\w)}])\.(?:\s|$)", field)[0]
    expression = normalise_expression(sentence)
    if _SHORT_WORD.search(expression) and (number := extraction.canonical_number(expression)) is not None:
        return normalise_expression(number)
    return expression or None
