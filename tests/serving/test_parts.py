import asyncio
import json
import math
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support.driver_fakes import live
from support.fakes import FakeChat, FakeEngine, FakeTask, fake_questions
from support.openai_server import Exchange, FakeServer, canned, connecting, is_silent
from support.processes import files_of_at_most, free_port, run_python
from support.strategy_pools import drive

from selfcal_lightning.commands import serve
from selfcal_lightning.commands.fit_confidence import run_fit_confidence
from selfcal_lightning.commands.serve import run_batch, run_serve
from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.features import ConfidenceScores
from selfcal_lightning.confidence.fusion import scorer_digests
from selfcal_lightning.confidence.scaling import PlattMap, Scaler
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.core.errors import InputError, MissingPackageError, RunError
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.openai.wire import ServerError
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference import chat_source, choices
from selfcal_lightning.inference.driver import Driver
from selfcal_lightning.inference.sources import Draws, EngineSource, Waste
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.metrics.calibration import brier_score
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, Sample, SamplingSettings, Verdict
from selfcal_lightning.serving import running
from selfcal_lightning.serving.app import Service
from selfcal_lightning.serving.batch import run_requests
from selfcal_lightning.serving.bodies import ChatBody, Refused, Turn, read_body, split_name
from selfcal_lightning.serving.desk import Desk, Job, Reader
from selfcal_lightning.serving.feedback import Feedback, from_labels
from selfcal_lightning.serving.replies import Calibration
from selfcal_lightning.serving.settings import Limits, ServiceSettings

CALL = '<tool_call>\n{"name": "f", "arguments": {"b": 1, "a": [2]}}\n</tool_call>'
NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000


def test_free_chat_is_read_as_canonical_text_or_calls() -> None:
    reader, tooled = Reader(), Reader(has_tools=True)
    assert reader.extract("  Yes,\n it IS") == "yes, it is"
    assert reader.extract(" ") is None
    assert tooled.extract(f"I call. {CALL}") == '[{"arguments": {"a": [2], "b": 1}, "name": "f"}]'
    assert reader.extract(CALL) == " ".join(CALL.casefold().split())
    assert tooled.tool_calls(CALL.replace("1,", "1")) == []
    number = Reader(get_task("local_number"))
    assert number.extract("The answer is 12.") == "12"
    assert number.group(["12", "12.0"]) == ["12", "12"]


def test_earlier_calls_are_put_as_models_write_them() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    message = Turn(role="assistant", tool_calls=[call]).as_message()
    assert message.content == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    message = Turn(role="assistant", content="\n\ncode:\n", tool_calls=[call]).as_message()
    assert message.content.startswith("\n\ncode:\n\n<tool_call>"), "what a client sends is read as it is"
    for arguments in ("{", NESTED):
        with pytest.raises(Refused, match="tool_calls"):
            Turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": arguments}}]).as_message()


@pytest.mark.parametrize(
    ("arguments", "usage"), [("{}", {"prompt_tokens": math.inf}), (NESTED, {}), ("{}", {"prompt_tokens": "many"})]
)
def test_an_answer_that_cannot_be_read_is_the_servers_fault(arguments: str, usage: dict) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ServerError, match="a completion"):
        chat_source._read({"choices": [{"message": {"content": "", "tool_calls": [call]}}], "usage": usage})


def test_a_stop_cuts_the_text_of_a_closed_server_but_no_call() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}
    message = {"content": "a\nb", "tool_calls": [call]}
    rows = {"content": [{"logprob": -1.0}]}
    found = chat_source._read({"choices": [{"message": message, "finish_reason": "length", "logprobs": rows}]}, ["\n"])
    assert (found.text, found.finish, found.logprob) == (f"a{chat_source.written_call(call)}", "stop", -1.0)
    found.text.encode()


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_is_unknown(value: float) -> None:
    rows = {"content": [{"logprob": value}]}
    found = chat_source._read({"choices": [{"message": {"content": "a"}, "logprobs": rows}]})
    assert (found.text, found.logprob) == ("a", None)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", None, 200),
        ("[::1]:8000", "http://localhost:3000", 200),
        ("evil.example", None, 403),
        ("localhost", "https://evil.example", 403),
        ("localhost", "null", 403),
        ("[::1", None, 403),
    ],
)
def test_without_a_key_pages_in_a_browser_are_refused(host: str, origin: str | None, status: int) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})

    async def answer(request: Any) -> Any:
        return SimpleNamespace(status_code=200)

    response = asyncio.run(service()._guarded("/v1/models", answer)(SimpleNamespace(headers=headers)))
    assert response.status_code == status


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "local_nmber"}, "local_nmber"),
        ({"output": "in.jsonl"}, "another file than `input`"),
        ({"name": "m@2"}, "without @"),
        ({"scorers": "other.json"}, "verbalized"),
        ({"threshold_file": "risk.json", "limits": Limits(max_samples=1)}, r"limits\.max_samples.*at least 2"),
    ],
)
def test_a_batch_that_could_answer_nothing_is_refused_at_once(here: Path, options: dict[str, Any], said: str) -> None:
    Path("in.jsonl").write_text('{"custom_id": "a"}')
    none = ConfidenceScores("other", None, None, None, 0, 0, 0)
    fitted = PlattMap(1.0, 0.0, takes_logit=True), False, guaranteed().fitted_on, none, none
    Scaler("other", "verbalized", *fitted).save("other.json")
    guaranteed().save(Path("risk.json"))
    with pytest.raises(InputError, match=said):
        run_batch("bundled", "in.jsonl", **{"output": "out.jsonl", **options})
    assert Path("in.jsonl").read_text() == '{"custom_id": "a"}'


