"""Where the steps of a response end for a reward model: one rule for training, rollouts and scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.steps import (
    Span,
    StepEnd,
    StepRule,
    find_rule,
    next_step_end,
    step_ends,
    step_spans,
)
from selfcal_lightning.prompts.pieces import token_pieces
from selfcal_lightning.rewards.settings import Steps, marker_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    """Return the characters of each step of a response; see ``functional.steps.step_spans``.

    Example:
        >>> spans_of("One <end> Two", "marker:<end>")
        [Span(start=0, end=3), Span(start=10, end=13)]
    """
    return step_spans(text, rule_for(text, steps), marker=marker_of(steps))


def ends_of(pieces: Sequence[str], steps: Steps) -> list[int]:
    """Return how many tokens stand up to the end of each step of a whole response; see ``functional.steps.step_ends``.

    Example:
        >>> ends_of(["One", "<", "end", ">", "Two"], "marker:<end>")
        [4, 5]
    """
    return step_ends(pieces, rule_for("".join(pieces), steps), marker=marker_of(steps))


def step_prefixes(text: str, steps: Steps) -> list[tuple[str, str]]:
    """Return each step of a response, and the text up to its end, both without white space around them.

    Example:
        >>> step_prefixes("One. Two.", "sentence")
        [('One.', 'One.'), ('Two.', 'One. Two.')]
    """
    return [(text[start:end], text[:end].strip()) for start, end in spans_of(text, steps)]


def token_step_ends(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], steps: Steps) -> list[int]:
    """Return how many tokens of a whole response stand up to the end of each step, rising from 1; none without text.

    Args:
        tokenizer: The tokenizer of the response.
        token_ids: Its tokens, without end-of-turn [T].
        steps: Where steps end.
    """
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
    """Where a response that is drawn step by step stops: at tokens that may end a step, and where one really ended.

    One token does not tell the end of a step: the full stop of ``2.`` at the start of a line ends none, one behind a
    digit may become a decimal point, an empty line may take two tokens, and a step has ended before a heading when the
    heading stands. So an engine is stopped at ``tokens``, and what stands then is read by the rule.

    Attributes:
        tokenizer: That of the responses.
        steps: The rule.
        tokens: Tokens that may be the last of what ends a step.
    """

    tokenizer: PreTrainedTokenizerBase
    steps: Steps
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, steps: Steps) -> StepStops:
        """Return the stops of a rule.

        Raises:
            InputError: The rule is that of each whole response (auto), or no token can end a step.
        """
        if steps == "auto":
            raise InputError(
                "Expected a reward model with one rule for the ends of steps for a search over steps, but got 'auto', "
                "which reads a whole response first. Name it: `--reward.steps sentence`."
            )
        check_marker(tokenizer, steps)
        special = set(tokenizer.all_special_ids)
        pieces = ((number, tokenizer.decode([number])) for number in range(len(tokenizer)) if number not in special)
        found = tuple(number for number, piece in pieces if _may_end(piece, steps))
        if not found:
            raise InputError(
                f"Expected the tokenizer to have tokens that end a step of the rule {steps!r}, but it has none. Train "
                "a reward model with another rule."
            )
        return cls(tokenizer, steps, found)

    def first_end(self, token_ids: Sequence[int], *, after: int) -> StepEnd | None:
        """Return the first end of a step behind the first ``after`` tokens; see ``functional.steps.next_step_end``."""
        pieces = token_pieces(self.tokenizer, token_ids)
        return next_step_end(pieces, rule_for("", self.steps), after=after, marker=marker_of(self.steps))


def _may_end(piece: str, steps: Steps) -> bool:
    marker = marker_of(steps)
    if marker is not None:
        return marker[-1] in piece
    if steps == "sentence":
        return piece.rstrip().rstrip(_CLOSING).endswith(_SENTENCE_ENDS)
    return any(held in piece for held in _HELD[steps])
