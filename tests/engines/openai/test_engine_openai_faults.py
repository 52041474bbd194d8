import json
from typing import Any

import pytest
from support.openai_engines import EVENT, KEY, Connect, requests_of
from support.openai_server import FakeServer, Fault, hangs_up, is_silent, says, status

from selfcal_lightning.engines.base import RequestsFailedError, generate
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message

pytestmark = pytest.mark.usefixtures("key")


@pytest.mark.parametrize(
    ("faults", "attempts"),
    [
        ([status(429, Retry_After="0.01")], 2),
        ([status(429), status(503, Retry_After="0"), status(500)], 4),
        ([hangs_up(), hangs_up(after=EVENT)], 3),
        ([hangs_up(after=b"")], 2),
        # Well-formed, but ended before the response did; an error of null is none.
        ([says(EVENT.replace(b"{", b'{"error":null,', 1), kind="text/event-stream")], 2),
        ([says(b'data: {"error": {"message": "engine died", "code": 500}}\n\n', kind="text/event-stream")], 2),
    ],
    ids=["429", "busy", "broken", "closed", "unfinished", "fault in the stream"],
)
def test_a_passing_fault_is_outlived(
    connect: Connect, server: FakeServer, chat: ChatFormat, faults: list[Fault], attempts: int
) -> None:
    server.faults.extend(faults)
    engine = connect()
    (response,) = generate(engine, requests_of(chat, 1))
    assert response.text == "The answer is 8."
    assert len(server.completions()) == attempts
    assert len({json.dumps(exchange.body) for exchange in server.completions()}) == 1


def streams(content: bytes) -> Fault:
    return says(content, kind="text/event-stream")


# What of an event is replaced by what, and what is said of it.
BAD_EVENTS = [
    (b"-2", b"NaN", "nan is not a log-probability"),
    (b"-2", b'"x"', "'x' is not a log-probability"),
    (b"-2", b"-Infinity", "-inf is not a log-probability"),
    (b"-2", b"-1" + b"0" * 400, "0 is not a log-probability"),
    (b"-2", b"true", "True is not a log-probability"),
    (b"-2", b"null", "None is not a log-probability"),
    (b",-2", b"", "1 log-probabilities for 2 tokens"),
    (b"token_id:5", b"Hello", "'Hello' is not written as an id"),
    (b":5", b":" + b"5" * 400, "is not written as an id"),
    (b":5", b":05", "is not written as an id"),
    (b":5", b":4000000000", "none of the vocabulary's"),
    (b'["token_id:5","token_id:6"]', b'"token_id:5"', "something else"),
    (b"null", b"[]", "is not a reason"),
    (b"]}\n", b',{"index":1}]}\n', "something else"),
    (b"null", b'"abort"', "by `stop` or `length`.*'abort'"),
]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400, f"bad prompt, said {KEY}"), r"HTTP 400: bad prompt, said \[key\]$"),
        (status(404, "no such model"), "HTTP 404: no such model"),
        (status(307, Location="http://evil.example/"), "HTTP 307"),
        (says(b"<html>Welcome</html>"), "answer in JSON, but got '<html>Welcome</html>'"),
        (says(b'{"choices": [{"logprobs": null, "finish_reason": "stop"}]}'), "tokens and their log-probabilities"),
        (says(b'{"choices": 7}'), "tokens and their log-probabilities"),
        (says(json.dumps({"choices": KEY}).encode()), r"tokens and their log-probabilities.*\[key\]"),
        (says(b"[" * 100_000), "answer in JSON"),
        (says(b'{"choices":' + b"[" * 950 + b"]" * 950 + b"}"), "tokens and their log-probabilities"),
        (streams(b'data: {"choices": [{"log\n\n'), "answer in JSON"),
        (streams(b'data: {"error": {"message": "no status"}}\n\n'), "in the middle of an answer"),
        (streams(EVENT * 40), "at most 64 tokens, but got more"),
        (streams(EVENT.replace(b"null", b'"stop"') + EVENT), "tokens after the end"),
        *((streams(EVENT.replace(old, new)), message) for old, new, message in BAD_EVENTS),
    ],
)
def test_a_refusal_or_garbage_is_reported_at_once_and_the_others_go_on(
    connect: Connect, server: FakeServer, chat: ChatFormat, fault: Fault, message: str
) -> None:
    server.faults.append(fault)
    engine = connect(max_batch=1)
    with pytest.raises(RequestsFailedError, match=message) as caught:
        generate(engine, requests_of(chat, 3))
    assert set(caught.value.failures) == {"0"}
    assert KEY not in str(caught.value)
    assert len(server.completions()) == 3
    assert engine.poll() == []
    assert len(generate(engine, requests_of(chat, 1))) == 1


@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"token_id:5": -0.1, "token_id:6": -0.2}, "add up to more than 1"),
        ({"token_id:5": 3.0, "token_id:6": -1.0}, "3.0 is not a log-probability"),
        ({"token_id:5": float("nan"), "token_id:6": -1.0}, "nan is not a log-probability"),
        ({"token_id:5": "-1", "token_id:6": -1.0}, "'-1' is not a log-probability"),
        ({"token_id:5": -1.0}, "got none for 1 of them, the first 6"),
        ([-1.0, -1.0], "something else"),
    ],
)
def test_bad_scores_are_refused(connect: Connect, server: FakeServer, chat: ChatFormat, top: object, said: str) -> None:
    server.faults.append(says(json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()))
    engine = connect()
    with pytest.raises(RequestsFailedError, match=said) as caught:
        engine.next_token_probabilities([chat.prompt_ids([Message("user", "5 + 3?")])], [5, 6])
    assert not any(failure.is_refusal for failure in caught.value.failures.values())


@pytest.mark.parametrize(
    ("faults", "options", "attempts", "said"),
    [
        ([status(500, "no room")] * 4, {"max_retries": 3}, 4, r"HTTP 500: no room \(4 attempts\)"),
        ([is_silent()], {"deadline": 0.3}, 1, "the time was up in attempt 1"),
        ([is_silent(after=EVENT)], {"deadline": 0.3}, 1, "the time was up in attempt 1"),
        (
            [status(429, "quota", Retry_After="3600")],
            {},
            1,
            r"HTTP 429: quota \(attempt 1; no time left to wait 3.6e\+03",
        ),
    ],
)
def test_a_server_that_keeps_failing_or_waiting_is_given_up(
    connect: Connect, server: FakeServer, chat: ChatFormat, faults: Any, options: Any, attempts: int, said: str
) -> None:
    server.faults.extend(faults)
    engine = connect(max_batch=1, **options)
    with pytest.raises(RequestsFailedError, match=said):
        generate(engine, requests_of(chat, 1))
    assert len(server.completions()) == attempts


def test_the_query_is_retried_alone(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    engine = connect(max_batch=1)
    engine.submit([])
    served = server._complete_sample

    async def then_fail(exchange: object) -> None:
        await served(exchange)
        server.faults.append(status(503))

    server._complete_sample = then_fail
    (response,) = generate(engine, requests_of(chat, 1, chat.query))
    assert response.yes_mass is not None
    assert ["stream" in exchange.body for exchange in server.completions()] == [True, False, False]