def test_a_model_in_this_folder_has_its_name(here: Path) -> None:
    assert ServiceSettings(".").served_name == here.name


@pytest.mark.parametrize(("port", "said"), [(99_999, "port"), (0, "port"), (None, "listen")])
def test_a_port_that_cannot_be_had_is_told_before_the_model_is_loaded(port: int | None, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match=said):
        run_serve("bundled", port=taken.getsockname()[1] if port is None else port)


def test_while_loading_a_reload_ends_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def load(*args: Any, **options: Any) -> Any:
        assert callable(signal.getsignal(signal.SIGHUP))  # else it would end the tests
        signal.raise_signal(signal.SIGHUP)
        return SimpleNamespace(model="m")

    monkeypatch.setattr(serve, "open_service", load)
    monkeypatch.setattr(running, "serve", lambda *args, **options: None)
    before, port = signal.getsignal(signal.SIGHUP), free_port()
    try:
        run_serve("bundled", host="::1", port=port)
    finally:
        signal.signal(signal.SIGHUP, before)
    said = capsys.readouterr().err
    assert "SIGHUP" in said
    assert f"http://[::1]:{port}/v1" in said


def test_a_refitted_scorer_is_not_loaded_under_a_former_threshold(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, found in (("load_chat", FakeChat()), ("open_engine", FakeEngine()), ("store_fingerprint", None)):
        monkeypatch.setattr(serve, name, lambda *args, found=found, **options: found)
    monkeypatch.setattr(choices, "check_sampled_alike", lambda *args: None)
    scores, on = ConfidenceScores("calm", 0.5, 0.5, 0.0, 1, 4, 0), guaranteed().fitted_on
    scaler = Scaler("calm", "p_true", PlattMap(1.0, 0.0, takes_logit=True), False, on, scores, scores)
    fields = {**guaranteed().fields, "confidence": "calm"}
    replace(guaranteed(), fields=fields, scorers=scorer_digests("calm", [scaler])).save(Path("risk.json"))
    Path("feedback").mkdir()
    scaler.save("feedback/calm.json")
    server = serve.open_service(ServiceSettings("bundled", threshold_file="risk.json"), folder=Path("feedback"))
    replace(scaler, map=PlattMap(2.0, 0.0, takes_logit=True)).save("feedback/calm.json")
    asyncio.run(server.reload())
    assert make_job(server, {"model": "bundled", "messages": MESSAGES}).fitted is not None
    asyncio.run(server.desk.close(0.0))


def test_a_server_behind_gets_no_more_time_than_a_question(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[EngineOptions] = []
    engine = lambda options, *args, **named: opened.append(options) or FakeEngine()  # noqa: E731
    for name, make in (("load_chat", lambda *args, **options: FakeChat()), ("open_engine", engine)):
        monkeypatch.setattr(serve, name, make)
    shown = chat_source.Capabilities(ids=True, logprobs=True, n=True)
    monkeypatch.setattr(chat_source, "served_model", lambda *args: (None, shown))
    for given in ({}, {"deadline": 5.0}):
        options = EngineOptions("openai", engine_args=given)
        server = serve.open_service(ServiceSettings("bundled", engine=options, limits=Limits(deadline_s=7.0)))
        asyncio.run(server.desk.close(0.0))
    assert [options.engine_args["deadline"] for options in opened] == [7.0, 5.0]


def test_a_batch_whose_engine_died_writes_no_answer_for_it(tmp_path: Path) -> None:
    target, body = tmp_path / "out.jsonl", {"model": "m", "messages": MESSAGES}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    server = service()
    server.desk.source.target = 1

    async def refuse(*args: Any, **options: Any) -> None:
        server.desk.died = RuntimeError("gone")
        raise Refused(503, "The engine has stopped.")

    async def close(patience: float) -> None:
        pass

    server.desk.begin, server.desk.close = refuse, close
    with target.open("wb") as file, pytest.raises(RunError, match="gone"):
        asyncio.run(run_requests(server, {"a": line}, file, set(), 0))
    assert target.read_text() == ""


def test_a_batch_names_a_fault_of_ours_and_not_its_text(tmp_path: Path) -> None:
    async def fail(*args: Any) -> None:
        raise ValueError("Bearer key")

    server = over_source(draw_nothing)
    server.desk.begin = fail
    line = {"method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": MESSAGES}}
    with (tmp_path / "out.jsonl").open("wb") as file:
        asyncio.run(run_requests(server, {"a": line}, file, set(), 0))
    answer = json.loads((tmp_path / "out.jsonl").read_text())["response"]
    message = answer["body"]["error"]["message"]
    assert (answer["status_code"], message) == (500, "ValueError, whose traceback was printed.")


def test_a_torn_label_is_cut_off_and_the_metrics_read_what_clients_were_told(tmp_path: Path) -> None:
    feedback = Feedback(tmp_path)
    for name, told in (("a", 0.9), ("b", 0.3)):
        feedback.remember(name, "?", Sample(name, 0, 0, "4", (1,), "stop", "4", None), told=told)
        feedback.label(name, correct=name == "a")
    assert from_labels(feedback, brier_score) == pytest.approx((0.1**2 + 0.3**2) / 2)
    with pytest.raises(RunError, match="Another process"):
        Feedback(tmp_path)
    feedback.file.close()
    with open(tmp_path / "labels.jsonl", "a") as file:
        file.write('{"id": "c", "resp')
    again = Feedback(tmp_path)
    assert again.labelled == {"a": (0.9, True), "b": (0.3, False)}


def test_a_label_that_the_disk_has_no_room_for_can_be_sent_again(tmp_path: Path) -> None:
    feedback = Feedback(tmp_path)
    for name in ("a", "b"):
        feedback.remember(name, "?", Sample(name, 0, 0, "4", (1,), "stop", "4", None), told=0.9)
    feedback.label("a", correct=True)
    whole = (tmp_path / "labels.jsonl").read_bytes()
    with files_of_at_most(len(whole) + 20), pytest.raises(OSError, match="File too large"):
        feedback.label("b", correct=True)
    assert (tmp_path / "labels.jsonl").read_bytes() == whole
    feedback.label("b", correct=False)
    feedback.file.close()
    assert Feedback(tmp_path).labelled == {"a": (0.9, True), "b": (0.9, False)}


def test_labels_of_counted_votes_and_of_others_lie_in_one_pool(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    feedback = Feedback(tmp_path)
    for i in range(24):
        kept = {"stated" if i % 3 else "vote_share": i / 30}
        feedback.remember(f"a{i}", "?", Sample("", 0, 0, "4", (1,), "stop", "4", None, confidences=kept), told=i / 30)
        feedback.label(f"a{i}", correct=i % 4 > 1)
    for source, found in (("stated", 16), ("vote_share", 8)):
        fitted = run_fit_confidence(
            str(feedback.path), str(tmp_path / f"{source}.json"), kind="platt", source=source, use_all=True
        )
        assert fitted.fitted_on.num_questions == found
        printed = capsys.readouterr()
        assert f"{24 - found} answers without the confidence {source!r}" in printed.err
        assert ("`selfcal serve` has cocoa and vote_share" in printed.out) == (source == "vote_share")


def test_a_fault_of_ours_is_one_requests_own(caplog: pytest.LogCaptureFixture) -> None:
    server, request = service(), SimpleNamespace(headers={})

    async def fail(request: Any) -> Any:
        raise ZeroDivisionError

    response = asyncio.run(server._guarded("/v1/models", fail)(request))
    assert (response.status_code, b"server_error" in response.body) == (500, True)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("wanted", "found"), [(None, 2), (1, 1), (9, 2)])
def test_fewer_samples_keep_the_fitted_strategy(wanted: int | None, found: int) -> None:
    server = service(guaranteed())
    body = read_body(ChatBody, {"model": "m", "messages": MESSAGES, "selfcal": {"max_samples": wanted}})
    strategy, fitted = server.strategy_for(body, server.sampling)
    assert (strategy.name, strategy.max_samples, fitted is None) == ("early_stopping", found, found == 1)


def draw_four(question: Question, stops: tuple[str, ...]) -> tuple[list[Sample], int]:
    """Return four samples of a question that are drawn to their ends, and the tokens that stops threw away."""
    chat, sampling = FakeChat(), SamplingSettings(max_new_tokens=64)
    source = EngineSource(
        FakeEngine(slots=2), chat, sampling=sampling, tasks=lambda name: FakeTask(),
        draws=lambda one: Draws(chat.prompt_ids(one.messages), sampling, 0, one.id, stops=stops, to_the_end=True),
    )  # fmt: skip
    source.prepare([question], confidence="p_true")
    source.submit(question.id, 4)
    found: list[Sample] = []
    while len(found) < 4:
        found += source.poll()
    return found, source.cancel([question.id])[question.id].tokens or 0


def test_a_stop_keeps_the_mean_log_probability_and_counts_what_it_throws_away() -> None:
    (question,) = fake_questions(1)
    (whole, nothing), (cut, thrown) = draw_four(question, ()), draw_four(question, (" answer",))
    for before, after in zip(whole, cut, strict=True):
        assert after.text == before.text.partition(" answer")[0]
        assert confidence_of(after, "mean_logprob") == pytest.approx(confidence_of(before, "mean_logprob"))
    lengths = [sum(sample.num_tokens or 0 for sample in samples) for samples in (whole, cut)]
    assert (nothing, thrown) == (0, lengths[0] - lengths[1])


def test_a_strategy_may_weigh_by_what_samples_carry_anyway() -> None:
    server = service()
    body = read_body(ChatBody, {"model": "m@standardised", "messages": MESSAGES})
    with pytest.raises(Refused, match="no confidence"):
        server.strategy_for(body, server.sampling)
    server.desk.engine = object()
    assert server.strategy_for(body, server.sampling)[0].confidence == "mean_logprob"


def test_bodies_and_names_that_are_none_are_refused() -> None:
    for content in (b"{", b"[]", b"\xff", b"{}", b'{"model": 1, "messages": [{}]}'):
        with pytest.raises(Refused):
            read_body(ChatBody, content)
    for name in ("m@s:2", "m@s:nan", "m@s:x"):
        with pytest.raises(Refused, match="threshold"):
            split_name(name)
    with pytest.raises(InputError, match="max_tokens_in_all"):
        Limits(max_tokens_in_all=0)


def test_a_question_that_is_concluded_ends_with_what_had_come() -> None:
    (question, other), engine = fake_questions(2), FakeEngine(slots=6)
    found: list[Verdict] = []
    with Driver(SelfConsistency(max_samples=12), live(engine, target=24)) as driver:
        driver.add(question, other)
        driver.work()
        arrived = len(driver._open[question.id].arrived.get(driver._open[question.id].ask.kind, ()))
        assert 0 < arrived < 12
        driver.conclude(question.id, "unknown")
        while not driver.is_idle:
            found += driver.work()
    verdicts = {verdict.question_id: verdict for verdict in found}
    assert arrived <= verdicts[question.id].samples_used < 12
    assert verdicts[question.id].samples_generated <= 12
    assert verdicts[other.id].samples_used == 12
    assert not engine._waiting


def test_a_question_that_is_given_up_tells_what_it_had_cost() -> None:
    (question,), engine = fake_questions(1), FakeEngine(slots=6)
    with Driver(SelfConsistency(max_samples=12), live(engine, target=12)) as driver:
        driver.add(question)
        driver.work()
        waste = driver.cancel(question.id, "unknown")
    assert list(waste) == [question.id]
    assert waste[question.id].tokens > 0
    assert driver.is_idle


MESSAGES = [{"role": "user", "content": "?"}]


def service(fitted: FittedThreshold | None = None) -> Service:
    """Return a server whose desk has no engine."""
    source = SimpleNamespace(scorers=())
    desk: Any = SimpleNamespace(jobs={}, cancelled_tokens=0, confidence="p_true", engine=None, chat=None, source=source)
    sampling = SamplingSettings(edt_scale=None)
    return Service(ServiceSettings("m"), desk, sampling=sampling, feedback=Feedback(None), fitted=fitted)


@contextmanager
def over_upstream(upstream: FakeServer, faults: list, tiny_model: str, chat: ChatFormat, **limits: Any) -> Iterator:
    """Make a server before a server that has these faults, in this process."""
    sampling = SamplingSettings(edt_scale=None, max_new_tokens=20)
    with connecting(upstream, tiny_model, chat) as connect:
        engine = connect()
        engine.submit([])  # it has looked at the server
        upstream.faults.extend(faults)
        source = partial(EngineSource, engine, chat, sampling=sampling)
        desk = Desk(source, engine=engine, chat=chat, confidence="p_true")
        yield Service(ServiceSettings("m", limits=Limits(**limits)), desk, sampling=sampling, feedback=Feedback(None))
        asyncio.run(desk.close(0.0))
    upstream.close()


READ = {"/v1/confidence": {"messages": [{"role": "user", "content": "?"}], "response": "4"},
        "/v1/systemone": {"state": "?", "questions": {"n": {"type": "noul"}, "o": {"type": "noul"}}}}  # fmt: skip


@pytest.mark.parametrize("path", READ)
def test_reading_at_a_server_that_hangs_delays_no_question(chat: ChatFormat, tiny_model: str, path: str) -> None:
    upstream = FakeServer(canned(chat), chat.tokenizer)

    async def ask(server: Service) -> tuple[int, bool, int]:
        async with client_of(server) as client:
            reading = asyncio.create_task(client.post(path, json=READ[path]))
            while not upstream.completions() and not reading.done():
                await asyncio.sleep(0.01)
            asked = {"model": "m", "messages": MESSAGES, "selfcal": {"max_samples": 1}}
            answer = await client.post("/v1/chat/completions", json=asked)
            return answer.status_code, reading.done(), (await reading).status_code

    with over_upstream(upstream, [is_silent()], tiny_model, chat, deadline_s=2.0) as server:
        assert asyncio.run(ask(server)) == (200, False, 504)  # answered while the other still waited
        assert server.desk.load == 0


def test_a_stream_whose_client_is_gone_before_it_begins_is_cancelled(chat: ChatFormat, tiny_model: str) -> None:
    body = json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()
    head = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [(b"host", b"localhost")]}

    async def ask(server: Service) -> int:
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pass

        await server.app()(head, receive, send)
        await server.desk.do(lambda: None)
        return server.desk.load

    with over_upstream(FakeServer(canned(chat), chat.tokenizer), [is_silent()], tiny_model, chat) as server:
        assert asyncio.run(ask(server)) == 0


