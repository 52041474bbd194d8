"""Tokens as pieces of a text: joined they are the text, and a character that two tokens make is one of theirs."""

from __future__ import annotations

from typing import Any

import pytest

from selfcal_lightning.models.chat_format import load_tokenizer, token_pieces


class Bytes:
    """A tokenizer whose tokens are bytes, and which drops a space at the start as sentencepiece does."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_characters_of_several_tokens_stand_with_the_last_one() -> None:
    text = "a é。b c"
    pieces = token_pieces(Bytes(), list(text.encode()))  # type: ignore[arg-type]
    assert pieces == ["a", " ", "", "é", "", "", "。", "b", " ", "c"]


def test_a_text_that_is_cut_inside_of_a_character_is_kept() -> None:
    pieces = token_pieces(Bytes(), list("né".encode())[:2])  # type: ignore[arg-type]
    assert "".join(pieces) == "n\ufffd"


@pytest.mark.parametrize("text", ["First 34+75=109. So 109.5 is it.\n\nThe answer is 7.", "", "x"])
def test_pieces_of_a_real_tokenizer_are_its_text(tiny_model: str, text: str) -> None:
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
