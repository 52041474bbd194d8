import asyncio
import contextlib
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_lines import nested
from support.engine_contract import EDT, EngineContract, Reference
from support.openai_models import RealModel
from support.openai_server import (
    EVENT,
    KEY,
    KEY_NAME,
    Connect,
    Exchange,
    FakeServer,
    Fault,
    canned,
    connecting,
    hangs_up,
    is_silent,
    over_server,
    requests_of,
    says,
    status,
    vllm_serving,
)
from support.other_models import plain_copy
from support.processes import wait_until

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import RequestsFailedError, generate
from selfcal_lightning.engines.openai import wire
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.openai.transport import BackgroundJobs, check_base_url, presentable, read_key
from selfcal_lightning.engines.openai.wire import ServerError
from selfcal_lightning.engines.vllm.process import worker_environment
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message


@pytest.fixture
def server(chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv(KEY_NAME, KEY)
    server = FakeServer(canned(chat), chat.tokenizer, key=KEY)
    yield server
    server.close()


@pytest.fixture
def connect(server: FakeServer, tiny_model: str, chat: ChatFormat) -> Iterator[Connect]:
    with connecting(server, tiny_model, chat) as connect:
        yield connect


def follow_samples_by(server: FakeServer, fault: Fault) -> None:
    """Answer samples, and let what is asked after one meet ``fault``."""
    sampled = server._complete_sample

    async def then_fail(exchange: Exchange) -> None:
        await sampled(exchange)
        server.faults.append(fault)

    server._complete_sample = then_fail


def scores(top: object) -> Fault:
    return says(json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode())


@pytest.mark.slow
class TestContract(EngineContract):
    @pytest.fixture(autouse=True, scope="class")
    def _serve(self, tiny_model: str, request: pytest.FixtureRequest) -> Iterator[None]:
        request.cls.server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model))
        yield
        request.cls.server.close()

    def make_engine(self, path: str) -> OpenAIEngine:
        return over_server(self.server.base_url, path)


