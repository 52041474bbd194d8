"""The tokens of a response as pieces of its text, so that a place in the text is a place among the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LOOKS_BACK = 6


def token_pieces(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of a response; joined, the pieces are that text.

    A token is decoded behind some that stand before it: alone, it might lose the space in front of it. One that ends
    inside of a character adds nothing, and the token that completes the character adds it whole. Control tokens add
    nothing.

    Args:
        tokenizer: The tokenizer.
        token_ids: Tokens of a response [T].

    Returns:
        T pieces.
    """
    ids = list(token_ids)
    pieces: list[str] = []
    settled = 0  # tokens whose characters are complete
    for end in range(1, len(ids) + 1):
        start = max(settled - LOOKS_BACK, 0)
        before, after = _decode(tokenizer, ids[start:settled]), _decode(tokenizer, ids[start:end])
        if after.endswith(UNFINISHED) and end < len(ids):
            pieces.append("")
            continue
        pieces.append(after[len(before) :])
        settled = end
    return pieces


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
