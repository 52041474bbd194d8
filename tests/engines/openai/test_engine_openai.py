"""The engine over a server against a server in this process: the shared contract, and servers that misbehave."""

import asyncio
import json
import logging
import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.engine_contract import EngineContract
from support.engine_reference import EDT
from support.openai_engines import EVENT, KEY, KEY_NAME, Connect, canned, over_server, requests_of
from support.openai_models import RealModel
from support.openai_server import Exchange, FakeServer, is_silent, says, status
from support.options import nested
from support.other_models import plain_copy
from support.processes import wait_until

from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import RequestsFailedError, generate
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.openai.wire import ServerError
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message, SamplingSettings

pytestmark = pytest.mark.usefixtures("key")
COLD = SamplingSettings(temperature=0.005, edt_scale=None)


@pytest.mark.slow
class TestContract(EngineContract):
    @pytest.fixture(autouse=True, scope="class")
    def _serve(self, tiny_model: str, request: pytest.FixtureRequest) -> Iterator[None]:
        request.cls.server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model))
        yield
        request.cls.server.close()

    def make_engine(self, path: str) -> OpenAIEngine:
        return over_server(self.server.base_url, path)


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
    engine = connect()
    sampled = server._complete_sample

    async def then_score(exchange: Exchange) -> None:
        await sampled(exchange)
        server.faults.append(says(json.dumps({"choices": [{"logprobs": {"top_logprobs": [top]}}]}).encode()))

    server._complete_sample = then_score
    (response,) = generate(engine, requests_of(chat, 1, query))
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
    server.faults.extend([status(403, "not you"), says(b'{"choices": [{"logprobs": {"top_logprobs": [{}]}}]}')])
    with pytest.raises(RequestsFailedError, match=r"(?s)prompt 0 of .*not you.*prompt 1 of .*`logprob_token_ids`"):
        engine.next_token_probabilities([prompt, prompt], [5, 6])
    server.faults.append(status(400, "too hot"))
    assert engine.next_token_probabilities([prompt, prompt], [5, 6]) == [None, [pytest.approx(0.25)] * 2]
    with pytest.raises(ValueError, match="prompts of 1 to 511 tokens, but got 0"):
        engine.next_token_probabilities([()], [5])


def test_the_key_is_sent_and_never_shown(
    connect: Connect,
    server: FakeServer,
    chat: ChatFormat,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = connect()
    server.faults.extend([status(500, f"your key is {KEY}"), status(403, json.dumps([KEY]))])
    with caplog.at_level(logging.DEBUG), pytest.raises(RequestsFailedError) as caught:
        generate(engine, requests_of(chat, 1))
    assert server.completions()[0].headers["authorization"] == f"Bearer {KEY}"
    shown = f"{caught.value!r} {engine.describe()} {engine!r} {caplog.text}"
    assert "[key]" in shown
    assert KEY not in shown
    monkeypatch.setenv(KEY_NAME, "another")
    with pytest.raises(ServerError, match=rf"HTTP 401: Unauthorized .*{KEY_NAME}"):
        connect().submit([])


def test_what_is_wrong_at_the_start_is_told_without_key(connect: Connect, server: FakeServer, chat: ChatFormat) -> None:
    server.models = [KEY, "second"]
    with pytest.raises(ValueError, match=r"`served_model` to name a model .*It has: \[key\], second") as caught:
        connect().submit([])
    assert KEY not in str(caught.value)
    server.models = ["second", "third"]
    assert len(generate(connect(served_model="second"), requests_of(chat, 1))) == 1


def test_a_server_without_keys_needs_none(tiny_model: str, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_NAME)
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
    for _ in range(2):
        with pytest.raises(ServerError, match=rf"{late.base_url} failed: ClientConnectorError.*3 attempts"):
            engine.submit(requests_of(chat, 1))
    engine.base_url = server.base_url
    assert len(generate(engine, requests_of(chat, 1))) == 1


def test_what_a_server_cannot_do_is_found_out_at_the_start(tiny_model: str, chat: ChatFormat) -> None:
    def engine(server: FakeServer, **options: object) -> OpenAIEngine:
        return OpenAIEngine(tiny_model, base_url=server.base_url, chat=chat, api_key_env=KEY_NAME, **options)

    plain = FakeServer(canned(chat), chat.tokenizer, knows_edt=False, writes_ids=False, max_model_len=None)
    with pytest.raises(ValueError, match="`max_context` to be given"):
        engine(plain).submit([])
    with pytest.raises(ValueError, match=r"server to know entropy-based dynamic temperature.*--logits-processors"):
        engine(plain, max_context=300, server_edt=True).submit([])
    asking = engine(plain, max_context=300)
    with pytest.raises(RequestsFailedError, match="is not written as an id: the server must be vLLM's own"):
        generate(asking, requests_of(chat, 1))
    with pytest.raises(ValueError, match=r"`edt_scale` to be None .*Set `edt_scale` to null.*--logits-processors"):
        asking.submit([replace(request, sampling=EDT) for request in requests_of(chat, 1)])
    with pytest.raises(ValueError, match=r"`temperature` to be 0 or at least 0\.01"):
        asking.submit([replace(request, sampling=COLD) for request in requests_of(chat, 1)])
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
