"""Base models without a chat template: questions and answers as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, load_tokenizer
from selfcal_lightning.records import Message

PLAIN = Prompt(format="plain")
TURNS = [Message("system", "Be brief."), Message("user", "1+1?"), Message("assistant", "2"), Message("user", "2+2?")]


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    """That of a base model: no template, and a token for the word with which the next turn begins."""
    found = load_tokenizer("bundled")
    found.add_tokens(["Question"])
    found.chat_template = None
    found.save_pretrained(tmp_path)
    return load_tokenizer(str(tmp_path))


def test_turns_are_questions_and_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = ChatFormat(tokenizer, prompt=PLAIN)
    prompt = "Be brief.\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer:"
    assert tokenizer.decode(chat.prompt_ids(TURNS)) == prompt
    assert tokenizer.decode(chat.prompt_ids([*TURNS[:3], Message("user", "Question: 2+2?")])) == prompt, "once"
    assert tokenizer.decode(chat.query.suffix_ids) == "\n\nQuestion: Is the answer correct? (Yes/No)\nAnswer:"
    assert chat.response_ids("4") == chat.response_ids(" 4") == tuple(tokenizer.encode(" 4", add_special_tokens=False))


def test_a_response_ends_where_the_next_question_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    ends = ChatFormat(tokenizer, prompt=PLAIN).end_of_turn_ids
    assert ends == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("Question")}


def test_the_format_is_part_of_the_identity(tokenizer: PreTrainedTokenizerBase) -> None:
    identity = ChatFormat(tokenizer, prompt=PLAIN).describe()
    assert Prompt.from_json(identity["user_prompt"]) == PLAIN
    assert "format" not in Prompt(system="x").as_json()
    tokenizer.chat_template = load_tokenizer("bundled").chat_template
    assert ChatFormat(tokenizer).describe()["template_sha256"] != identity["template_sha256"]


def test_what_cannot_be_done_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(InputError, match=r"chat template, but got None. For a base model use `--prompt.format plain`"):
        ChatFormat(tokenizer)
    with pytest.raises(InputError, match="a token for 'Question'"):
        ChatFormat(load_tokenizer("bundled"), prompt=PLAIN)
