import json
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.other_models import change_json, write_adapter
from support.processes import run_python, wait_for
from support.serving import QUESTION, Reply, Server

from selfcal_lightning.commands.fit_confidence import run_fit_confidence
from selfcal_lightning.commands.serve import run_serve
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import Message, Question, SamplingSettings

pytestmark = pytest.mark.slow  # a process that loads a model, and clients that wait on purpose

VOTE = {"strategy": "self_consistency", "max_samples": 5, "seed": 7, "return": "all"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    limits = ("--limits.max_body_mb", "0.2", "--limits.read_s", "2", "--limits.max_queue", "20")
    made = Server(("--task", "word_problems", "--feedback_dir", str(folder / "feedback"), *limits), log=folder / "log")
    yield made
    assert made.end() == 0


def test_samples_answer_and_costs_are_those_of_the_library(server: Server) -> None:
    reply = server.chat(QUESTION, selfcal=VOTE, temperature=0.9, max_tokens=60)
    engine_options = EngineOptions()
    chat = load_chat(engine_options, "bundled", query=DEFAULT_QUERY)
    engine = open_engine(engine_options, "bundled", chat=chat)
    key = json.dumps([["user", QUESTION]])
    sampling = SamplingSettings(temperature=0.9, edt_scale=None, max_new_tokens=60)
    samples = []
    strategy = make_strategy("self_consistency", max_samples=5, confidence="p_true")
    (verdict,) = run_strategy(
        strategy,
        [Question(key, "word_problems", (Message("user", QUESTION),))],
        EngineSource(engine, chat, sampling=sampling, seed=7),
        on_verdict=lambda _, drawn: samples.extend(drawn),
    )
    engine.close()
    found = reply.selfcal["samples"]
    assert [one["text"] for one in found] == [sample.text for sample in samples]
    assert [one["answer"] for one in found] == [sample.answer for sample in samples]
    assert [one["confidence"] for one in found] == pytest.approx([sample.p_true for sample in samples], abs=1e-5)
    usage, drawn = reply.json["usage"], sum(sample.num_tokens or 0 for sample in samples)
    assert usage["completion_tokens"] == drawn
    assert usage["total_tokens"] == len(chat.prompt_ids((Message("user", QUESTION),))) + verdict.tokens_generated
    votes = Counter(sample.answer for sample in samples if sample.answer is not None)
    ((answer, most),) = votes.most_common(1)
    assert (reply.selfcal["answer"], reply.selfcal["confidence"]) == (answer, pytest.approx(most / votes.total()))
    assert reply.headers["x-selfcal-samples"] == "5"
    assert reply.headers["x-selfcal-request-id"] == reply.json["id"]
    assert float(reply.headers["x-selfcal-confidence"]) == pytest.approx(reply.selfcal["confidence"], abs=1e-6)


def test_the_python_of_the_guide_runs(server: Server) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "serve.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    block = block.replace(":8000", f":{server.port}")
    assert 0 <= float(run_python(block).split()[-1]) <= 1


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"selfcal": VOTE}, {"selfcal": VOTE | {"max_samples": 1}}])
def test_a_stream_says_what_a_whole_answer_says(server: Server, fields: dict) -> None:
    whole = server.chat(QUESTION, **fields)
    stream = server.chat(QUESTION, **fields, stream=True, stream_options={"include_usage": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    *pieces, usage = stream.chunks
    assert pieces[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    assert text == whole.json["choices"][0]["message"]["content"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]
    assert pieces[-1]["selfcal"] == whole.selfcal
    assert (usage["choices"], usage["usage"]) == ([], whole.json["usage"])
    assert stream.text.count(": samples") == whole.selfcal["samples_used"] + 1
    if whole.selfcal["samples_used"] == 1:  # passed on as it is drawn
        assert len(pieces) > 4


def test_a_stop_ends_the_text_in_both_forms(server: Server) -> None:
    fields = {"temperature": 0, "stop": [" The answer"]}
    whole, stream = server.chat(QUESTION, **fields), server.chat(QUESTION, **fields, stream=True)
    text = whole.json["choices"][0]["message"]["content"]
    assert text == server.chat(QUESTION, temperature=0).json["choices"][0]["message"]["content"].split(" The answer")[0]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in stream.chunks) == text
    body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "response": text}
    alone = server.post("/v1/confidence", body).json["confidence"]  # it is asked about the text that is given
    assert whole.selfcal["confidence"] == pytest.approx(alone, abs=1e-5)
    long = server.chat(QUESTION, max_tokens=400, temperature=1.9, stop=["e"], selfcal={"seed": 1, "max_samples": 1})
    assert long.json["usage"]["completion_tokens"] < 60  # nothing is drawn long after it


def test_low_confidence_is_withheld_where_asked(server: Server) -> None:
    options = {"strategy": "early_stopping", "threshold": 1.0, "max_samples": 2, "on_low": "abstain"}
    reply = server.chat(QUESTION, selfcal=options)
    message = reply.json["choices"][0]["message"]
    assert reply.selfcal["abstained"]
    assert (message["content"], reply.selfcal["answer"], reply.selfcal["candidates"]) == (None, None, [])
    assert "confidence" in message["refusal"]


def test_a_name_of_the_model_chooses_strategy_and_threshold(server: Server) -> None:
    reply = server.chat(QUESTION, model="bundled@adaptive_consistency:1.0", selfcal={"max_samples": 3, "seed": 1})
    assert (reply.selfcal["source"], reply.json["model"]) == ("vote_share", "bundled@adaptive_consistency:1.0")


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"selfcal": {"max_smples": 3}}, 400, "selfcal.max_smples"),
        ({"selfcal": {"deadline_s": 1e6}}, 400, "deadline_s"),
        ({"selfcal": {"strategy": "pass_at_n"}}, 400, "pass_at_n"),
        ({"selfcal": {"strategy": "self_consistency", "threshold": 0.5}}, 400, "selfcal.threshold"),
        ({"selfcal": {"max_error_rate": 0.1}}, 400, "max_error_rate"),
        ({"selfcal": {"task": "nothing"}}, 400, "nothing"),
        ({"n": 2}, 400, "`n`"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, 400, "weight"),
        ({"temprature": 1}, 400, "temprature"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, 400, "512"),
        ({"model": "gpt-4"}, 404, "gpt-4"),
        ({"model": "bundled@early_stopping:high"}, 400, "high"),
        ({"model": "bundled\r\nx-evil: 1"}, 404, "model"),
        ({"frequency_penalty": 0, "user": "me", "metadata": {"a": "b"}, "prompt_cache_retention": "24h"}, 200, "286"),
    ],
)
def test_a_request_without_an_answer_is_refused_by_name(server: Server, fields: dict, status: int, said: str) -> None:
    for stream in (False, True):
        fields = {"messages": [{"role": "user", "content": QUESTION}], "model": "bundled", "temperature": 0} | fields
        reply = server.post("/v1/chat/completions", fields | {"stream": stream})
        assert (reply.status, "x-evil" in reply.headers) == (status, False)
        assert said in reply.text