def over_source(poll: Callable[[], list[Sample]]) -> Service:
    """Return a server whose desk draws from a source without an engine."""
    numbers: dict[str, Any] = {"scorers": (), "query_tokens": 0, "in_flight": 0, "target": 1, "prompt_tokens": {}}
    source = SimpleNamespace(**numbers, poll=poll, close=lambda: None, submit=lambda *args: None)
    source.prepare = lambda *args, **options: None
    source.conclude = source.drawn_so_far = lambda name: []
    source.cancel = lambda names: dict.fromkeys(names, Waste())
    desk = Desk(lambda **options: source, confidence="p_true")
    return Service(ServiceSettings("m"), desk, sampling=SamplingSettings(edt_scale=None), feedback=Feedback(None))


def draw_nothing() -> list[Sample]:
    time.sleep(0.01)
    return []


def test_an_engine_that_hangs_does_not_keep_the_process() -> None:
    code = """
        import asyncio, contextlib, threading, types
        from selfcal_lightning.serving.desk import Desk

        async def ask():
            source = types.SimpleNamespace(in_flight=0, target=0, query_tokens=0)
            desk = Desk(lambda **options: source, engine=object(), confidence="p_true")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(desk.do(threading.Event().wait), 0.1)

        asyncio.run(ask())
    """
    run_python(textwrap.dedent(code), timeout=60)


