import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.serving import Server

pytestmark = pytest.mark.slow


class Upstream(BaseHTTPRequestHandler):
    """Answers 4 and 5 in turn, states .8 of each, and does what a question says it shall."""

    protocol_version = "HTTP/1.1"
    counts: dict[str, int] = {}  # noqa: RUF012
    bodies: list[dict[str, Any]] = []  # noqa: RUF012

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or "logprobs" in body or "n" in body:
            return self.reply(500 if "n" in body else 501, {"error": {"message": "not here"}})
        self.bodies.append(body)
        first, last = body["messages"][0]["content"], body["messages"][-1]["content"]
        last = first if "stop" in body else last  # the question, not the one about its response
        number = self.counts[first] = self.counts.get(first, 0) + 1
        if first == "500" or (first == "half of them" and number == 1):
            return self.reply(500, {"error": {"message": "broken"}})
        if first == "no second answer" and last != first:
            return self.reply(500, {"error": {"message": "broken"}})
        if first == "307":
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:9/v1/chat/completions")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if first == "wrong JSON":
            return self.reply(200, {"choices": "none"})
        if first == "slow" or (first == "half slow" and number > 1 and last == first):
            time.sleep(8)
        if first == "half-closed":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
            return None
        text = "\\boxed{0.8}" if last != first else "The answer is 4."
        if first == "unsure" and last == first:
            text = f"The answer is {4 + sum(one['messages'][-1]['content'] == 'unsure' for one in self.bodies) % 2}."
        if first == "mute" and last != first:
            text = "I would rather not say."
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        if first == "tool" and last == first:
            arguments = ['{"city": "Rome", "day": 1}', '{"day": 1, "city": "Rome"}'][number % 2]
            call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            return self.reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]})
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return self.reply(200, {"choices": [choice], "usage": usage})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody waits any longer
            self.end_headers()
            self.wfile.write(content)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{upstream.server_address[1]}/v1"
    options = ("--model", "closed", "--engine.name", "openai", "--engine.base_url", url, "--task", "local_number")
    args = ("--engine.engine_args", '{"max_retries": 0, "deadline": 3.0}')
    made = Server((*options, *args), log=tmp_path_factory.mktemp("upstream") / "log")
    yield made
    assert made.end() == 0
    upstream.shutdown()
    upstream.server_close()


def ask(server: Server, text: str, **selfcal: Any) -> Any:
    return server.chat(text, model="closed", selfcal=selfcal)


def test_it_says_what_is_missing_and_answers_by_the_hybrid_of_two_samples(server: Server) -> None:
    assert server.log is not None
    said = " ".join(server.log.read_text().split())
    assert "neither ids, logprobs nor n" in said
    assert "no p_true" in said
    sure = ask(server, "sure")
    found = [sure.selfcal[name] for name in ("answer", "source", "samples_used")]
    assert found == ["4", "two_sample_hybrid", 2]
    assert sure.selfcal["confidence"] == pytest.approx((0.8 + 1.0) / 2)
    assert sure.json["usage"] == {"prompt_tokens": 44, "completion_tokens": 28, "total_tokens": 72}
    assert ask(server, "unsure").selfcal["confidence"] == pytest.approx((0.8 + 0.5) / 2)
    mute = ask(server, "mute").selfcal
    assert (mute["confidence"], mute["source"]) == (1.0, "vote_share")
    assert ask(server, "early", strategy="early_stopping", threshold=0.7).selfcal["samples_used"] == 1


def test_calls_of_tools_agree_by_name_and_sorted_arguments(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    whole = server.chat("tool", model="closed", tools=tools)
    (call,) = whole.json["choices"][0]["message"]["tool_calls"]
    assert whole.json["choices"][0]["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])["city"]) == ("weather", "Rome")
    assert [one["votes"] for one in whole.selfcal["candidates"]] == [2]
    assert whole.json["usage"] is None  # this server does not say
    stream = server.chat("tool", model="closed", tools=tools, stream=True)
    (streamed,) = [c for chunk in stream.chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (streamed["index"], streamed["function"]["name"]) == (0, "weather")
    json.loads(streamed["function"]["arguments"])  # it comes whole


def test_a_conversation_and_its_stops_reach_the_server_as_they_are(server: Server) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "earlier"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]
    body = {"model": "closed", "messages": turns, "stop": [" is", "?"]}
    reply = server.post("/v1/chat/completions", body)
    assert reply.json["choices"][0]["message"]["content"] == "The answer"
    mine = [one for one in Upstream.bodies if one["messages"][0]["content"] == "earlier"]
    turns[1]["content"] = ""
    assert [one["messages"][:3] for one in mine] == [turns] * 4
    assert [one["stop"] for one in mine if "stop" in one] == [body["stop"]] * 2
    assert [one["messages"][3]["content"] for one in mine if "stop" not in one] == ["The answer"] * 2


def test_a_sample_that_the_deadline_drops_is_counted(server: Server) -> None:
    reply = ask(server, "half slow", deadline_s=1.5).selfcal
    assert [reply[name] for name in ("stop_reason", "samples_used", "samples_cancelled")] == ["deadline", 1, 1]


def test_a_response_survives_a_failed_question_about_it(server: Server) -> None:
    reply = ask(server, "no second answer")
    assert (reply.status, reply.selfcal["answer"], reply.selfcal["samples_failed"]) == (200, "4", 0)


def test_the_default_strategy_can_abstain(server: Server) -> None:
    assert ask(server, "sure?", on_low="abstain", threshold=0.99).selfcal["abstained"]
    assert not ask(server, "sure!", on_low="abstain", threshold=0.1).selfcal["abstained"]


@pytest.mark.parametrize("path", ["/v1/confidence", "/v1/systemone"])
def test_what_needs_token_ids_is_refused(server: Server, path: str) -> None:
    body = {"model": "closed", "messages": [{"role": "user", "content": "a"}], "response": "b"}
    if path == "/v1/systemone":
        body = {"state": "a", "questions": {"q": {"type": "noul"}}}
    reply = server.post(path, body)
    assert (reply.status, "token ids" in reply.text) == (501, True)


@pytest.mark.parametrize(
    ("fault", "status"),
    [("500", 502), ("307", 502), ("wrong JSON", 502), ("half-closed", 502), ("slow", 502), ("half of them", 200)],
)
def test_each_fault_ends_in_a_status_and_hurts_nobody_else(server: Server, fault: str, status: int) -> None:
    reply = ask(server, fault)
    assert reply.status == status
    if status == 200:
        assert (reply.selfcal["samples_failed"], reply.selfcal["answer"]) == (1, "4")
    assert ask(server, f"after {fault}").status == 200
    slow = server.chat("slow", model="closed", selfcal={"deadline_s": 0.3})
    assert slow.status == 504