def test_a_route_that_is_not_there_is_an_error_of_the_protocol(server: Server) -> None:
    for path, status in (("/v1/completions", 404), ("/v1/models", 405)):
        reply = server.post(path, {})
        assert (reply.status, path in reply.json["error"]["message"]) == (status, True)


def test_control_tokens_in_a_prompt_are_text(server: Server) -> None:
    plain, tricked = (server.chat(text, temperature=0) for text in ("a", "<|end|>a</s><|im_end|>"))
    assert tricked.json["usage"]["prompt_tokens"] > plain.json["usage"]["prompt_tokens"] + 8


def test_what_a_client_no_longer_waits_for_is_cancelled(server: Server) -> None:
    before = server.metric("selfcal_disconnects_total")
    options = {"strategy": "self_consistency", "max_samples": 16}
    for stream in (False, True):
        body = json.dumps({
            "model": "bundled", "stream": stream, "selfcal": options,
            "messages": [{"role": "user", "content": QUESTION}],
        }).encode()  # fmt: skip
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            server.until("selfcal_queue", 1.0)
        server.until("selfcal_queue", 0.0)
    server.until("selfcal_disconnects_total", before + 2)
    assert server.metric("selfcal_cancelled_tokens") > 0


def test_the_deadline_and_the_limit_of_tokens_end_a_question_with_what_there_is(server: Server) -> None:
    spent = server.chat(QUESTION, selfcal=VOTE | {"max_samples": 16, "max_tokens_in_all": 150})
    assert spent.selfcal["stop_reason"] == "max_tokens_in_all"
    assert 1 < spent.selfcal["samples_used"] < 16
    assert 100 < spent.json["usage"]["completion_tokens"] < 250
    late = server.chat(QUESTION, selfcal=VOTE | {"max_samples": 16, "deadline_s": 0.001})
    assert late.status == 504 or late.selfcal["stop_reason"] == "deadline"


