"""The engine over a server against a server in this process: the shared contract, and servers that misbehave."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine_contract import EDT, EngineContract
from support.openai_server import CannedModel, FakeServer, Fault, RealModel, hangs_up, is_silent, says, status
from support.options import nested

from selfcal_lightning.engines.base import RequestsFailedError, generate
from selfcal_lightning.engines.openai.address import check_base_url, presentable, read_key
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.openai.jobs import BackgroundJobs
from selfcal_lightning.engines.openai.retries import ServerError, backoff_seconds, retry_after_seconds
from selfcal_lightning.engines.openai.wire import SampleReader, choose_model, read_probabilities
from selfcal_lightning.pipelines.generate import run_generate
from selfcal_lightning.prompts.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import ConfidenceQuery, Message, Request, SamplingSettings
from selfcal_lightning.store.sample_store import SampleStore

KEY_NAME = "SELFCAL_TEST_KEY"
KEY = "sk-very-secret-0123456789"
PLAIN = SamplingSettings(temperature=0.7, edt_scale=None, max_new_tokens=64)
EVENT = b'data: {"choices":[{"logprobs":{"tokens":["token_id:5","token_id:6"],"token_logprobs":[-1,-2]},' + (
    b'"finish_reason":null}]}\n\n'
)


@pytest.fixture(scope="module")
def chat(tiny_model: str) -> ChatFormat:
    return ChatFormat(load_tokenizer(tiny_model))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, KEY)


@pytest.fixture
def server(chat: ChatFormat) -> Iterator[FakeServer]:
    server = FakeServer(_canned(chat), chat.tokenizer, key=KEY)
    yield server
    server.close()


@pytest.fixture
def connect(server: FakeServer, tiny_model: str, chat: ChatFormat) -> Iterator[Callable[..., OpenAIEngine]]:
    """Make engines over the server, with waits of milliseconds; they are closed at the end."""
    engines: list[OpenAIEngine] = []

    def make(**options: object) -> OpenAIEngine:
        settings = {
            "base_url": server.base_url, "chat": chat, "api_key_env": KEY_NAME, "first_wait": 0.002,
            "longest_wait": 0.01, "max_retries": 3, "deadline": 20.0,
        }  # fmt: skip
        engines.append(OpenAIEngine(tiny_model, **{**settings, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def _canned(chat: ChatFormat) -> CannedModel:
    return CannedModel([*chat.response_ids("The answer is 8."), min(chat.end_of_turn_ids)])


def _requests(chat: ChatFormat, count: int, query: ConfidenceQuery | None = None) -> list[Request]:
    prompt = chat.prompt_ids([Message("user", "What is 5 + 3?")])
    return [Request(str(j), prompt, PLAIN, seed=j, query=query) for j in range(count)]


class TestContract(EngineContract):
    max_context = 256

    @pytest.fixture(autouse=True, scope="class")
    def _serve(self, tiny_model: str, request: pytest.FixtureRequest) -> Iterator[None]:
        request.cls.server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model))
        yield
        request.cls.server.close()

    def make_engine(self, path: str) -> OpenAIEngine:
        return OpenAIEngine(
            path,
            base_url=self.server.base_url,
            weights=path,
            dtype="float32",
            max_context=self.max_context,
            server_edt=True,
            api_key_env="SELFCAL_TEST_NO_KEY",
        )


def test_a_response_is_what_the_server_said(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    engine = connect()
    (response,) = generate(engine, _requests(chat, 1, chat.query))
    ids = chat.response_ids("The answer is 8.")
    assert (response.text, response.token_ids, response.finish) == ("The answer is 8.", ids, "stop")
    assert response.logprob == pytest.approx(-0.5 * len(ids))
    assert response.yes_mass == pytest.approx(len(chat.query.yes_ids) / 4)
    assert response.no_mass == pytest.approx(len(chat.query.no_ids) / 4)
    sample, score = (exchange.body for exchange in server.completions())
    assert score["prompt"] == [*sample["prompt"], *ids, *chat.query.suffix_ids]
    assert (sample["temperature"], sample["top_k"], sample["repetition_penalty"]) == (0.7, 0, 1.0)
    assert engine.max_context == 511
    assert engine.describe()["weights_sha256"] is None


def test_no_more_requests_run_than_allowed(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    engine = connect(max_batch=3)
    assert engine.batch_size == 3
    assert len(generate(engine, _requests(chat, 40, chat.query))) == 40
    assert server.busiest == 3


@pytest.mark.parametrize(
    ("faults", "attempts"),
    [
        ([status(429, Retry_After="0.01")], 2),
        ([status(429), status(503, Retry_After="0"), status(500)], 4),
        ([hangs_up(), hangs_up(after=EVENT)], 3),
        ([hangs_up(after=b"")], 2),
        ([says(EVENT, kind="text/event-stream")], 2),  # well-formed, but ended before the response did
        ([says(b'data: {"error": {"message": "engine died", "code": 500}}\n\n', kind="text/event-stream")], 2),
    ],
    ids=["429", "busy", "broken", "closed", "unfinished", "fault in the stream"],
)
def test_a_passing_fault_is_outlived(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat, faults: list[Fault], attempts: int
) -> None:
    server.faults.extend(faults)
    engine = connect()
    engine.submit([])
    before = engine.statistics()
    (response,) = generate(engine, _requests(chat, 1))
    assert response.text == "The answer is 8."
    assert len(server.completions()) == attempts
    assert engine.statistics().retries - before.retries == attempts - 1
    assert len({json.dumps(exchange.body) for exchange in server.completions()}) == 1


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
        (says(b'data: {"choices": [{"log\n\n', kind="text/event-stream"), "answer in JSON"),
        (says(EVENT.replace(b"-2", b"NaN"), kind="text/event-stream"), "nan is not a log-probability"),
        (says(EVENT.replace(b"-2", b'"x"'), kind="text/event-stream"), "'x' is not a log-probability"),
        (says(EVENT.replace(b"-2", b"-Infinity"), kind="text/event-stream"), "-inf is not a log-probability"),
        (says(EVENT.replace(b"-2", b"-1" + b"0" * 400), kind="text/event-stream"), "0 is not a log-probability"),
        (says(EVENT.replace(b"-2", b"true"), kind="text/event-stream"), "True is not a log-probability"),
        (says(EVENT.replace(b"-2", b"null"), kind="text/event-stream"), "None is not a log-probability"),
        (says(EVENT.replace(b",-2", b""), kind="text/event-stream"), "1 log-probabilities for 2 tokens"),
        (says(EVENT.replace(b"token_id:5", b"Hello"), kind="text/event-stream"), "'Hello' is not written as an id"),
        (says(EVENT.replace(b":5", b":" + b"5" * 400), kind="text/event-stream"), "is not written as an id"),
        (says(EVENT.replace(b":5", b":05"), kind="text/event-stream"), "is not written as an id"),
        (says(EVENT.replace(b":5", b":4000000000"), kind="text/event-stream"), "none of the vocabulary's"),
        (
            says(EVENT.replace(b'["token_id:5","token_id:6"]', b'"token_id:5"'), kind="text/event-stream"),
            "something else",
        ),
        (says(EVENT.replace(b"null", b"[]"), kind="text/event-stream"), "is not a reason"),
        (says(EVENT.replace(b"null", b'"stop"') + EVENT, kind="text/event-stream"), "tokens after the end"),
        (says(EVENT.replace(b"]}\n", b',{"index":1}]}\n'), kind="text/event-stream"), "something else"),
        (says(b'{"choices":' + b"[" * 950 + b"]" * 950 + b"}"), "tokens and their log-probabilities"),
        (
            says(b'data: {"error": {"message": "no status"}}\n\n', kind="text/event-stream"),
            "in the middle of an answer",
        ),
        (says(EVENT * 40, kind="text/event-stream"), "at most 64 tokens, but got more"),
        (says(EVENT.replace(b"null", b'"abort"'), kind="text/event-stream"), "by `stop` or `length`.*'abort'"),
    ],
)
def test_a_refusal_or_garbage_is_reported_at_once_and_the_others_go_on(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat, fault: Fault, message: str
) -> None:
    server.faults.append(fault)
    engine = connect(max_batch=1)
    seen: list[str] = []
    with pytest.raises(RequestsFailedError, match=message) as caught:
        generate(engine, _requests(chat, 3), on_finished=lambda response: seen.append(response.request_id))
    assert (sorted(seen), set(caught.value.failures)) == (["1", "2"], {"0"})
    assert KEY not in str(caught.value)
    assert len(server.completions()) == 3
    assert engine.poll() == []
    assert (engine.statistics().failed, engine.statistics().retries) == (1, 0)
    assert len(generate(engine, _requests(chat, 1))) == 1


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"token_id:5": -0.1, "token_id:6": -0.2}, "add up to more than 1"),
        ({"token_id:5": 3.0, "token_id:6": -1.0}, "3.0 is not a log-probability"),
        ({"token_id:5": float("nan"), "token_id:6": -1.0}, "nan is not a log-probability"),
        ({"token_id:5": "-1", "token_id:6": -1.0}, "'-1' is not a log-probability"),
        ({"token_id:5": -1.0}, "got none for 1 of them, the first 6"),
        ([-1.0, -1.0], "something else"),
    ],
)
def test_scores_that_cannot_be_are_refused(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat, top: object, message: str
) -> None:
    server.faults.append(says(json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()))
    engine = connect()
    with pytest.raises(RequestsFailedError, match=message) as caught:
        engine.next_token_probabilities([chat.prompt_ids([Message("user", "5 + 3?")])], [5, 6])
    assert not any(failure.is_refusal for failure in caught.value.failures.values())


def test_what_follows_the_end_of_the_turn_is_no_part_of_the_response(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    """In one piece and in several, and where the server ends at an id of its own."""
    end, ids = min(chat.end_of_turn_ids), chat.response_ids("It is 8.")

    def pieces(*groups: Sequence[int], stop: int | None = None) -> bytes:
        events = []
        for group in groups:
            told = {"tokens": [f"token_id:{i}" for i in group], "token_logprobs": [-0.5] * len(group)}
            reason = "stop" if group is groups[-1] else None
            choice = {"index": 0, "logprobs": told, "finish_reason": reason, "stop_reason": stop if reason else None}
            events.append(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = b'data: {"choices": [], "usage": {"total_tokens": 9}}\n\n'
        return b"".join([*events, usage])

    streams = [pieces([*ids, end, 9, 9]), pieces(ids, [end, 9], [9]), pieces([*ids, 9], stop=9)]
    server.faults.extend(says(stream, kind="text/event-stream") for stream in streams)
    engine = connect(max_batch=1)
    for response in generate(engine, _requests(chat, 3)):
        assert (response.text, response.token_ids, response.finish) == ("It is 8.", ids, "stop")
        assert response.logprob == pytest.approx(-0.5 * len(ids))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["token_id:5", "stop", -1.0, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "logprobs", "tokens", "token_logprobs", "top_logprobs", "finish_reason", "data", "id",
                 "stop_reason", "max_model_len", "token_id:5"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(reply=JSON)
def test_whatever_a_server_says_fails_one_request_at_most(reply: object) -> None:
    told = {"choices": [reply, {"logprobs": reply}, reply][:1]}
    for said in (reply, told, {"choices": [{"logprobs": reply, "finish_reason": None}]}, {"data": reply}):
        with contextlib.suppress(ServerError):
            SampleReader([7], max_tokens=8, vocabulary=100).take(said)
        with contextlib.suppress(ServerError):
            read_probabilities(said, [5])
        with contextlib.suppress(ServerError, ValueError):
            choose_model(said, wanted=None, default="m")


@pytest.mark.parametrize("told", [True, -5, 0, "512", 1e9])
def test_a_limit_that_is_none_is_not_believed(tiny_model: str, chat: ChatFormat, told: object) -> None:
    server = FakeServer(_canned(chat), chat.tokenizer, max_model_len=told)  # type: ignore[arg-type]
    engine = OpenAIEngine(tiny_model, base_url=server.base_url, chat=chat, api_key_env="SELFCAL_TEST_NO_KEY")
    with pytest.raises(ValueError, match="`max_context` to be given"):
        engine.submit([])
    engine.close()
    server.close()


def test_a_server_that_keeps_failing_is_given_up(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    server.faults.extend([status(500, "out of memory")] * 4)
    engine = connect(max_retries=3, max_batch=1)
    with pytest.raises(RequestsFailedError, match=r"HTTP 500: out of memory \(4 attempts\)"):
        generate(engine, _requests(chat, 1))
    assert len(server.completions()) == 4


@pytest.mark.parametrize("after", [b"", EVENT], ids=["silent", "stuck"])
def test_a_server_that_is_too_slow_is_given_up_at_the_deadline(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat, after: bytes
) -> None:
    server.faults.append(is_silent(after=after))
    engine = connect(deadline=0.3)
    with pytest.raises(RequestsFailedError, match="the time was up in attempt 1"):
        generate(engine, _requests(chat, 2))
    assert engine.statistics().retries == 0


def test_a_wait_that_outlasts_the_deadline_is_not_begun(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    server.faults.append(status(429, "quota", Retry_After="3600"))
    engine = connect()
    with pytest.raises(RequestsFailedError, match=r"HTTP 429: quota \(attempt 1; no time left to wait 3.6e\+03 s"):
        generate(engine, _requests(chat, 1))


def test_the_query_is_retried_alone(connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat) -> None:
    engine = connect(max_batch=1)
    engine.submit([])
    served = server._complete_sample

    async def then_fail(exchange: object) -> None:
        await served(exchange)
        server.faults.append(status(503))

    server._complete_sample = then_fail
    (response,) = generate(engine, _requests(chat, 1, chat.query))
    assert response.yes_mass is not None
    assert ["stream" in exchange.body for exchange in server.completions()] == [True, False, False]


@pytest.mark.timeout(60)  # without cancelling, it would end at the deadline
def test_cancelling_closes_the_connection_and_tells_what_came(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    server.faults.extend([is_silent(after=EVENT), is_silent()])
    engine = connect(max_batch=2, deadline=600.0)
    engine.submit(_requests(chat, 4))
    _until(lambda: sorted(flight.num_tokens for flight in engine._flights.values()) == [0, 0, 0, 2])
    _until(lambda: len(server.completions()) == 2)
    begun = engine.cancel(["0", "1", "3", "unknown"])
    assert sorted(begun.values()) == [0, 2]
    assert set(begun) == {"0", "1"}
    assert [response.request_id for response in engine.poll()] == ["2"]
    assert engine.poll() == []
    _until(lambda: server.abandoned == 2)
    statistics = engine.statistics()
    tokens = len(chat.response_ids("The answer is 8."))
    assert (statistics.cancelled, statistics.tokens_received) == (3, 2 + tokens)
    assert len(generate(engine, _requests(chat, 4))) == 4


def test_scores_go_before_waiting_samples_and_failures_name_the_prompt(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    engine = connect(max_batch=1)
    engine.submit(_requests(chat, 6))
    prompt = chat.prompt_ids([Message("user", "5 + 3?")])
    assert engine.next_token_probabilities([prompt, prompt], [5, 6, 5]) == [[pytest.approx(0.25)] * 3] * 2
    scored = [i for i, exchange in enumerate(server.completions()) if "stream" not in exchange.body]
    assert max(scored) <= 3
    responses = []
    while finished := engine.poll():
        responses += finished
    assert len(responses) == 6
    server.faults.extend([status(403, "not you"), says(b'{"choices": [{"logprobs": {"top_logprobs": [{}]}}]}')])
    with pytest.raises(RequestsFailedError, match=r"(?s)prompt 0 of .*not you.*prompt 1 of .*`logprob_token_ids`"):
        engine.next_token_probabilities([prompt, prompt], [5, 6])
    server.faults.append(status(400, "too hot"))
    assert engine.next_token_probabilities([prompt, prompt], [5, 6]) == [None, [pytest.approx(0.25)] * 2]
    with pytest.raises(ValueError, match="prompts of 1 to 511 tokens, but got 0"):
        engine.next_token_probabilities([()], [5])


def test_the_key_is_sent_and_never_shown(
    connect: Callable[..., OpenAIEngine],
    server: FakeServer,
    chat: ChatFormat,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = connect()
    server.faults.extend([status(500, f"your key is {KEY}"), status(403, json.dumps([KEY]))])
    with caplog.at_level(logging.DEBUG), pytest.raises(RequestsFailedError) as caught:
        generate(engine, _requests(chat, 1))
    assert server.completions()[0].headers["authorization"] == f"Bearer {KEY}"
    shown = f"{caught.value!r} {engine.describe()} {engine!r} {caplog.text} {engine.statistics()}"
    assert "[key]" in shown
    assert KEY not in shown
    monkeypatch.setenv(KEY_NAME, "another")
    with pytest.raises(ServerError, match=rf"HTTP 401: Unauthorized .*{KEY_NAME}"):
        connect().submit([])


def test_what_is_wrong_at_the_start_is_told_without_the_key(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    server.models = [KEY, "second"]
    with pytest.raises(ValueError, match=r"`served_model` to name a model .*It has: \[key\], second") as caught:
        connect().submit([])
    assert KEY not in str(caught.value)
    server.models = ["second", "third"]
    assert len(generate(connect(served_model="second"), _requests(chat, 1))) == 1


def test_a_server_without_keys_needs_none(tiny_model: str, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_NAME)
    server = FakeServer(_canned(chat), chat.tokenizer)
    engine = OpenAIEngine(tiny_model, base_url=server.base_url, chat=chat, api_key_env=KEY_NAME)
    assert len(generate(engine, _requests(chat, 2))) == 2
    assert all("authorization" not in exchange.headers for exchange in server.exchanges)
    engine.close()
    server.close()


def test_a_server_that_is_not_there_is_named_and_may_come_later(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat, tiny_model: str
) -> None:
    late = FakeServer(_canned(chat), chat.tokenizer)
    late.close()
    engine = connect(base_url=late.base_url, max_retries=2)
    for _ in range(2):
        with pytest.raises(ServerError, match=rf"{late.base_url} failed: ClientConnectorError.*3 attempts"):
            engine.submit(_requests(chat, 1))
    engine.base_url = server.base_url
    assert len(generate(engine, _requests(chat, 1))) == 1


def test_what_a_server_cannot_do_is_found_out_at_the_start(tiny_model: str, chat: ChatFormat) -> None:
    def engine(server: FakeServer, **options: object) -> OpenAIEngine:
        return OpenAIEngine(tiny_model, base_url=server.base_url, chat=chat, api_key_env=KEY_NAME, **options)

    plain = FakeServer(_canned(chat), chat.tokenizer, knows_edt=False, writes_ids=False, max_model_len=None)
    with pytest.raises(ValueError, match="`max_context` to be given"):
        engine(plain).submit([])
    with pytest.raises(ValueError, match=r"server to know entropy-based dynamic temperature.*--logits-processors"):
        engine(plain, max_context=300, server_edt=True).submit([])
    asking = engine(plain, max_context=300)
    with pytest.raises(RequestsFailedError, match="is not written as an id: the server must be vLLM's own"):
        generate(asking, _requests(chat, 1))
    with pytest.raises(ValueError, match=r"`edt_scale` to be None .*Set `edt_scale` to null.*--logits-processors"):
        asking.submit([replace(request, sampling=EDT) for request in _requests(chat, 1)])
    assert asking.poll() == []
    asking.close()
    plain.close()


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost/v1/", True),
        ("http://[::1]:8000/v1", True),
        ("https://api.example.com/v1", True),
        ("http://10.0.0.7:8000/v1", False),
        ("http://0.0.0.0:8000/v1", False),
        ("http://127.0.0.1.evil.example/v1", False),
        ("http://localhost.evil.example/v1", False),
        ("http://127.0.0.1@evil.example/v1", False),
        ("http://evil.example\\@127.0.0.1/v1", False),
        ("https://user:secret@host/v1", False),
        ("https://host/v1?api_key=secret", False),
        ("ftp://host/v1", False),
        ("", False),
    ],
)
def test_addresses(url: str, accepted: bool) -> None:
    if accepted:
        assert check_base_url(url) == url.rstrip("/")
        return
    with pytest.raises(ValueError, match="Expected `base_url` to") as caught:
        check_base_url(url)
    assert "secret" not in str(caught.value)


def test_plain_http_to_another_machine_is_the_users_choice() -> None:
    assert check_base_url("http://gpu-7:8000/v1", allow_http=True) == "http://gpu-7:8000/v1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "`max_batch` to be at least 1, but got 0"),
        ({"max_retries": -1}, "`max_retries` to be at least 0, but got -1"),
        ({"stream_interval": 0}, "`stream_interval` to be at least 1"),
        ({"deadline": 0.0}, "`deadline` to be above 0 seconds, but got 0.0"),
        ({"base_url": "http://gpu-7:8000/v1"}, "in the clear"),
        ({"adapter": "folder"}, "`served_model` to be the server's name for `adapter`"),
    ],
)
def test_bad_settings_are_named(tiny_model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenAIEngine(tiny_model, **options)


def test_a_key_that_cannot_be_sent_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, "secret\nX-Header: 1")
    with pytest.raises(ValueError, match=KEY_NAME) as caught:
        read_key(KEY_NAME)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv(KEY_NAME, " \n")
    assert read_key(KEY_NAME) is None


def test_what_is_shown_is_short_printable_and_without_the_key() -> None:
    shown = presentable("\x1b[31m" + "x" * 795 + KEY + "\r\n" + "y" * 5000, key=KEY)
    assert shown.startswith("[31mxxx")
    assert len(shown) < 810
    assert "sk-" not in shown
    assert shown.isprintable()


def test_retry_after_is_read_as_seconds_or_as_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    values = [
        None,
        "2",
        "0.5",
        "-3",
        "soon",
        "Mon, 01 Jan 99999999999999999999 00:00:00 GMT",
        "nan",
        "inf",
        "",
        date,
        format_datetime(now - timedelta(days=1), usegmt=True),
    ]
    expected = [None, 2.0, 0.5, 0.0, None, None, None, None, None, 90.0, 0.0]
    assert [retry_after_seconds(value, now=now) for value in values] == expected


def test_backoff_doubles_up_to_its_limit_between_half_and_all() -> None:
    least = [backoff_seconds(n, first=0.5, longest=3.0, chance=0.0) for n in range(5)]
    assert least == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert backoff_seconds(5000, first=0.5, longest=3.0, chance=0.999) < 3.0


def test_jobs_that_break_in_an_unforeseen_way_are_not_lost() -> None:
    async def breaks() -> None:
        raise KeyError("a bug")

    jobs = BackgroundJobs(limit=1)
    jobs.add([(7, breaks)])
    number, result, error = jobs.take()
    assert (number, result, repr(error)) == (7, None, "KeyError('a bug')")
    jobs.close()
    jobs.close()


def test_closing_ends_the_thread_with_work_in_flight(
    connect: Callable[..., OpenAIEngine], server: FakeServer, chat: ChatFormat
) -> None:
    threads = {thread.ident for thread in threading.enumerate()}
    server.faults.append(is_silent())
    engine = connect()
    engine.submit(_requests(chat, 3))
    _until(lambda: len(server.completions()) >= 1)
    engine.close()
    assert {thread.ident for thread in threading.enumerate()} == threads
    with pytest.raises(RuntimeError, match="closed"):
        engine.poll()


def test_generate_samples_from_a_server(
    server: FakeServer, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {
        "model": tiny_model, "store_dir": str(tmp_path), "task": "word_problems", "limit": 3, "num_samples": 2,
        "max_new_tokens": 24, "engine": "openai", "base_url": server.base_url,
        "engine_args": {"api_key_env": KEY_NAME},
    }  # fmt: skip
    with pytest.raises(ValueError, match="Set `edt_scale` to null"):
        run_generate(**nested(**arguments))
    assert run_generate(**nested(**arguments, edt_scale=None)).generated == 6
    asked = len(server.completions())
    assert run_generate(**nested(**arguments, edt_scale=None)).generated == 0
    assert len(server.completions()) == asked == 12
    samples = [sample for group in SampleStore(tmp_path).samples() for sample in group.samples]
    assert {(sample.text, sample.answer, sample.p_true) for sample in samples} == {("The answer is 8.", "8", 0.5)}
    written = "".join(path.read_text() for path in tmp_path.rglob("*.json"))
    assert server.base_url in written
    assert KEY not in written + str(capsys.readouterr())
    with pytest.raises(ValueError, match=r"`engine_args` of openai to be among served_model, .*\['speed'\]"):
        run_generate(**nested(**arguments | {"engine_args": {"speed": 2}}, edt_scale=None))


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)