def test_who_waits_for_an_engine_that_dies_is_told_so() -> None:
    def die() -> list[Sample]:
        time.sleep(0.5)
        raise ZeroDivisionError

    async def ask(server: Service) -> list[tuple[int, bool]]:
        async with client_of(server) as client:

            async def post() -> tuple[int, bool]:
                answer = await client.post("/v1/chat/completions", json={"model": "m", "messages": MESSAGES})
                return answer.status_code, "engine has stopped" in answer.text

            first = asyncio.create_task(post())
            await asyncio.sleep(0.25)
            return [*await asyncio.gather(*(post() for _ in range(3))), await first]

    server = over_source(die)
    assert asyncio.run(ask(server)) == [(503, True)] * 4
    assert server.desk.load == 0


def test_a_deadline_comes_among_many_readings() -> None:
    async def ask(server: Service) -> bool:
        async with client_of(server) as client:
            asked = {"model": "m", "messages": MESSAGES, "selfcal": {"deadline_s": 0.1}}
            answer = asyncio.create_task(client.post("/v1/chat/completions", json=asked))
            await asyncio.sleep(0.05)
            readings = asyncio.gather(*(server.desk.do(partial(time.sleep, 0.05)) for _ in range(40)))
            assert (await answer).status_code == 504
            found = readings.done()
            await readings
            return found

    assert not asyncio.run(ask(over_source(draw_nothing)))