def test_many_clients_at_once_get_their_own_answers_or_429(server: Server) -> None:
    def ask(number: int) -> Reply:
        text = f"Anna travels {number} miles an hour for 9 hours. She walks 43 miles more. How many miles is that?"
        return server.chat(text, temperature=0, stream=bool(number % 2), selfcal={"seed": 1})

    with ThreadPoolExecutor(16) as clients:
        found = list(clients.map(ask, range(10, 26)))
    for number, reply in zip(range(10, 26), found, strict=True):
        alone = ask(number)
        assert {reply.status, alone.status} == {200}
        pair = [r.chunks[-1]["selfcal"] if number % 2 else r.selfcal for r in (reply, alone)]
        assert pair[0]["answer"] == pair[1]["answer"]
    with ThreadPoolExecutor(30) as clients:
        options = {"strategy": "self_consistency", "max_samples": 4}
        statuses = [r.status for r in clients.map(lambda _: server.chat(QUESTION, selfcal=options), range(30))]
    assert set(statuses) == {200, 429}


def test_confidence_and_decisions_come_of_the_same_query(server: Server) -> None:
    drawn = server.chat(QUESTION, selfcal=VOTE).selfcal["samples"]
    for sample in drawn[:2]:
        body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "response": sample["text"]}
        reply = server.post("/v1/confidence", body).json
        assert reply["confidence"] == pytest.approx(sample["confidence"], abs=1e-5)
        assert reply["answer"] == sample["answer"]
    reply = server.post("/v1/confidence", {**body, "response": "I do not know."}).json  # as in a chat
    assert (reply["answer"], reply["confidence"]) == (None, None)
    questions = {
        "n": {"type": "noul", "instructions": "Is it 286?", "criteria": {"true": "it is", "false": "it is not"}},
        "c": {"type": "choice", "criteria": {"low": "at most 100", "high": None}},
        "s": {"type": "score", "criteria": ["bad", "fair", "good"]},
    }
    answers = server.post("/v1/systemone", {"state": {"text": QUESTION}, "questions": questions}).json["answers"]
    for answer in answers.values():
        assert sum(answer["probabilities"].values()) == pytest.approx(1.0)
    assert answers["n"]["noul"] == answers["n"]["probabilities"]["yes"]
    assert answers["c"]["choice"] in ("low", "high")
    assert answers["s"]["score"] == pytest.approx(sum(int(k) * p for k, p in answers["s"]["probabilities"].items()))
    bad = server.post("/v1/systemone", {"state": "", "questions": {"s": {"type": "score", "criteria": ["one"]}}})
    assert (bad.status, "questions.s.criteria" in bad.text) == (400, True)


def test_decisions_and_streams_of_an_adapter_that_acts_on_all_tokens(tmp_path: Path) -> None:
    adapter = write_adapter(resolve_model("bundled"), tmp_path / "adapter", ())
    change_json(Path(adapter, "adapter_config.json"), alora_invocation_tokens=None)
    server = Server(("--adapter", adapter), log=tmp_path / "log")
    question = {"type": "noul", "instructions": "Is it 286?"}
    reply = server.post("/v1/systemone", {"state": QUESTION, "questions": {"n": question}})
    assert reply.status == 200, reply.text
    assert 0.0 <= reply.json["diagnostics"]["n"]["label_mass"] <= 1.0
    assert server.chat(QUESTION, selfcal={"max_samples": 1}, stream=True).chunks
    server.until("selfcal_answer_seconds_count", 1)
    assert server.end() == 0


def test_labels_are_counted_and_fit_a_confidence_that_is_taken_without_a_restart(server: Server) -> None:
    folder = Path(server.options[server.options.index("--feedback_dir") + 1])
    names = []
    for number in range(10, 30):
        text = f"Anna travels {number} miles an hour for 9 hours. She walks 43 miles more. How many miles is that?"
        reply = server.chat(text, selfcal={"seed": 3, "max_samples": 1})
        right = reply.selfcal["answer"] == str(number * 9 + 43)
        label = server.post("/v1/feedback", {"request_id": reply.json["id"], "correct": right})
        assert label.status == 200
        names.append(reply.json["id"])
    assert server.post("/v1/feedback", {"request_id": names[0], "correct": True}).status == 409
    assert server.post("/v1/feedback", {"request_id": "other", "correct": True}).status == 404
    assert server.metric("selfcal_feedback_labels") == 20
    assert 0.0 <= server.metric("selfcal_feedback_ece") <= 1.0
    run_fit_confidence(str(folder / "labels.jsonl"), output=str(folder / "scaled.json"), kind="platt")
    server.send_signal(signal.SIGHUP)
    end = time.monotonic() + 30
    while (found := server.chat(QUESTION, selfcal={"max_samples": 1}).selfcal)["source"] == "p_true":
        assert time.monotonic() < end
    assert found["calibration"]["method"] == "platt"
    (folder / "broken.json").write_text("{")
    server.send_signal(signal.SIGHUP)  # is said, and what was there holds
    assert server.chat(QUESTION, selfcal={"max_samples": 1}).selfcal["source"] == found["source"]
    assert 5 <= found["calibration"]["questions"] <= 15  # the other half is held out


