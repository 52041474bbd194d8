r"""Where the steps of a response end, by the rules of ``step_settings``.

A response is given as the decoded pieces of its tokens: so a step is a range of tokens, whatever the vocabulary merges
(``".\n\n"``), and no text is encoded again. Rules:

- ``sentence``: a full stop, question or exclamation mark before white space, but not after an abbreviation or a lone
  number or letter (``2.``); ``。！？`` need no space.
- ``line``: the end of a line that is not blank; ``blank_line``: an empty line after some text.
- ``heading``: the text before the next ``Step k:``, with ``##`` before it or at the start of a line or sentence.
- ``marker:TEXT``: after a given text, such as ``<extra_0>``; ``auto``: the coarsest of the others that finds steps.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, get_args

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.data.step_settings import Aggregation, Steps, marker_of
from selfcal_lightning.models.chat_format import decode_text, token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

POSITIONS = ("question", "first", "middle", "before_answer", "end")

_SENTENCE = re.compile(r"""(?<![.!?])[.!?]+["'’”)\]}*_]*(?=\s|\Z)|[。！？]+[”’）」』]*""")
_LONE_LABEL = re.compile(r"[(\[*#\s-]*(?:\d+|[A-Za-z])\.[*]*")
_ABBREVIATION = re.compile(r"(?<!\w)(?:dr|mr|mrs|ms|prof|st|vs|cf|fig|eq|approx|e\.g|i\.e)\.\Z", re.IGNORECASE)
_PATTERNS = {"sentence": _SENTENCE, "line": re.compile(r"\n"), "blank_line": re.compile(r"\n[ \t\r]*\n")}
# Repetitions are bounded, so that no pattern takes long on a model that repeats itself.
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
    """Number of tokens up to the end of a step, and whether later tokens cannot move it."""

    num_tokens: int
    is_settled: bool


class _Step(NamedTuple):
    text: Span
    close: int  # end of its terminator
    is_settled: bool  # whether later text cannot change it
    is_terminated: bool = True  # all but the text after the last terminator of a finished response


def spans_of(text: str, steps: Steps) -> list[Span]:
    """Return the characters of each step, without headings, markers and surrounding white space; none is empty.

    Text before the first heading belongs to no step; without any heading the whole text is one.
    """
    return [step.text for step in _steps(text, steps)]


def ends_of(pieces: Sequence[str], steps: Steps, *, is_over: bool = True) -> list[int]:
    """Return the number of tokens up to the end of each step, terminators included: increasing, from 1.

    Text before the first heading is part of the first step, and white space after the last step of none. A token that
    ends two steps ends one. Of a response that is not over, only ends that cannot move are returned.
    """
    ends = list(accumulate(map(len, pieces)))
    found = _steps("".join(pieces), steps, is_over=is_over)
    return sorted({bisect_left(ends, step.close) + 1 for step in found if is_over or step.is_settled})


def next_step_end(pieces: Sequence[str], steps: Steps, *, after: int = 0) -> StepEnd | None:
    """Return the first end of a step after the first ``after`` tokens of a response that may continue, or None.

    The step at the end of the text has one only if its terminator is there.
    """
    text, places = "".join(pieces), list(accumulate(map(len, pieces)))
    for is_settled in (True, False):
        for step in _steps(text, steps, is_over=not is_settled):
            end = bisect_left(places, step.close) + 1
            if end > after and (step.is_settled if is_settled else step.is_terminated):
                return StepEnd(end, is_settled)
    return None


def token_spans(pieces: Sequence[str], spans: Sequence[Span | tuple[int, int]]) -> list[Span]:
    """Return the tokens that hold a character of each range of characters; neighbours may share a token."""
    ends = list(accumulate(map(len, pieces)))
    return [Span(bisect_right(ends, start), bisect_left(ends, end) + 1) for start, end in spans]


def prefix_after(ends: Sequence[int], k: int) -> int | None:
    """Return the number of tokens of the first k steps, which a rollout continues; None if nothing follows them."""
    return None if k >= len(ends) else 0 if k == 0 else ends[k - 1]


def step_position(k: int, num_steps: int) -> int:
    """Return the index in ``POSITIONS`` of the prefix of k steps of a response of K steps."""
    if k == 0:
        return 0
    # The prefix before the last step counts as that, also after the first: there the answer is mostly decided.
    return 4 if k == num_steps else 3 if k == num_steps - 1 else 1 if k == 1 else 2


def aggregate(scores: Sequence[float], how: Aggregation) -> float | None:
    if how not in get_args(Aggregation):
        raise unknown_name("over_steps", how, get_args(Aggregation))
    if not len(scores):
        return None
    if how == "mean":
        return math.fsum(scores) / len(scores)
    return math.prod(scores) if how == "prod" else float(min(scores) if how == "min" else scores[-1])


def _find_rule(text: str) -> Steps:
    if next(_headings(text, is_over=True), None) is not None:
        return "heading"
    return next((rule for rule in ("blank_line", "line") if len(_steps(text, rule)) > 1), "sentence")


def _steps(text: str, steps: Steps, *, is_over: bool = True) -> list[_Step]:
    rule = _find_rule(text) if steps == "auto" else steps
    found, start = _headed_steps(text, is_over) if rule == "heading" else _ended_steps(text, rule)
    rest = _stripped(text, start, len(text))
    return [*found, _Step(rest, rest.end, False, is_terminated=False)] if rest is not None else found


