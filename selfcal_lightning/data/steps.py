r"""Where the steps of a response end, decided once, on decoded text.

A response is given as the decoded pieces of its tokens, which joined are its text: so a step is a range of tokens,
whatever the vocabulary merges (``".\n\n"``), and no text is encoded again. Rules:

- ``sentence``: a full stop, question or exclamation mark before white space (one inside a decimal is none); an
  abbreviation, or a number or letter that stands alone (``2.``), ends no sentence; ``。！？`` need no space.
- ``line``: the end of a line that is not blank; ``blank_line``: an empty line after some text.
- ``heading``: the text before the next ``Step k:``, with ``##`` before it or at the start of a line or sentence.
- ``marker``: a given text, such as ``<extra_0>``.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Aggregation, Steps, marker_of
from selfcal_lightning.models.chat_format import token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StepRule = Literal["sentence", "line", "blank_line", "heading", "marker"]
POSITIONS = ("question", "first", "middle", "before_answer", "end")

_SENTENCE = re.compile(r"""(?<![.!?])[.!?]+["'’”)\]}*_]*(?=\s|\Z)|[。！？]+[”’）」』]*""")
_LONE_LABEL = re.compile(r"[(\[*#\s-]*(?:\d+|[A-Za-z])\.[*]*")
_ABBREVIATION = re.compile(r"(?<!\w)(?:dr|mr|mrs|ms|prof|st|vs|cf|fig|eq|approx|e\.g|i\.e)\.\Z", re.IGNORECASE)
_LINE = re.compile(r"\n")
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
# Numbers of repetitions have ends, so that no pattern takes long on a model that repeats itself.
_HEADING = re.compile(
    r"(#{1,6}[ \t]{0,4})?\*{0,3}[ \t]{0,4}\bstep[ \t]{0,4}\d{1,4}\b(?!\.\d)[ \t]{0,4}\*{0,3}(?P<colon>[:.)]?)\*{0,3}",
    re.IGNORECASE,
)
_LONGEST_LABEL, _LONGEST_ABBREVIATION = 40, 8


class Span(NamedTuple):
    """A half-open range of characters or tokens."""

    start: int
    end: int


class StepEnd(NamedTuple):
    """Where a step ends: after how many tokens, and whether no token that follows can undo or move that."""

    num_tokens: int
    is_settled: bool


class _Step(NamedTuple):
    """A step: its text, how far its terminator reaches, and whether text that follows cannot change it any more.

    What stands behind the last terminator is a step of a response that is over, and has none.
    """

    text: Span
    close: int
    is_settled: bool
    is_terminated: bool = True


def step_spans(text: str, rule: StepRule, *, marker: str | None = None) -> list[Span]:
    """Return the characters of each step, without headings, markers and white space around it; none is empty.

    Text before the first heading belongs to no step; without any heading the whole text is one.
    """
    return [step.text for step in _steps(text, rule, marker)]


def step_ends(pieces: Sequence[str], rule: StepRule, *, marker: str | None = None, is_over: bool = True) -> list[int]:
    r"""Return how many tokens of a response stand up to the end of each step, terminators included: rising, from 1.

    Step k covers the tokens from the end before it (0 for the first) to its own; so text before the first heading is
    part of the first step, and white space behind the last step of none. A token that ends two steps ends one.
    """
    ends = list(accumulate(map(len, pieces)))
    steps = _steps("".join(pieces), rule, marker, is_over=is_over)
    return sorted({bisect_left(ends, step.close) + 1 for step in steps if is_over or step.is_settled})


def next_step_end(
    pieces: Sequence[str], rule: StepRule, *, after: int = 0, marker: str | None = None
) -> StepEnd | None:
    r"""Return the first end of a step in a response that may go on, behind its first ``after`` tokens; None without.

    The step at the end of the text has one only where its terminator stands.

    Example:
        >>> next_step_end(["It", " is", " 3", "."], "sentence")  # a digit may follow
        StepEnd(num_tokens=4, is_settled=False)
        >>> next_step_end(["One", ".", " 2", "."], "sentence", after=2)  # a label
        >>> next_step_end(["One", "\n", "\n"], "blank_line")
        StepEnd(num_tokens=3, is_settled=True)
    """
    text, places = "".join(pieces), list(accumulate(map(len, pieces)))
    for is_settled in (True, False):
        for step in _steps(text, rule, marker, is_over=not is_settled):
            end = bisect_left(places, step.close) + 1
            if end > after and (step.is_settled if is_settled else step.is_terminated):
                return StepEnd(end, is_settled)
    return None


def token_spans(pieces: Sequence[str], spans: Sequence[Span | tuple[int, int]]) -> list[Span]:
    """Return the tokens that hold at least one character of each range of characters; neighbours may share a token."""
    ends = list(accumulate(map(len, pieces)))
    for start, end in spans:
        if not 0 <= start < end <= (ends[-1] if ends else 0):
            raise InputError(f"Expected `spans` to be ranges of the text's characters, but got ({start}, {end}).")
    return [Span(bisect_right(ends, start), bisect_left(ends, end) + 1) for start, end in spans]