@pytest.fixture(scope="module")
def vllms_server(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    environment = worker_environment(os.environ, on_cpu=True)
    with vllm_serving(tiny_model, tmp_path_factory.mktemp("server"), environment, "--api-key", KEY) as base_url:
        yield base_url


@pytest.mark.slow
@pytest.mark.vllm
class TestContractOnVLLMsServer(EngineContract):
    @pytest.fixture(autouse=True)
    def _know_the_server(self, vllms_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(KEY_NAME, KEY)
        self.base_url = vllms_server

    def make_engine(self, path: str, **options: Any) -> OpenAIEngine:
        return over_server(self.base_url, path, api_key_env=KEY_NAME, **options)

    @pytest.fixture(scope="class")
    def engine(self, vllms_server: str, tiny_model: str) -> Iterator[OpenAIEngine]:
        engine = over_server(vllms_server, tiny_model, api_key_env=KEY_NAME)
        yield engine
        engine.close()

    def test_pieces_change_nothing(self, engine: OpenAIEngine, tiny_model: str, reference: Reference) -> None:
        requests = reference.requests(EDT, count=2)
        coarse = self.make_engine(tiny_model, stream_interval=16)
        assert generate(coarse, requests) == generate(engine, requests)
        coarse.close()


def test_a_response_is_what_the_server_said(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    engine = connect()
    (response,) = generate(engine, requests_of(chat, 1, chat.query))
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


def test_masses_stay_probabilities_in_spite_of_rounding(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    query = replace(chat.query, yes_ids=(5, 6), no_ids=(7,))
    top = {"token_id:5": math.log(0.5 + 1e-7), "token_id:6": math.log(0.5), "token_id:7": -40.0}
    follow_samples_by(server, scores(top))
    (response,) = generate(connect(), requests_of(chat, 1, query))
    assert response.yes_mass == 1.0


def test_no_more_requests_run_than_allowed(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    engine = connect(max_batch=3)
    assert engine.batch_size == 3
    assert len(generate(engine, requests_of(chat, 40, chat.query))) == 40
    assert server.busiest == 3


def test_what_follows_the_end_of_a_turn_is_left_out(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
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
    for response in generate(engine, requests_of(chat, 3)):
        assert (response.text, response.token_ids, response.finish) == ("It is 8.", ids, "stop")
        assert response.logprob == pytest.approx(-0.5 * len(ids))


@pytest.mark.timeout(60)  # without cancelling, it would end at the deadline
def test_cancelling_hangs_up_and_tells_what_came(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    server.faults.extend([is_silent(after=EVENT), is_silent()])
    engine = connect(max_batch=2, deadline=600.0)
    engine.submit(requests_of(chat, 4))
    wait_until(lambda: sorted(map(len, engine.drawn_so_far("0123").values())) == [0, 2])
    wait_until(lambda: len(server.completions()) == 2)
    begun = engine.cancel(["0", "1", "3", "unknown"])
    assert sorted(begun.values()) == [0, 2]
    assert set(begun) == {"0", "1"}
    assert [response.request_id for response in engine.poll()] == ["2"]
    assert engine.poll() == []
    wait_until(lambda: server.abandoned == 2)
    assert len(generate(engine, requests_of(chat, 4))) == 4


def test_scores_go_first_and_failures_name_the_prompt(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    engine = connect(max_batch=1)

    async def wait_for_the_scores(exchange: Exchange) -> None:
        while len(engine._jobs._waiting) < 5 + 2:
            await asyncio.sleep(0.002)
        await server._complete(exchange)

    server.faults.append(wait_for_the_scores)
    engine.submit(requests_of(chat, 6))
    prompt = chat.prompt_ids([Message("user", "5 + 3?")])
    assert engine.next_token_probabilities([prompt, prompt], [5, 6, 5]) == [[pytest.approx(0.25)] * 3] * 2
    scored = [i for i, exchange in enumerate(server.completions()) if "stream" not in exchange.body]
    assert scored == [1, 2]
    responses = []
    while finished := engine.poll():
        responses += finished
    assert len(responses) == 6
    server.faults.extend([status(403, "not you"), scores({})])
    with pytest.raises(RequestsFailedError, match=r"(?s)prompt 0 of .*not you.*prompt 1 of .*`logprob_token_ids`"):
        engine.next_token_probabilities([prompt, prompt], [5, 6])
    server.faults.append(status(400, "too hot"))
    assert engine.next_token_probabilities([prompt, prompt], [5, 6]) == [None, [pytest.approx(0.25)] * 2]
    with pytest.raises(ValueError, match="prompts of 1 to 511 tokens, but got 0"):
        engine.next_token_probabilities([()], [5])


def test_the_key_is_sent_and_never_shown(
    connect: Connect, server: FakeServer, chat: ChatFormat, caplog: pytest.LogCaptureFixture
) -> None:
    engine = connect()
    server.faults.extend([status(500, f"your key is {KEY}"), status(403, json.dumps([KEY]))])
    with caplog.at_level(logging.DEBUG), pytest.raises(RequestsFailedError) as caught:
        generate(engine, requests_of(chat, 1))
    assert server.completions()[0].headers["authorization"] == f"Bearer {KEY}"
    shown = f"{caught.value!r} {engine.describe()} {engine!r} {caplog.text}"
    assert "[key]" in shown
    assert KEY not in shown
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_NAME, "another")
        with pytest.raises(ServerError, match=rf"HTTP 401: Unauthorized .*{KEY_NAME}"):
            connect().submit([])


def test_what_is_wrong_at_the_start_is_told_without_key(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    server.models = [KEY, "second"]
    with pytest.raises(ValueError, match=r"`served_model` to name a model .*It has: \[key\], second") as caught:
        connect().submit([])
    assert KEY not in str(caught.value)
    server.models = ["second", "third"]
    assert len(generate(connect(served_model="second"), requests_of(chat, 1))) == 1


def test_a_server_without_keys_needs_none(tiny_model: str, chat: ChatFormat) -> None:
    server = FakeServer(canned(chat), chat.tokenizer)
    engine = OpenAIEngine(tiny_model, base_url=server.base_url, chat=chat, api_key_env=KEY_NAME)
    assert len(generate(engine, requests_of(chat, 2))) == 2
    assert all("authorization" not in exchange.headers for exchange in server.exchanges)
    engine.close()
    server.close()


def test_an_absent_server_is_named_and_may_come_later(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    late = FakeServer(canned(chat), chat.tokenizer)
    late.close()
    engine = connect(base_url=late.base_url, max_retries=2)
    with pytest.raises(ServerError, match=rf"{late.base_url} failed: ClientConnectorError.*3 attempts"):
        engine.submit(requests_of(chat, 1))
    engine.base_url = server.base_url
    assert len(generate(engine, requests_of(chat, 1))) == 1


def test_what_a_server_cannot_do_is_found_out_at_the_start(tiny_model: str, chat: ChatFormat) -> None:
    plain = FakeServer(canned(chat), chat.tokenizer, knows_edt=False, writes_ids=False, max_model_len=None)
    settings = {"base_url": plain.base_url, "chat": chat}
    with pytest.raises(ValueError, match="`max_context` to be given"):
        OpenAIEngine(tiny_model, **settings).submit([])
    with pytest.raises(ValueError, match=r"server to know entropy-based dynamic temperature.*--logits-processors"):
        OpenAIEngine(tiny_model, **settings, max_context=300, server_edt=True).submit([])
    with pytest.raises(ValueError, match="`served_model` to be the server's name for `adapter`"):
        OpenAIEngine(tiny_model, **settings, adapter="folder")
    asking = OpenAIEngine(tiny_model, **settings, max_context=300)
    with pytest.raises(RequestsFailedError, match="is not written as an id: the server must be vLLM's own"):
        generate(asking, requests_of(chat, 1))
    (request,) = requests_of(chat, 1)
    with pytest.raises(ValueError, match=r"`edt_scale` to be None .*Set `edt_scale` to null.*--logits-processors"):
        asking.submit([replace(request, sampling=EDT)])
    with pytest.raises(ValueError, match=r"`temperature` to be 0 or at least 0\.01"):
        asking.submit([replace(request, sampling=replace(request.sampling, temperature=0.005))])
    assert asking.poll() == []
    asking.close()
    plain.close()


def test_what_does_not_fit_the_server_is_named(connect: Connect, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`max_context` to be at most 511.*512"):
        connect(max_context=512).submit([])
    other = Path(plain_copy(tiny_model, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:20]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"Expected `tokenizer` to cut .*Name the tokenizer of the model 'tiny'"):
        connect(tokenizer=str(other), chat=None).submit([])


def test_closing_ends_the_thread_with_work_in_flight(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    threads = {thread.ident for thread in threading.enumerate()}
    server.faults.append(is_silent())
    engine = connect()
    engine.submit(requests_of(chat, 3))
    wait_until(lambda: len(server.completions()) >= 1)
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
    (b"-2", b"-1" + b"0" * 400, "0 is not a log-probability"),
    (b",-2", b"", "1 log-probabilities for 2 tokens"),
    (b"token_id:5", b"Hello", "'Hello' is not written as an id"),
    (b":5", b":4000000000", "none of the vocabulary's"),
    (b'["token_id:5","token_id:6"]', b'"token_id:5"', "something else"),
    (b"]}\n", b',{"index":1}]}\n', "something else"),
    (b"null", b'"abort"', "by `stop` or `length`.*'abort'"),
]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (status(400, f"bad prompt, said {KEY}"), r"HTTP 400: bad prompt, said \[key\]$"),
        (status(307, Location="http://evil.example/"), "HTTP 307"),
        (says(b"<html>Welcome</html>"), "answer in JSON, but got '<html>Welcome</html>'"),
        (says(b'{"choices": [{"logprobs": null, "finish_reason": "stop"}]}'), "tokens and their log-probabilities"),
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
        ({"token_id:5": -1.0}, "got none for 1 of them, the first 6"),
    ],
)
def test_bad_scores_are_refused(connect: Connect, server: FakeServer, chat: ChatFormat, top: object, said: str) -> None:
    server.faults.append(scores(top))
    with pytest.raises(RequestsFailedError, match=said) as caught:
        connect().next_token_probabilities([chat.prompt_ids([Message("user", "5 + 3?")])], [5, 6])
    assert not any(failure.is_refusal for failure in caught.value.failures.values())


@pytest.mark.parametrize(
    ("faults", "options", "attempts", "said"),
    [
        ([status(500, "no room")] * 4, {"max_retries": 3}, 4, r"HTTP 500: no room \(4 attempts\)"),
        ([is_silent()], {"deadline": 0.3}, 1, "the time was up in attempt 1"),
        ([is_silent(after=EVENT)], {"deadline": 0.3}, 1, "the time was up in attempt 1"),
        ([status(429, "quota", Retry_After="3600")], {}, 1, r"HTTP 429: quota \(attempt 1; no time left to wait"),
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
    follow_samples_by(server, status(503))
    (response,) = generate(engine, requests_of(chat, 1, chat.query))
    assert response.yes_mass is not None
    assert ["stream" in exchange.body for exchange in server.completions()] == [True, False, False]


KEYS = ["choices", "logprobs", "tokens", "token_logprobs", "top_logprobs", "finish_reason", "stop_reason"]
KEYS += ["data", "id", "max_model_len", "token_id:5"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["token_id:5", "stop", -1.0, 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(reply=JSON)
def test_whatever_a_server_says_fails_one_request_at_most(reply: object) -> None:
    told = {"choices": [reply, {"logprobs": reply}, reply][:1]}
    for said in (reply, told, {"choices": [{"logprobs": reply, "finish_reason": None}]}, {"data": reply}):
        with contextlib.suppress(wire.ServerError):
            wire.SampleReader([7], max_tokens=8, vocabulary=100).take(said)
        with contextlib.suppress(wire.ServerError):
            wire.read_probabilities(said, [5])
        with contextlib.suppress(wire.ServerError, ValueError):
            wire.choose_model(said, wanted=None, default="m")


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.7:8000/v1",
        "http://0.0.0.0:8000/v1",
        "http://127.0.0.1.evil.example/v1",
        "http://localhost.evil.example/v1",
        "http://127.0.0.1@evil.example/v1",
        "http://evil.example\\@127.0.0.1/v1",
        "https://user:secret@host/v1",
        "https://host/v1?api_key=secret",
        "http://127.0.0.1:99999/v1",
        "https://[1:2]:8000/v1",
        "ftp://host/v1",
        "",
    ],
)
def test_addresses_that_could_give_the_key_away_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="Expected `base_url` to") as caught:
        check_base_url(url)
    assert "secret" not in str(caught.value)


def test_addresses_of_this_machine_over_tls_and_by_the_users_choice() -> None:
    for url in ("http://127.0.0.1:8/v1", "http://localhost/v1/", "http://[::1]:8000/v1", "https://api.example.com/v1"):
        assert check_base_url(url) == url.rstrip("/")
    assert check_base_url("http://gpu-7:8000/v1", allow_http=True) == "http://gpu-7:8000/v1"


def test_an_adapter_has_the_limit_of_its_model_and_nonsense_is_none() -> None:
    said = {"data": [{"id": "m", "max_model_len": 512}, {"id": "a", "max_model_len": None, "parent": "m"}]}
    assert wire.choose_model(said, wanted="a", default="m") == ("a", 512)
    assert wire.choose_model({"data": [{"id": "m", "max_model_len": -5}]}, wanted=None, default="m") == ("m", None)


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


def test_waits_are_what_the_server_says_or_double_up_to_a_limit() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    past = format_datetime(now - timedelta(days=1), usegmt=True)
    wanted = {"2": 2.0, "0.5": 0.5, "-3": 0.0, date: 90.0, past: 0.0}
    wanted |= dict.fromkeys([None, "soon", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "nan", "inf", ""])
    assert {value: wire.retry_after_seconds(value, now=now) for value in wanted} == wanted
    least = [wire.backoff_seconds(n, first=0.5, longest=3.0, chance=0.0) for n in range(5)]
    assert least == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert wire.backoff_seconds(5000, first=0.5, longest=3.0, chance=0.999) < 3.0


def test_jobs_that_break_in_an_unforeseen_way_are_not_lost() -> None:
    async def breaks() -> None:
        raise KeyError("a bug")

    jobs = BackgroundJobs(limit=1)
    jobs.add([(7, breaks)])
    number, result, error = jobs.take()
    assert (number, result, repr(error)) == (7, None, "KeyError('a bug')")
    jobs.close()