def test_a_stream_that_fails_before_its_first_text_says_only_that() -> None:
    async def ask(server: Service) -> list[str]:
        async with client_of(server) as client:
            asked = {"model": "m", "messages": MESSAGES, "stream": True, "selfcal": {"deadline_s": 0.1}}
            lines = (await client.post("/v1/chat/completions", json=asked)).text.splitlines()
            return [line[:14] for line in lines if line.startswith("data: ")]

    assert asyncio.run(ask(over_source(draw_nothing))) == ['data: {"error"', "data: [DONE]"]


def client_of(server: Service) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server.app()), base_url="http://localhost")


def test_a_body_and_the_end_may_be_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    server = service()
    server.limits, server.desk.died = Limits(max_body_mb=math.inf, stop_s=math.inf), None

    async def ask() -> int:
        async with client_of(server) as client:
            return (await client.post("/v1/feedback", json={"request_id": "none", "correct": True})).status_code

    assert asyncio.run(ask()) == 404
    monkeypatch.setattr("uvicorn.Server.run", lambda self: None)
    running.serve(server, host="127.0.0.1", port=free_port())


def test_readings_count_at_once_and_are_answered_before_the_end(chat: ChatFormat, tiny_model: str) -> None:
    upstream = FakeServer(canned(chat), chat.tokenizer)

    async def wait(exchange: Exchange) -> None:
        await asyncio.sleep(0.5)
        await upstream._complete(exchange)

    async def ask(server: Service) -> list[int]:
        async with client_of(server) as client:
            path = "/v1/systemone"
            both = asyncio.gather(*(client.post(path, json=READ[path]) for _ in range(2)))
            while not upstream.completions() and not both.done():
                await asyncio.sleep(0.01)
            await server.desk.close(10.0)
            return [response.status_code for response in await both]

    with over_upstream(upstream, [wait], tiny_model, chat, max_queue=1) as server:
        assert asyncio.run(ask(server)) == [200, 429]