def find_rule(text: str) -> StepRule:
    r"""Return the coarsest rule that finds steps in a response: headings, empty lines, lines, else sentences."""
    if next(_headings(text, is_over=True), None) is not None:
        return "heading"
    return next((rule for rule in ("blank_line", "line") if len(_steps(text, rule, None)) > 1), "sentence")


def prefix_after(ends: Sequence[int], k: int) -> int | None:
    """Return how many tokens the first k steps have: what a rollout goes on from."""
    if k < 0:
        raise InputError(f"Expected `k` to be at least 0, but got {k}.")
    return None if k >= len(ends) else 0 if k == 0 else ends[k - 1]


def step_position(k: int, num_steps: int) -> int:
    """Return the index in ``POSITIONS`` of the prefix of k steps of a response of K steps.

    The prefix before the last step comes before "first": there the answer is mostly decided.
    """
    if not 0 <= k <= num_steps:
        raise InputError(f"Expected `k` to lie between 0 and {num_steps}, but got {k}.")
    if k == 0:
        return 0
    return 4 if k == num_steps else 3 if k == num_steps - 1 else 1 if k == 1 else 2


def aggregate(scores: Sequence[float], how: Aggregation) -> float | None:
    """Return one score of a response from those of its steps."""
    if how not in ("last", "min", "prod", "mean"):
        raise InputError(f'Expected `how` to be "last", "min", "prod" or "mean", but got {how!r}.')
    if not len(scores):
        return None
    if how == "last":
        return float(scores[-1])
    if how == "min":
        return float(min(scores))
    return math.prod(scores) if how == "prod" else math.fsum(scores) / len(scores)


def _steps(text: str, rule: StepRule, marker: str | None, *, is_over: bool = True) -> list[_Step]:
    """Return the steps of a text in order, each with some text in it."""
    if rule not in ("sentence", "line", "blank_line", "heading", "marker"):
        raise InputError(
            f'Expected `rule` to be "sentence", "line", "blank_line", "heading" or "marker", but got {rule!r}.'
        )
    if (rule == "marker") != bool(marker):
        raise InputError(
            f"Expected `marker` to be given with the rule 'marker' alone, but got {marker!r} with {rule!r}."
        )
    if rule == "heading":
        found, start = _headed_steps(text, is_over)
    else:
        found, start = _ended_steps(text, rule, marker or "")
    rest = _stripped(text, start, len(text))
    return [*found, _Step(rest, rest.end, False, is_terminated=False)] if rest is not None else found


def _ended_steps(text: str, rule: StepRule, marker: str) -> tuple[list[_Step], int]:
    """Return the steps that a terminator ends, and where the text behind the last one starts."""
    patterns = {"sentence": _SENTENCE, "line": _LINE, "blank_line": _BLANK_LINE}
    found, start = [], 0
    for match in (patterns.get(rule) or re.compile(re.escape(marker))).finditer(text):
        if rule == "sentence" and _is_label(text, start, match.end()):
            continue
        step = _stripped(text, start, match.start() if rule == "marker" else match.end())
        start = match.end()
        if step is not None:
            found.append(_Step(step, start, rule != "sentence" or start < len(text)))
    return found, start


def _headed_steps(text: str, is_over: bool) -> tuple[list[_Step], int]:
    """Return the steps that the next heading ends, and where the text behind the last heading starts."""
    found: list[_Step] = []
    start: int | None = None
    for heading in _headings(text, is_over=is_over):
        step = _stripped(text, start, heading.start) if start is not None else None
        start = heading.end
        if step is not None:
            found.append(_Step(step, step.end, True))
    return found, start or 0


def _headings(text: str, *, is_over: bool) -> Iterator[Span]:
    """Yield the headings ``Step k:``; one at the very end of a text that goes on may turn out to be none."""
    for match in _HEADING.finditer(text):
        before = match.start() - 1
        while before >= 0 and text[before] in " \t":
            before -= 1
        is_own = before < 0 or text[before] in "\n.!?:;。！？"
        if (match[1] or (match["colon"] and is_own)) and (is_over or match.end() < len(text)):
            yield Span(*match.span())


def _is_label(text: str, start: int, end: int) -> bool:
    """Return whether a would-be sentence is an item's label, or ends with an abbreviation."""
    if end - start <= _LONGEST_LABEL and _LONE_LABEL.fullmatch(text[start:end].strip()):
        return True
    return _ABBREVIATION.search(text[max(start, end - _LONGEST_ABBREVIATION) : end]) is not None


