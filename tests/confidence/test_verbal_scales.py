"""Scales of words and of percent: how replies are read, and that each estimator asks on its own."""

from __future__ import annotations

import pytest
from support.fakes import FakeChat, ReplyingEngine

from selfcal_lightning.confidence.registry import ESTIMATORS
from selfcal_lightning.confidence.verbalized import (
    NUMBERS,
    PERCENTAGES,
    TEN_WORDS,
    WORDS,
    ask_for_confidences,
    parse_percentage,
    parse_words,
)
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


def test_every_word_is_the_middle_of_its_tenth() -> None:
    for place, word in enumerate(WORDS):
        assert parse_words(rf"\boxed{{{word.capitalize()}}}") == pytest.approx(place / 10 + 0.05)
        assert parse_words(f"{word}.") == pytest.approx(place / 10 + 0.05)
        assert word in TEN_WORDS.after
        assert f"{word} ({place / 10:.1f} to {(place + 1) / 10:.1f})" in TEN_WORDS.before


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (r"\boxed{\text{ Very good chance. }}", 0.75),
        (r"First \boxed{unlikely}, no: \boxed{Highly likely}", 0.85),
        (r"\boxed{0.35}", 0.35),
        (r"\boxed{60\%}", 0.6),
        ("Confidence: almost certain", 0.95),
        ("It is likely that I would be wrong, since I am unlikely to know this at all.", None),
        (r"<think>\boxed{likely}", None),
        (r"\boxed{certainly}", None),
        ("", None),
    ],
)
def test_words(reply: str, value: float | None) -> None:
    assert parse_words(reply) == (value if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        (r"\boxed{85}", 0.85), (r"\boxed{85.5\%}", 0.855), (r"\boxed{0}", 0.0), (r"\boxed{100}", 1.0),
        (r"\boxed{101}", None), (r"\boxed{0.5}", 0.5), (r"\boxed{0.5\%}", 0.005), ("70 %", 0.7), ("Sure.", None),
        (r"<think>\boxed{9}</think>\boxed{10}", 0.1),
    ],
)  # fmt: skip
def test_percentages(reply: str, value: float | None) -> None:
    assert parse_percentage(reply) == (value if value is None else pytest.approx(value))


@pytest.mark.parametrize(
    ("name", "query", "reply", "value"),
    [
        ("verbalized", NUMBERS.after, r"\boxed{0.4}", 0.4),
        ("verbalized_words", TEN_WORDS.after, r"\boxed{Unlikely}", 0.35),
        ("verbalized_percent", PERCENTAGES.after, r"\boxed{40}", 0.4),
    ],
)
def test_each_estimator_asks_on_its_scale(name: str, query: str, reply: str, value: float, chat: ChatFormat) -> None:
    engine = ReplyingEngine(lambda _: reply)
    sample = Sample("q", 0, 0, "4", chat.response_ids("4"), "stop", "4", True)
    question = Question("q", "word_problems", (Message("user", "2+2?"),))
    entry = QuestionSamples(question, (sample,), "test", chat.prompt_ids(question.messages))
    assert ESTIMATORS[name](engine, chat).score([entry]) == [[pytest.approx(value)]]
    turns = (Message("user", "2+2?"), Message("assistant", "4"), Message("user", query))
    assert engine.requests[0].prompt_ids == chat.prompt_ids(turns)


def test_what_states_nothing_is_asked_again_and_then_unknown() -> None:
    replies = {"a": iter([r"\boxed{0.5}"]), "b": iter(["hm", "hm", r"\boxed{0.25}"]), "c": iter(["?"] * 3)}
    engine = ReplyingEngine(lambda prompt: next(replies[prompt]))
    prompts = {tuple(name.encode()): 0 for name in replies}
    found = ask_for_confidences(engine, prompts, parse=NUMBERS.parse, attempts=3)
    assert {FakeChat().decode(prompt): value for prompt, value in found.items()} == {"a": 0.5, "b": 0.25}
    assert [request.sampling.temperature for request in engine.requests] == [0.0] * 3 + [1.0] * 4
    assert len({request.seed for request in engine.requests}) == 3
