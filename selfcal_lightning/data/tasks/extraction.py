"""Finding the answer in a response: boxed content, answer fields, numbers, option letters, short texts.

Every rule takes the *last* match, so that a model may correct itself.
"""

import re
import string
from collections import deque
from fractions import Fraction

MAX_TEXT_LENGTH = 50_000
MAX_NUMBER_LENGTH = 1_000
# The canonical form may be a fraction of two numbers of that length.
MAX_CANONICAL_LENGTH = 2 * MAX_NUMBER_LENGTH + 2
MAX_DECIMAL_PLACES = 59
MAX_FIELDS = 8
MAX_FIELD_LENGTH = 1_000
MAX_SHORT_TEXT_LENGTH = 300
LETTERS = "ABCDE"

NUMBER_WORDS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "thirteen": "13", "fourteen": "14", "fifteen": "15",
    "sixteen": "16", "seventeen": "17", "eighteen": "18", "nineteen": "19", "twenty": "20",
}  # fmt: skip

_BOXED = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"(?<!\\)[{}]")
_UNBRACED = re.compile(r"[^\s${}\\]+")
_FIELD = re.compile(
    r"\banswer\b[*_`]*(?:\s+(?:is|are|would be|should be)\b[*_`]*\s*[:=]?|\s*[:=\uff1a])[*_`]*", re.IGNORECASE
)
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\.?\d))?"
_EXPONENT = re.compile(r"[eE]([+-]?\d+)")
_THIN_SPACE = r"(?:\\,|[\u00a0\u2009\u202f])"
_THIN_SPACED = re.compile(rf"(?<![\w.,])\d{{1,3}}(?:{_THIN_SPACE}\d{{3}})+(?!\d|{_THIN_SPACE}\d)")
# A factor of a product or of a fraction is left alone: 1/2 \times 10^3 is not 1/2000.
_TIMES_POWER = re.compile(
    r"(?<![\w.,^/])(?<!/\s)(?:(\d[\d.,]*)(?:\s|\\,)*(?:\\(?:times|cdot)|[\u00d7\u00b7*x])(?:\s|\\,)*)?"
    r"10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+))(?!\.?\d)"
)
_THOUSANDS_RUN = re.compile(r"(?:,\d{3})++(,?\d)?+")
_NUMBER = re.compile(
    rf"(?P<sign>(?<![\w)\]}}.])-\s?)?(?<![\w.])(?P<value>{_DECIMAL})"
    rf"(?:(?P<mixed>\s\d+/\d+)(?![\d/.])|\s?/\s?(?P<denominator>{_DECIMAL})(?!\s?/))?"
)
_LATEX_FRACTION = re.compile(rf"\\[dtc]?frac\s*(?:\{{\s*(-?{_DECIMAL})\s*\}}\s*\{{\s*({_DECIMAL})\s*\}}|(\d)\s*(\d))")
_BEFORE_FRACTION = re.compile(r"(?<=\d)\s*(?=\\[dtc]?frac)")
_LETTER_WRAPPING = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|textit)\s*\{([^{}]*)\}")
_FURTHER_PUNCTUATION = "\u2018\u2019\u201c\u201d\u00b4\u00ab\u00bb\u3002\uff0c\uff01\uff1f"
_PUNCTUATION = re.compile(
    r"(?!(?<![a-z.])\.(?=\d))(?!(?<![^\s\u2018\u201c\u00ab])-\.?(?=\d))"
    rf"[{re.escape(string.punctuation)}{_FURTHER_PUNCTUATION}]"
)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def final_part(text: str) -> str | None:
    """Return what follows the last closed reasoning block; None while one is still open."""
    _, _, after = text.rpartition("</think>")
    return None if "<think>" in after else after[-MAX_TEXT_LENGTH:]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last outermost ``\boxed{...}``, without the boxes inside it; None without one."""
    closing = _matching_braces(text)
    found, position = None, 0
    while match := _BOXED.search(text, position):
        position = match.end()
        if text[position : position + 1] == "{":
            if (end := closing.get(position)) is not None:
                found, position = (position + 1, end), end
        elif bare := _UNBRACED.match(text, position):
            found, position = bare.span(), bare.end()
    if found is None:
        return None
    removed: set[int] = set()
    for match in _BOXED.finditer(text, *found):
        removed.update(range(*match.span()))
        if text[match.end() : match.end() + 1] == "{" and match.end() in closing:
            removed.update((match.end(), closing[match.end()]))
    return "".join(text[index] for index in range(*found) if index not in removed)


def answer_fields(text: str) -> list[str]:
    r"""Return the text after each of the last "Answer:" and "answer is": that line, or the next filled line."""
    fields = []
    for match in deque(_FIELD.finditer(text), maxlen=MAX_FIELDS):
        line, _, _ = text[match.end() : match.end() + MAX_FIELD_LENGTH].lstrip().partition("\n")
        fields.append(line.strip().strip("*_`").strip())
    return fields


def canonical_number(text: str) -> str | None:
    """Return the first number in ``text``, without separators and trailing zeros; a fraction may stay ``p/q``."""
    numbers = number_values(text, longest=MAX_CANONICAL_LENGTH)
    return format_number(numbers[0]) if numbers else None


def read_number(text: str, *, finished: bool = True) -> str | None:
    r"""Return the number that a response gives, or None.

    Order: the last box; what follows "####"; the last answer field with a number; the last number of a finished text.
    """
    part = final_part(text)
    if part is None:
        return None
    _, hashes, after = part.rpartition("####")
    result = after.lstrip().partition("\n")[0] if hashes else ""
    for field in (last_boxed(part) or "", result, *reversed(answer_fields(part))):
        if (number := _number_of_field(field)) is not None:
            return number
    numbers = number_values(part) if finished else []
    return format_number(numbers[-1]) if numbers else None


def read_letter(text: str, letters: str = LETTERS, *, digits: bool = False, finished: bool = True) -> str | None:
    r"""Return the option letter that a response gives, or None.

    Order: the last box; the last answer field that names an option; in a finished text, a lone letter at the end or
    the only line that begins with an option. The article "a" is not an option. With ``digits``, 1 stands for A.
    """
    part = final_part(text)
    if part is None:
        return None
    for field in (last_boxed(part) or "", *reversed(answer_fields(part))):
        if (letter := _letter_of_field(field, letters, digits=digits)) is not None:
            return letter
    if not finished:
        return None
    if match := re.search(rf"(?:^|[\s(*:])\(?([{letters}])\)?[\s.*)!]*$", part):
        return match.group(1)
    openings = re.findall(rf"^[* \t]*(?:\(([{letters}])\)|([{letters}])[.):]\s)", part, re.MULTILINE)
    if len(openings) == 1:
        return openings[0][0] or openings[0][1]
    return None


def stated_short_text(text: str, *, finished: bool = True) -> str | None:
    """Return the short answer that a response gives, as it is written, or None.

    Order: the last box; the last answer field; the last line of a finished text.
    """
    part = final_part(text)
    if part is None:
        return None
    boxed = last_boxed(part)
    candidates = [_LETTER_WRAPPING.sub(r"\1", boxed)] if boxed is not None else []
    candidates += answer_fields(part)[-1:]
    if finished:
        candidates += [line for line in part.splitlines() if line.strip()][-1:]
    cut = (candidate[:MAX_SHORT_TEXT_LENGTH].strip() for candidate in candidates)
    return next((candidate for candidate in cut if normalise_short_text(candidate)), None)


def normalise_short_text(text: str) -> str:
    """Return ``text`` normalised as for SQuAD, but with the point and the sign of a number: 1.5 is not 15."""
    lowered = _PUNCTUATION.sub("", text.lower())
    without_articles = " ".join(_ARTICLES.sub(" ", lowered).split())
    return without_articles or " ".join(lowered.split())


def _matching_braces(text: str) -> dict[int, int]:
    opened: list[int] = []
    closing: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif opened:
            closing[opened.pop()] = match.start()
    return closing


def _plain_numerals(text: str) -> str:
    text = text.replace("\u2212", "-").replace("\u2013", "-").replace("{,}", ",").replace("\\!", "")
    text = text.replace("\\$", "").replace("$", "").replace("\u20ac", "").replace("\u00a3", "")
    text = _THIN_SPACED.sub(lambda match: re.sub(r"\D", "", match.group()), text)
    text = _TIMES_POWER.sub(lambda match: f"{match[1] or 1}e{match[2] or match[3]}", text)
    text = _BEFORE_FRACTION.sub(" ", text)
    text = _LATEX_FRACTION.sub(lambda match: "/".join(group for group in match.groups() if group), text)
    # Commas that part a list are told from those of thousands once, so that reading stays linear.
    return _THOUSANDS_RUN.sub(lambda run: run.group().replace(",", ", ") if run[1] else run.group(), text)


def number_values(text: str, *, longest: int = MAX_NUMBER_LENGTH) -> list[Fraction]:
    """Return the exact values of the numbers of at most ``longest`` characters, written out, in ``text``."""
    values = []
    for match in _NUMBER.finditer(_plain_numerals(text)):
        written = match.group()
        if len(written) > longest or len(written) + sum(abs(int(one)) for one in _EXPONENT.findall(written)) > longest:
            continue
        value = Fraction(match["value"].replace(",", ""))
        if match["mixed"] and int(match["mixed"].partition("/")[2]):
            value += Fraction(match["mixed"].strip())
        elif match["denominator"] and (denominator := Fraction(match["denominator"].replace(",", ""))):
            value /= denominator
        values.append(-value if match["sign"] else value)
    return values


def is_number(text: str) -> bool:
    return _NUMBER.fullmatch(_plain_numerals(text).strip()) is not None


def format_number(value: Fraction) -> str:
    """Return a number as an integer, a terminating decimal, or ``p/q`` where no decimal of 59 places equals it."""
    if value.denominator == 1:
        return str(value.numerator)
    places = next((n for n in range(1, MAX_DECIMAL_PLACES + 1) if 10**n % value.denominator == 0), None)
    if places is None:
        return f"{value.numerator}/{value.denominator}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


def _number_of_field(field: str) -> str | None:
    """Return the number of an answer field: the first after its last "=", or a number in words."""
    _, _, right = field.rpartition("=")
    if numbers := number_values(right) or number_values(field):
        return format_number(numbers[0])
    return NUMBER_WORDS.get(field.strip(" .*!\"'").lower())


def _letter_of_field(field: str, letters: str, *, digits: bool) -> str | None:
    """Return the option that an answer field names: at its start, else the last one in it."""
    field = _LETTER_WRAPPING.sub(r"\1", field).replace("$", "").strip(" *_`\"'\u201c")
    both = letters + letters.lower()
    words = r"(?:(?:the|correct|option|choice|answer|is|letter)\b[\s:*]*)*"
    opening = re.match(rf"{words}(?:[(\[]\s*([{both}])\s*[)\]]|([{both}])(?![\w'’\-]))", field, re.IGNORECASE)
    if opening and not _is_article(field, opening):
        return (opening[1] or opening[2]).upper()
    if digits and (digit := re.match(rf"(?:option\s+)?\(?([1-{len(letters)}])\)?(?![\w%/]|[.,]\d|\s*[a-z])", field)):
        return letters[int(digit[1]) - 1]
    named = re.findall(rf"\(([{letters}])\)|\b(?:[Oo]ption|[Cc]hoice)\s+([{letters}])\b|\s([{letters}])[.\s*]*$", field)
    return next((letter for letter in named[-1] if letter), None) if named else None


def _is_article(field: str, opening: re.Match[str]) -> bool:
    """Return whether a letter read at the start of a field is the word "a" before another word."""
    if opening[1] is not None or opening[2] not in "aA":
        return False
    return bool(re.match(r"\s+(?!(?:is|as|and|or|because|since)\b)[a-z]", field[opening.end() :]))