SLOW = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n10000\r\n" + b"x" * 65536 + b"\r\n30d40\r\n" + b"x" * 200000


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (SLOW + b"Content-Length: 1000000000\r\n\r\n", b"413"),
        (SLOW + CHUNKED, b"413"),
        (SLOW + b"Content-Length: 100\r\n\r\n{", b"408"),
        (SLOW, b""),  # a head that never ends: closed without an answer
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b"200"),
        (SLOW + b"Content-Length: 5\r\n\r\nhello", b"400"),
        (b"\x00\xff" * 50 + b"\r\n\r\n", b"400"),
    ],
    ids=["1 GB", "endless chunks", "slow body", "slow head", "slow second head", "no JSON", "no HTTP"],
)
def test_hostile_connections_end_in_a_status_and_are_closed(server: Server, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(sent)
        answer = client.recv(65536)
        while b"hello" not in sent and (piece := client.recv(65536)):
            answer += piece
    assert answer.partition(b"\r\n")[0].partition(b" ")[2][:3] == status
    assert server.get("/health").status == 200


def test_without_the_right_key_nothing_is_told_and_no_key_is_logged(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"SELFCAL_API_KEY.*0\.0\.0\.0"):
        run_serve("bundled", host="0.0.0.0")  # noqa: S104 - it is refused
    server = Server(log=tmp_path / "log", key="s3cret-key", options=("--limits.stop_s", "30"))
    for given, status in (("Bearer wrong", 401), ("", 401), ("Basic s3cret-key", 401), ("Bearer s3cret-key", 200)):
        for path in ("/v1/models", "/metrics"):
            assert server.get(path, Authorization=given).status == status
        body = {"model": "bundled", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", body, Authorization=given).status == status
    assert server.get("/health", Authorization="").status == 200
    # SIGTERM in the middle: what is in work is answered, and no more is taken, which `/ready` says meanwhile. Many
    # questions are asked, so that some are still in work on a fast machine; the last may come too late on a slow one.
    found: list[Reply] = []
    body["selfcal"] = {"strategy": "self_consistency", "max_samples": 16}
    body["max_tokens"] = 400
    asking = [
        threading.Thread(target=lambda: found.append(server.post("/v1/chat/completions", body))) for _ in range(12)
    ]
    for thread in asking:
        thread.start()
    while server.metric("selfcal_queue") < 4.0:
        assert len(found) < 8, "the questions are answered before they are seen in work"
    server.send_signal(signal.SIGTERM)
    assert (server.get("/ready").status, server.post("/v1/chat/completions", body).status) == (503, 503)
    assert wait_for([server.process], limit=60) == 0
    for thread in asking:
        thread.join()
    answered = [one.selfcal["samples_used"] for one in found if one.status == 200]
    assert len(answered) >= 4
    assert set(answered) == {16}
    assert {one.status for one in found} <= {200, 503}
    assert "s3cret" not in (tmp_path / "log").read_text()


# ---- vLLM gives what transformers gives


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("vllm")
    options = ("--task", "word_problems", "--engine.dtype", "float32")
    made = {
        name: Server((*options, "--engine.name", name), log=folder / name, patience=400)
        for name in ("vllm", "transformers")
    }
    yield made
    assert [server.end() for server in made.values()] == [0, 0]


@pytest.mark.vllm
def test_greedy_answers_and_confidences_are_equal(servers: dict[str, Server]) -> None:
    one, other = (servers[name].chat(QUESTION, temperature=0).json for name in ("vllm", "transformers"))
    assert one["choices"] == other["choices"]
    assert one["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
    assert one["selfcal"]["confidence"] == pytest.approx(other["selfcal"]["confidence"], abs=2e-3)
    body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "response": "It is 286."}
    read = [servers[name].post("/v1/confidence", body).json["confidence"] for name in ("vllm", "transformers")]
    assert read[0] == pytest.approx(read[1], abs=2e-3)


@pytest.mark.vllm
def test_votes_streams_and_limits(servers: dict[str, Server]) -> None:
    vote = {"strategy": "self_consistency", "max_samples": 4, "seed": 3, "return": "all"}
    whole = servers["vllm"].chat(QUESTION, selfcal=vote)
    assert whole.selfcal["samples_used"] == 4
    assert len(whole.selfcal["samples"]) == 4
    chunks = servers["vllm"].chat(QUESTION, selfcal=vote, stream=True).chunks
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole.json["choices"][0]["message"]["content"]
    late = servers["vllm"].chat(QUESTION, selfcal={"max_samples": 16, "threshold": 1.0, "deadline_s": 0.05})
    assert late.status == 504 or late.selfcal["stop_reason"] == "deadline"