def test_the_query_of_a_response_that_a_stop_ended_delays_no_other_question(chat: ChatFormat, tiny_model: str) -> None:
    upstream = FakeServer(canned(chat), chat.tokenizer)

    async def hang_at_the_query(exchange: Exchange) -> None:
        if "logprob_token_ids" in exchange.body and chat.response_ids("8")[0] not in exchange.body["prompt"]:
            await asyncio.Event().wait()
        await upstream._complete(exchange)

    async def ask(server: Service) -> list[Any]:
        asked = {"model": "m", "messages": MESSAGES, "selfcal": {"strategy": "early_stopping", "max_samples": 1}}
        async with client_of(server) as client:
            waits = asyncio.create_task(client.post("/v1/chat/completions", json=asked | {"stop": " 8"}))
            while len(upstream.completions()) < 2:
                await asyncio.sleep(0.01)
            whole = await client.post("/v1/chat/completions", json=asked)
            return [whole.json(), waits.done(), (await waits).json()]

    with over_upstream(upstream, [hang_at_the_query] * 4, tiny_model, chat, deadline_s=2.0) as server:
        whole, was_done, cut = asyncio.run(ask(server))
        assert server.desk.load == 0
    said = [answer["choices"][0]["message"]["content"] for answer in (whole, cut)]
    assert (said, was_done) == (["The answer is 8.", "The answer is"], False)
    assert whole["selfcal"]["confidence"] is not None
    assert (cut["selfcal"]["confidence"], cut["selfcal"]["stop_reason"]) == (None, "deadline")


@pytest.mark.parametrize(("path", "turns"), zip(READ, (1, 2), strict=True))
def test_a_reading_takes_the_thread_once_a_question(chat: ChatFormat, tiny_model: str, path: str, turns: int) -> None:
    upstream, waits = FakeServer(canned(chat), chat.tokenizer), []

    async def ask(server: Service) -> int:
        do = server.desk.do
        server.desk.do = lambda work: waits.append(work) or do(work)
        async with client_of(server) as client:
            return (await client.post(path, json=READ[path])).status_code

    with over_upstream(upstream, [], tiny_model, chat) as server:
        assert (asyncio.run(ask(server)), len(waits)) == (200, turns)


