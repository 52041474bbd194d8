"""Where the steps of a response end for a reward model: one rule for training, rollouts and scoring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from selfcal_lightning.functional.steps import StepRule, find_rule, step_ends, step_spans
from selfcal_lightning.prompts.pieces import token_pieces
from selfcal_lightning.rewards.settings import Steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rule_for(text: str, steps: Steps) -> StepRule:
    """Return the rule by which a response is cut: the one that is named, or with "auto" the coarsest that it has.

    Example:
        >>> rule_for("One. Two.", "auto"), rule_for("One. Two.", "line")
        ('sentence', 'line')
    """
    return find_rule(text) if steps == "auto" else steps


def step_prefixes(text: str, steps: Steps) -> list[tuple[str, str]]:
    """Return each step of a response, and the text up to its end, both without white space around them.

    Example:
        >>> step_prefixes("One. Two.", "sentence")
        [('One.', 'One.'), ('Two.', 'One. Two.')]
    """
    return [(text[start:end], text[:end].strip()) for start, end in step_spans(text, rule_for(text, steps))]


def token_step_ends(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], steps: Steps) -> list[int]:
    """Return how many tokens of a whole response stand up to the end of each step, rising from 1; none without text.

    Args:
        tokenizer: The tokenizer of the response.
        token_ids: Its tokens, without end-of-turn [T].
        steps: Where steps end.
    """
    pieces = token_pieces(tokenizer, token_ids)
    return step_ends(pieces, rule_for("".join(pieces), steps))
