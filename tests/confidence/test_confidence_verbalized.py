from collections.abc import Callable

import pytest
from support.fakes import ReplyingEngine
from support.house import Vectors

from selfcal_lightning.confidence import verbalized
from selfcal_lightning.confidence.registry import ESTIMATORS
from selfcal_lightning.engines.base import Failure
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

TEXTS = ("The answer is 3.", "The answer is 4.", "The answer is 3.")


def test_replies_are_read_as_in_the_vectors(vectors: Vectors) -> None:
    """What the reference could not read, we do; an unfinished thought is no reply."""
    corrected = {"\\boxed{85%}": 0.85, "\\boxed{\\text{0.9}}": 0.9, "<think> unfinished \\boxed{0.5}": None}
    for case in vectors("verbalized_parse")["cases"]:
        expected = corrected.get(case["response"], case["parsed"])
        assert verbalized.parse_confidence(case["response"]) == expected, case


READINGS: dict[Callable[[str], float | None], list[tuple[str, float | None]]] = {
    verbalized.parse_confidence: [
        (r"\boxed{ 0.25 }", 0.25), (r"\boxed{85\%}", 0.85), (r"\boxed{85 %}", 0.85), (r"\boxed{ \text{ 40% } }", 0.4),
        (r"\boxed{$0.5$}", 0.5), (r"\boxed{1}", 1.0), (r"\boxed{1.}", 1.0), (r"\boxed{100\%}", 1.0),
        (r"\boxed{120\%}", None), (r"\boxed{-0.5}", None), (r"\boxed{high}", None), (r"\boxed{}", None),
        (r"\boxed{0.2} or \boxed{0.3}", 0.3), (r"\boxed{0.2} or \boxed{1.3}", 0.2), (r"0.8 \boxed{0.7", None),
        (r"<think>\boxed{0.9}</think>\boxed{0.1}", 0.1), (r"<think>\boxed{0.9}</think>No idea.", None),
        ("0.8", 0.8), ("Confidence: 80 %.", 0.8), ("My probability is 0.35", 0.35), ("0.9.", 0.9),
        ("My confidence is 0.9.", 0.9), ("Probability: .85.", 0.85), ("2", None), ("I have 3 reasons, so 0.8", None),
        ("", None), ("confidence" + "." * 100_000, None),
    ],
    verbalized.parse_words: [
        (r"\boxed{\text{ Very good chance. }}", 0.75),
        (r"First \boxed{unlikely}, no: \boxed{Highly likely}", 0.85),
        (r"\boxed{0.35}", 0.35), (r"\boxed{60\%}", 0.6), ("Confidence: almost certain", 0.95),
        ("It is likely that I would be wrong, since I am unlikely to know this at all.", None),
        (r"<think>\boxed{likely}", None), (r"\boxed{certainly}", None), ("", None),
    ],
    verbalized.parse_percentage: [
        (r"\boxed{85}", 0.85), (r"\boxed{85.5\%}", 0.855), (r"\boxed{0}", 0.0), (r"\boxed{100}", 1.0),
        (r"\boxed{101}", None), (r"\boxed{0.5}", 0.5), (r"\boxed{0.5\%}", 0.005), ("70 %", 0.7), ("Sure.", None),
        ("1.", 0.01), (r"<think>\boxed{9}</think>\boxed{10}", 0.1),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "reply", "value"), [(parse, *row) for parse, rows in READINGS.items() for row in rows]
)
def test_replies(parse: Callable[[str], float | None], reply: str, value: float | None) -> None:
    assert parse(reply) == (value if value is None else pytest.approx(value))


def entry_of(chat: ChatFormat, texts: tuple[str, ...] = TEXTS) -> QuestionSamples:
    samples = tuple(Sample("q", i, 0, t, chat.response_ids(t), "stop", "3", True) for i, t in enumerate(texts))
    question = Question("q", "word_problems", (Message("user", "1 + 2?"),))
    return QuestionSamples(question, samples, "test", chat.prompt_ids(question.messages))


def replying(*replies: str | Failure) -> ReplyingEngine:
    """An engine that gives these replies in turn, one at a time."""
    left = iter(replies)
    return ReplyingEngine(lambda _: next(left), slots=1)


def test_the_question_follows_the_response(chat: ChatFormat) -> None:
    engine = replying(r"\boxed{0.25}", r"\boxed{0.75}")
    assert verbalized.Verbalized(engine, chat).score([entry_of(chat)]) == [[0.25, 0.75, 0.25]]
    assert len(engine.requests) == 2, "equal responses are asked about once"
    request = engine.requests[0]
    turns = [Message("user", "1 + 2?"), Message("assistant", TEXTS[0]), Message("user", verbalized.VERBAL_QUERY)]
    assert request.prompt_ids == chat.prompt_ids(turns)
    assert request.query is None
    assert request.sampling.temperature == 0.0


def test_no_probability_is_none_and_may_be_asked_for_again(chat: ChatFormat) -> None:
    unsure = "Sure.", Failure("too hard", is_refusal=True)
    once, twice = replying(*unsure), replying(*unsure, r"\boxed{0.5}", "Hm.")
    assert verbalized.Verbalized(once, chat).score([entry_of(chat)]) == [[None, None, None]]
    assert verbalized.Verbalized(twice, chat, attempts=2).score([entry_of(chat)]) == [[0.5, None, 0.5]]
    assert [request.sampling.temperature for request in twice.requests] == [0.0, 0.0, 1.0, 1.0]
    assert [request.seed for request in twice.requests[2:]] == [request.seed + 1 for request in twice.requests[:2]]


def test_what_has_no_room_is_not_asked(chat: ChatFormat) -> None:
    room = len(chat.prompt_ids([Message("user", "1 + 2?")])) + len(chat.response_ids(TEXTS[0])) + 160
    engine = ReplyingEngine(lambda _: r"\boxed{1}", max_context=room)
    long = "So it continues. " * 40
    entry = entry_of(chat, (TEXTS[0], long))
    assert verbalized.Verbalized(engine, chat, max_new_tokens=32).score([entry]) == [[1.0, None]]
    assert verbalized.Verbalized(engine, chat, max_new_tokens=32).score([]) == []


def test_every_word_is_the_middle_of_its_tenth() -> None:
    for place, word in enumerate(verbalized.WORDS):
        assert verbalized.parse_words(rf"\boxed{{{word.capitalize()}}}") == pytest.approx(place / 10 + 0.05)
        assert verbalized.parse_words(f"{word}.") == pytest.approx(place / 10 + 0.05)
        assert word in verbalized.TEN_WORDS.after
        assert f"{word} ({place / 10:.1f} to {(place + 1) / 10:.1f})" in verbalized.TEN_WORDS.before


@pytest.mark.parametrize(
    ("name", "query", "reply", "value"),
    [
        ("verbalized_words", verbalized.TEN_WORDS.after, r"\boxed{Unlikely}", 0.35),
        ("verbalized_percent", verbalized.PERCENTAGES.after, r"\boxed{40}", 0.4),
    ],
)
def test_each_estimator_asks_on_its_scale(name: str, query: str, reply: str, value: float, chat: ChatFormat) -> None:
    engine = ReplyingEngine(lambda _: reply)
    entry = entry_of(chat, ("3",))
    assert ESTIMATORS[name](engine, chat).score([entry]) == [[pytest.approx(value)]]
    turns = (*entry.question.messages, Message("assistant", "3"), Message("user", query))
    assert engine.requests[0].prompt_ids == chat.prompt_ids(turns)