def make_job(server: Service, asked: dict[str, Any]) -> Job:
    async def make() -> Job:
        return server.make_job(read_body(ChatBody, asked))

    return asyncio.run(make())


def reply_to(server: Service, job: Job, verdict: Verdict, samples: Iterable[Sample], reason: str) -> dict[str, Any]:
    job.verdict, job.samples, job.stop_reason = verdict, tuple(samples), reason
    return server.reply(job)


def sampled(job: Job, rows: Iterable[tuple[str, float]]) -> tuple[Sample, ...]:
    """Return samples of these texts and P(True)."""
    return tuple(
        Sample(job.id, i, 0, text, (1,), "stop", job.reader.extract(text), None, yes_mass=mass, no_mass=1.0 - mass)
        for i, (text, mass) in enumerate(rows)
    )


def guaranteed() -> FittedThreshold:
    fields = {"threshold": 0.9, "max_samples": 2, "confidence": "p_true", "fallback": "weighted_vote"}
    return FittedThreshold(
        "risk", "early_stopping", fields, None, 0.8, "risk", 0.1, 0.05, 2, {},
        FittedOn.from_questions(["a"], num_responses=2), {}, "",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "options", "holds"),
    [
        ({}, {}, True),
        ({}, {"max_error_rate": 0.1, "on_low": "abstain"}, True),
        ({"temperature": 0.3}, {}, False),
        ({"temperature": 0}, {}, False),
        ({"max_tokens": 5}, {}, False),
        ({"stop": "\n"}, {}, False),
        ({}, {"max_samples": 1}, False),
        ({}, {"max_tokens_in_all": 5}, False),
        ({}, {"task": "local_text"}, False),
        ({"stop": ""}, {}, True),
        ({}, {"strategy": "self_consistency"}, False),
    ],
)
def test_a_guarantee_is_given_only_for_what_it_was_fitted_on(fields: dict, options: dict, holds: bool) -> None:
    server = service(guaranteed())

    def ask(yes_mass: float) -> dict[str, Any]:
        job = make_job(server, {"model": "m", "messages": MESSAGES, "selfcal": options, **fields})
        verdict = Verdict(job.id, "4", yes_mass, None, 1, stopped_early=True)
        return reply_to(server, job, verdict, sampled(job, [("4", yes_mass)]), "early")

    sure, unsure = ask(0.85), ask(0.7)
    assert (sure["selfcal"]["guarantee"] is not None) == holds
    assert unsure["selfcal"]["guarantee"] is None
    given = None if "on_low" in options else "4"
    assert (unsure["choices"][0]["message"]["content"], unsure["selfcal"]["answer"]) == (given, given)


def test_a_label_keeps_cocoa_which_a_scaler_turns_into_the_confidence() -> None:
    """Mean log-probability -.5, times the half of the others that answer something else."""
    server = service()
    asked = {"model": "m", "messages": MESSAGES, "selfcal": {"strategy": "self_consistency", "max_samples": 3}}

    def ask() -> dict[str, Any]:
        job = make_job(server, asked)
        rows = enumerate(("4", "5", "4"))
        samples = tuple(Sample(job.id, i, 0, text, (1, 2), "stop", text, None, logprob=-1.0) for i, text in rows)
        return reply_to(server, job, Verdict(job.id, "4", 2 / 3, None, 3, stopped_early=False), samples, "budget")

    found = [ask() for _ in range(4)]
    assert [(one["selfcal"]["cocoa"], one["selfcal"]["source"]) for one in found] == [(-0.25, "vote_share")] * 4
    (kept,) = server.feedback.answers[found[0]["id"]]["responses"]
    assert kept["confidence"]["cocoa"] == -0.25
    scores = ConfidenceScores("calm", 0.5, 0.5, 0.0, 1, 4, 0)
    fitted = True, FittedOn.from_questions(["a"], num_responses=4), scores, scores
    scaler = Scaler("calm", "cocoa", PlattMap(4.0, 1.0, takes_logit=False), *fitted)
    server.calibration = Calibration((scaler,))
    scaled = ask()["selfcal"]
    assert (scaled["confidence"], scaled["source"], scaled["raw_confidence"]) == (0.5, "calm", 2 / 3)
    assert kept["confidence"]["vote_share"] == 2 / 3
    for source, applied in (("vote_share", True), ("stated", False)):  # fitted on the confidence of one response
        server.calibration = Calibration((replace(scaler, source=source),))
        assert (ask()["selfcal"]["source"] == "calm") == applied