def _ended_steps(text: str, rule: Steps) -> tuple[list[_Step], int]:
    """Return the steps that a terminator ends, and where the text after the last one starts."""
    marker = marker_of(rule)
    pattern = _PATTERNS[rule] if marker is None else re.compile(re.escape(marker))
    found, start = [], 0
    for match in pattern.finditer(text):
        if rule == "sentence" and _is_label(text, start, match.end()):
            continue
        step = _stripped(text, start, match.end() if marker is None else match.start())
        start = match.end()
        if step is not None:
            found.append(_Step(step, start, rule != "sentence" or start < len(text)))
    return found, start


def _headed_steps(text: str, is_over: bool) -> tuple[list[_Step], int]:
    """Return the steps that the next heading ends, and where the text after the last heading starts."""
    found: list[_Step] = []
    start: int | None = None
    for heading in _headings(text, is_over=is_over):
        step = _stripped(text, start, heading.start) if start is not None else None
        start = heading.end
        if step is not None:
            found.append(_Step(step, step.end, True))
    return found, start or 0


def _headings(text: str, *, is_over: bool) -> Iterator[Span]:
    """Yield the headings ``Step k:``, without one at the very end of a text that continues."""
    for match in _HEADING.finditer(text):
        before = match.start() - 1
        while before >= 0 and text[before] in " \t":
            before -= 1
        is_own = before < 0 or text[before] in "\n.!?:;。！？"
        if (match[1] or (match["colon"] and is_own)) and (is_over or match.end() < len(text)):
            yield Span(*match.span())


def _is_label(text: str, start: int, end: int) -> bool:
    """Return whether a sentence is only an item's label, or ends with an abbreviation."""
    if end - start <= _LONGEST_LABEL and _LONE_LABEL.fullmatch(text[start:end].strip()):
        return True
    return _ABBREVIATION.search(text[max(start, end - _LONGEST_ABBREVIATION) : end]) is not None


def _stripped(text: str, start: int, end: int) -> Span | None:
    """Return the range without surrounding white space; None if nothing is left."""
    inside = text[start:end]
    left = len(inside) - len(inside.lstrip())
    return Span(start + left, start + len(inside.rstrip())) if inside.strip() else None


# What a token that completes a step holds; quotation marks and brackets may follow a full stop.
_HELD: dict[str, tuple[str, ...]] = {"line": ("\n",), "blank_line": ("\n",), "heading": (":", "\n")}
_SENTENCE_ENDS, _CLOSING = (".", "!", "?", "。", "！", "？"), "\"'’”)]}*_」』）"


def step_prefixes(text: str, steps: Steps) -> list[tuple[str, str]]:
    """Return each step of a response and the text up to its end, both without surrounding white space."""
    return [(text[start:end], text[:end].strip()) for start, end in spans_of(text, steps)]


def token_step_ends(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], steps: Steps) -> list[int]:
    return ends_of(token_pieces(partial(decode_text, tokenizer), token_ids), steps)


def check_marker(tokenizer: PreTrainedTokenizerBase, steps: Steps) -> None:
    marker = marker_of(steps)
    if marker is None:
        return
    read = decode_text(tokenizer, tokenizer.encode(marker, add_special_tokens=False))
    if marker not in read:
        raise InputError(
            f"Expected the marker of `steps` to be a text that responses can hold, but the tokenizer reads {marker!r} "
            f"back as {read!r}: it is a control token or not in the vocabulary. Choose one that the model writes."
        )


@dataclass(frozen=True)
class StepStops:
    """Where generation step by step stops: at tokens that may end a step, and where one really ended."""

    tokenizer: PreTrainedTokenizerBase
    steps: Steps
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, steps: Steps) -> StepStops:
        if steps == "auto":
            raise InputError(
                "Expected one rule for the ends of steps for a search over steps, but got 'auto', which needs a whole "
                "response. Name it: `--reward.steps sentence`."
            )
        check_marker(tokenizer, steps)
        numbers = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
        found = tuple(number for number in numbers if _may_end(str(tokenizer.decode([number])), steps))
        if not found:
            raise InputError(f"The tokenizer has no token that ends a step of {steps!r}. Train with another rule.")
        return cls(tokenizer, steps, found)

    def first_end(self, token_ids: Sequence[int], *, after: int) -> StepEnd | None:
        pieces = token_pieces(partial(decode_text, self.tokenizer), token_ids)
        return next_step_end(pieces, self.steps, after=after)


def _may_end(piece: str, steps: Steps) -> bool:
    marker = marker_of(steps)
    if marker is not None:
        return marker[-1] in piece
    if steps == "sentence":
        return piece.rstrip().rstrip(_CLOSING).endswith(_SENTENCE_ENDS)
    return any(held in piece for held in _HELD[steps])


MARK = "#"


class Rate(NamedTuple):
    """The share of right rollouts from a prefix, in [0, 1], and their number."""

    share: float
    rollouts: int


def prefix_id(question_id: str, prefix_ids: Sequence[int]) -> str:
    digest = hashlib.sha256(",".join(map(str, prefix_ids)).encode()).hexdigest()
    return f"{question_id}{MARK}{digest[:16]}"