def _stripped(text: str, start: int, end: int) -> Span | None:
    """Return the range without white space around it; None where nothing is left."""
    inside = text[start:end]
    left = len(inside) - len(inside.lstrip())
    return Span(start + left, start + len(inside.rstrip())) if inside.strip() else None


# What the token that completes the end of a step holds. Quotation marks and brackets may stand behind a full stop.
_HELD: dict[str, tuple[str, ...]] = {"line": ("\n",), "blank_line": ("\n",), "heading": (":", "\n")}
_SENTENCE_ENDS, _CLOSING = (".", "!", "?", "。", "！", "？"), "\"'’”)]}*_」』）"


def rule_for(text: str, steps: Steps) -> StepRule:
    """Return the rule by which a response is cut: the one that is named, or with "auto" the coarsest that it has.

    Example:
        >>> rule_for("One. Two.", "auto"), rule_for("One. Two.", "line"), rule_for("One. Two.", "marker:<end>")
        ('sentence', 'line', 'marker')
    """
    if steps == "auto":
        return find_rule(text)
    return cast("StepRule", steps) if marker_of(steps) is None else "marker"


def spans_of(text: str, steps: Steps) -> list[Span]:
    """Return the characters of each step of a response; see ``step_spans``.

    Example:
        >>> spans_of("One <end> Two", "marker:<end>")
        [Span(start=0, end=3), Span(start=10, end=13)]
    """
    return step_spans(text, rule_for(text, steps), marker=marker_of(steps))


def ends_of(pieces: Sequence[str], steps: Steps) -> list[int]:
    """Return how many tokens stand up to the end of each step of a whole response."""
    return step_ends(pieces, rule_for("".join(pieces), steps), marker=marker_of(steps))


def step_prefixes(text: str, steps: Steps) -> list[tuple[str, str]]:
    """Return each step of a response, and the text up to its end, both without white space around them."""
    return [(text[start:end], text[:end].strip()) for start, end in spans_of(text, steps)]


def token_step_ends(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], steps: Steps) -> list[int]:
    """Return how many tokens of a whole response stand up to the end of each step, rising from 1; none without text."""
    return ends_of(token_pieces(tokenizer, token_ids), steps)


def check_marker(tokenizer: PreTrainedTokenizerBase, steps: Steps) -> None:
    """Raise InputError where ``steps`` names a marker that no response of this tokenizer has in its text."""
    marker = marker_of(steps)
    if marker is None:
        return
    read = "".join(token_pieces(tokenizer, tokenizer.encode(marker, add_special_tokens=False)))
    if marker not in read:
        raise InputError(
            f"Expected the marker of `steps` to be a text that responses can hold, but the tokenizer reads {marker!r} "
            f"back as {read!r}: a control token is no part of a text, and what the vocabulary lacks is never drawn. "
            "Choose a marker that the model writes."
        )


@dataclass(frozen=True)
class StepStops:
    """Where a response that is drawn step by step stops: at tokens that may end a step, and where one really ended."""

    tokenizer: PreTrainedTokenizerBase
    steps: Steps
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, steps: Steps) -> StepStops:
        """Return the stops of a rule."""
        if steps == "auto":
            raise InputError(
                "Expected a reward model with one rule for the ends of steps for a search over steps, but got 'auto', "
                "which reads a whole response first. Name it: `--reward.steps sentence`."
            )
        check_marker(tokenizer, steps)
        special = set(tokenizer.all_special_ids)
        pieces = (
            (number, str(tokenizer.decode([number]))) for number in range(len(tokenizer)) if number not in special
        )
        found = tuple(number for number, piece in pieces if _may_end(piece, steps))
        if not found:
            raise InputError(
                f"Expected the tokenizer to have tokens that end a step of the rule {steps!r}, but it has none. Train "
                "a reward model with another rule."
            )
        return cls(tokenizer, steps, found)

    def first_end(self, token_ids: Sequence[int], *, after: int) -> StepEnd | None:
        """Return the first end of a step behind the first ``after`` tokens; see ``next_step_end``."""
        pieces = token_pieces(self.tokenizer, token_ids)
        return next_step_end(pieces, rule_for("", self.steps), after=after, marker=marker_of(self.steps))


def _may_end(piece: str, steps: Steps) -> bool:
    marker = marker_of(steps)
    if marker is not None:
        return marker[-1] in piece
    if steps == "sentence":
        return piece.rstrip().rstrip(_CLOSING).endswith(_SENTENCE_ENDS)
    return any(held in piece for held in _HELD[steps])


MARK = "#"


class Rate(NamedTuple):
    """How rollouts from a prefix ended: the share of right ones, in [0, 1], and how many there were."""

    share: float
    rollouts: int


def prefix_id(question_id: str, prefix_ids: Sequence[int]) -> str:
    """Return the id of a prefix of responses to a question."""
    digest = hashlib.sha256(",".join(map(str, prefix_ids)).encode()).hexdigest()
    return f"{question_id}{MARK}{digest[:16]}"