@pytest.mark.parametrize(
    ("strategy", "stated", "calibrated"),
    [("early_stopping", 0.9, True), ("best_of_n", 0.9, True), ("cisc", 0.6, False)],
)
def test_a_share_of_weighted_votes_is_not_called_calibrated(strategy: str, stated: float, calibrated: bool) -> None:
    server = service()
    server.calibration = Calibration(manifest={"metrics": {}})
    job = make_job(server, {"model": f"m@{strategy}", "messages": MESSAGES})
    verdict = Verdict(job.id, "4", stated, None, 2, stopped_early=False)
    found = reply_to(server, job, verdict, sampled(job, [("4", 0.9), ("5", 0.3)]), "budget")["selfcal"]
    assert (found["confidence"], found["source"], found["calibrated"]) == (stated, "p_true", calibrated)


@pytest.mark.parametrize(("entropy", "withheld"), [(0.2, False), (0.75, False), (0.8, True)])
def test_an_entropy_that_fell_to_the_threshold_is_not_withheld(entropy: float, withheld: bool) -> None:
    server = service()
    args = {"criterion": "entropy", "threshold": 0.75}
    server.settings = replace(server.settings, strategy="adaptive_consistency", strategy_args=args)
    job = make_job(server, {"model": "m", "messages": MESSAGES, "selfcal": {"on_low": "abstain"}})
    samples = tuple(Sample(job.id, i, 0, "4", (1,), "stop", "4", None) for i in range(2))
    verdict = Verdict(job.id, "4", 1.0 - entropy, None, 2, stopped_early=not withheld)
    assert reply_to(server, job, verdict, samples, "early")["selfcal"]["abstained"] == withheld


def test_with_a_seed_a_batch_draws_the_samples_that_the_server_draws() -> None:
    server, asked = service(), {"model": "m", "messages": MESSAGES}

    async def key(name: str, **fields: Any) -> str:
        return server.make_job(read_body(ChatBody, asked | fields), name=name, key=name).draws.key

    seeded, others = [asyncio.run(key(name, seed=3)) for name in "ab"], [asyncio.run(key(name)) for name in "ab"]
    assert seeded == [make_job(server, asked | {"seed": 3}).draws.key] * 2
    assert others == ["a", "b"]


@pytest.mark.parametrize(
    ("texts", "given"),
    [
        (["a", "b", "c"], ("b", 0.9, "p_true", "confidence")),  # nothing agrees
        (["a", " ", "c"], ("a", 0.5, "p_true", "confidence")),  # what cannot be read agrees with nothing
        (["a", "b", " A"], ("a", pytest.approx(2 / 3), "vote_share", "strategy")),
    ],
)
def test_free_chat_gives_the_most_agreed_text_or_else_the_surest(texts: list[str], given: tuple) -> None:
    server = service()
    asked = {"model": "m", "messages": MESSAGES, "selfcal": {"strategy": "self_consistency", "max_samples": 3}}
    job = make_job(server, asked)
    samples = sampled(job, zip(texts, (0.5, 0.9, 0.2), strict=True))
    verdict = drive(SelfConsistency(max_samples=3), Question(job.id, job.id, ()), lambda ask: list(samples))
    reply = reply_to(server, job, verdict, samples, "budget")
    said = [reply["selfcal"][name] for name in ("confidence", "source", "chosen_by")]
    assert (reply["choices"][0]["message"]["content"], *said) == given


@pytest.mark.parametrize("change", [{"temperature": 0.3}, {"selfcal": {"max_error_rate": 0.05}}, {"model": "m@cges"}])
def test_an_error_rate_that_cannot_be_guaranteed_is_refused(change: dict) -> None:
    asked = {"model": "m", "messages": MESSAGES, "selfcal": {"max_error_rate": 0.2}}
    with pytest.raises(Refused, match="guarantee"):
        make_job(service(guaranteed()), asked | change)


@pytest.mark.parametrize(
    ("fields", "streams"),
    [
        ({}, True),
        ({"stream": False}, False),
        ({"selfcal": {"max_samples": 2}}, False),
        ({"selfcal": {"max_samples": 1, "on_low": "abstain"}}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, True),
    ],
)
def test_tokens_are_passed_on_only_where_the_answer_cannot_change(fields: dict, streams: bool) -> None:
    asked = {"model": "m", "messages": MESSAGES, "stream": True, "selfcal": {"max_samples": 1}}
    assert make_job(service(), asked | fields).streams == streams


def test_without_the_extra_both_verbs_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)
    for verb, given in ((run_serve, ("bundled",)), (run_batch, ("bundled", "in", "out"))):
        with pytest.raises(MissingPackageError, match=r"starlette.*\[serve\]"):
            verb(*given)
