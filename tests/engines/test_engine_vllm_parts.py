import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.other_models import change_json

from selfcal_lightning.engines.vllm import engine as vllm
from selfcal_lightning.engines.vllm.process import Channel, WorkerProcess, worker_environment
from selfcal_lightning.engines.vllm.records import EngineCrashedError, Flight, FlightBook, lora_rank, wire_messages
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Request, SamplingSettings

Start = Callable[..., Any]
Told = list[tuple[dict[str, Any], float]]


def _channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left, send_timeout=120.0), Channel(right)


def test_messages_arrive_whole_however_large() -> None:
    left, right = _channels()
    messages = [{"n": i, "text": "ä" * size, "x": 0.1 + i} for i, size in enumerate([0, 1, 3_000_000, 5])]
    sender = threading.Thread(target=lambda: [left.send(message) for message in messages])
    sender.start()
    received: list[dict[str, object]] = []
    while len(received) < len(messages):
        received += right.receive(timeout=120.0)
    sender.join()
    assert received == messages
    left.send({"lowest": -math.inf})
    assert right.receive() == [{"lowest": -math.inf}]


def test_silence_the_end_and_an_endless_wait_are_told_apart() -> None:
    ends = socket.socketpair()
    left, right = Channel(ends[0], send_timeout=math.inf), Channel(ends[1])
    assert right.receive(timeout=0.01) == []
    left.send({"n": 1})
    assert right.receive(timeout=math.inf) == [{"n": 1}]
    left.close()
    with pytest.raises(EOFError):
        right.receive(timeout=120.0)


def test_a_reader_that_stops_reading_does_not_hang_the_writer() -> None:
    left, right = socket.socketpair()
    with right, pytest.raises(TimeoutError):
        Channel(left, send_timeout=0.05).send({"text": "a" * 50_000_000})


@settings(max_examples=60, deadline=None)
@given(total=st.integers(1, 600), window=st.integers(1, 300), data=st.data(), max_attempts=st.integers(1, 4))
def test_only_the_poison_is_given_up(total: int, window: int, data: st.DataObject, max_attempts: int) -> None:
    """A child that dies whenever it holds a poison, wherever the poison sits; every other flight finishes once."""
    poison = set(data.draw(st.lists(st.integers(0, total - 1), max_size=3)))
    book = FlightBook()
    numbers = book.add(Flight(str(i), (1,)) for i in range(total))
    finished: list[int] = []
    given_up: list[int] = []
    running: set[int] = set()
    crashes = 0
    while len(book):
        taken = [number for number, _ in book.take(window)]
        running |= set(taken)
        assert 0 < len(running) <= window
        if {numbers.index(number) for number in taken} & poison:
            crashes += 1
            given_up += [number for number, _ in book.crash(max_attempts=max_attempts)]
            running.clear()
        else:
            finished += [number for number in taken if book.finish(number)]
            running -= set(taken)
    assert sorted(given_up) == [numbers[i] for i in sorted(poison)]
    assert sorted(finished + given_up) == numbers
    assert crashes <= len(poison) * (max_attempts + math.ceil(math.log(total + 1, 8)) + 1)


def test_dropped_flights_stay_away_and_scores_go_before_waiting_samples() -> None:
    book = FlightBook()
    a, b, c = book.add(Flight(name, (1,)) for name in "abc")
    book.take(2)
    assert (book.drop(a), book.drop(c), book.drop(99)) == (True, False, False)
    book.crash(max_attempts=3)
    assert book.finish(a) is None
    assert [number for number, _ in book.take(10)] == [b]
    assert len(book) == 1
    book = FlightBook()
    book.add([Flight("late", (1,))])
    book.add([Flight("first", (1,))], first=True)
    assert [flight.name for _, flight in book.take(1)] == ["first"]


def test_the_environment_is_clean_and_bound_to_the_ranks_gpus() -> None:
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    parent = dict.fromkeys(launcher, "1") | {"HOME": "/root", "CUDA_VISIBLE_DEVICES": "2,GPU-x,7", "PYTHONPATH": "/a"}
    child = worker_environment(parent, on_cpu=False, devices=[1, 2])
    assert not set(child) & set(launcher)
    assert (child["HOME"], child["CUDA_VISIBLE_DEVICES"]) == ("/root", "GPU-x,7")
    assert child["PYTHONPATH"].startswith("/a:")
    assert worker_environment({}, on_cpu=False, devices=[3])["CUDA_VISIBLE_DEVICES"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment({}, on_cpu=False)
    assert worker_environment({}, on_cpu=True)["OMP_NUM_THREADS"] == "1"
    assert child["VLLM_HOST_IP"] == "127.0.0.1", "the host's outward address may lead through a firewall"
    assert worker_environment({"VLLM_HOST_IP": "10.0.0.2"}, on_cpu=False)["VLLM_HOST_IP"] == "10.0.0.2"
    with pytest.raises(ValueError, match="below 3"):
        worker_environment(parent, on_cpu=False, devices=[3])


# Does what it is told for this start, and only when the model lies where it was told: it has no hub to ask.
CHILD = """
import os, socket, sys, time
from pathlib import Path
from selfcal_lightning.engines.vllm.process import Channel

channel = Channel(socket.socket(fileno=int(sys.argv[1])))
(settings,) = channel.receive()
starts = Path(os.environ["SELFCAL_TEST_STARTS"])
starts.write_text(starts.read_text() + "x")
plan = os.environ["SELFCAL_TEST_PLAN"].split(",")[len(starts.read_text()) - 1]
while not (Path(settings["model"]) / "weights").exists():
    time.sleep(0.01)
if plan == "dies":
    sys.exit(3)
if plan == "refuses":
    channel.send({"event": "error", "message": "ValueError: no such quantization", "is_final": True})
    sys.exit(1)
limits = {"max_context": 64, "model_limit": 65, "vocabulary": 512, "max_batch": 7, "dtype": "float32", "version": "0"}
channel.send({"event": "ready", **limits})
channel.receive()
"""


@pytest.fixture
def start(tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Make engines over a child that acts by a plan, of a model that is downloaded when it is asked for."""
    (tmp_path / "fake_vllm_child.py").write_text(CHILD)
    (tmp_path / "starts").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SELFCAL_TEST_STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr("selfcal_lightning.engines.vllm.process.WORKER_MODULE", "fake_vllm_child")
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda module: True)
    monkeypatch.setattr(vllm, "is_cpu_build", lambda: True)

    def download(model: str, *, revision: str | None) -> Path:
        time.sleep(0.3)
        (tmp_path / "weights").touch()
        return tmp_path

    monkeypatch.setattr(vllm.folders, "model_folder", download)
    monkeypatch.setattr(vllm.folders, "weights_bytes", lambda model, revision: 200_000_000)
    chat = ChatFormat(load_tokenizer(tiny_model))

    def make(plan: str, **options: object) -> tuple[vllm.VLLMEngine, Callable[[], int]]:
        monkeypatch.setenv("SELFCAL_TEST_PLAN", plan)
        engine = vllm.VLLMEngine("on/the-hub", chat=chat, stop_token_ids=[1], **options)
        return engine, lambda: len((tmp_path / "starts").read_text())

    return make


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The settings and the time limit of every start of a child."""
    told: Told = []
    plain = WorkerProcess.start

    def watch(self: WorkerProcess, settings: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        told.append((settings, timeout))
        return plain(self, settings, timeout=timeout)

    monkeypatch.setattr(WorkerProcess, "start", watch)
    return told


def write_adapter(folder: Path, *, rank: int) -> str:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 1, "rank_pattern": {"q_proj": rank}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"lora": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return str(folder)


def test_a_model_is_downloaded_before_a_start_that_more_weights_may_prolong(start: Start, told: Told) -> None:
    engine, starts = start("is ready")
    assert (engine.batch_size, engine.max_context, starts()) == (7, 64, 1)
    assert [timeout for _, timeout in told] == [vllm.process.START_SECONDS + 2.0]
    engine.close()


def test_an_adapter_of_the_hub_is_downloaded_for_the_child(
    start: Start, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", rank=2)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: adapter)
    engine, _ = start("is ready", adapter="org/adapter")
    assert engine.max_context == 64
    ((settings, _),) = told
    assert (settings["adapter"], settings["lora_rank"]) == (adapter, 8)
    engine.close()


def test_an_interrupted_start_is_begun_anew(start: Start) -> None:
    engine, _ = start("is ready,is ready")
    with patch.object(Channel, "receive", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.submit([])
    assert engine.pid is None
    assert engine.max_context == 64
    engine.close()


def test_scores_whose_wait_is_broken_are_forgotten(start: Start) -> None:
    engine, _ = start("is ready")
    assert engine.max_context == 64
    with patch.object(engine, "_work", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.next_token_probabilities([[5], [6]], [7])
    assert engine.poll() == []  # it waits for what is still in the book
    engine.close()


def test_a_first_start_is_tried_once_more(start: Start) -> None:
    """One collision of ports among eight engines of a node once ended the run."""
    engine, starts = start("dies,is ready")
    assert (engine.max_context, starts()) == (64, 2)
    engine.close()


@pytest.mark.parametrize(
    ("plan", "expected", "message"),
    [
        ("dies,dies,is ready", 2, r"failed 2 time\(s\) in a row.*did not start"),
        ("refuses,is ready", 1, r"failed 1 time\(s\) in a row.*no such quantization"),
    ],
)
def test_a_start_in_vain_is_not_repeated(start: Start, plan: str, expected: int, message: str) -> None:
    engine, starts = start(plan)
    with pytest.raises(EngineCrashedError, match=message):
        engine.submit([])
    assert starts() == expected


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (24, 32), (257, 320), (512, 512)])
def test_ranks_are_rounded_up_to_what_vllm_serves(tmp_path: Path, rank: int, served: int) -> None:
    adapter = write_adapter(tmp_path, rank=rank)
    assert lora_rank(adapter) == served
    change_json(tmp_path / "adapter_config.json", r=rank, rank_pattern=None)  # no layer has a rank of its own
    assert lora_rank(adapter) == served


@pytest.mark.vllm
@pytest.mark.parametrize("by_position", [False, True], ids=["runner_v1", "runner_v2"])
def test_a_continuation_has_the_stream_that_its_runner_needs(by_position: bool) -> None:
    """Runner V1 begins a stream with the first token drawn, which must not be that of the prefix; V2 has none."""
    from selfcal_lightning.engines.vllm.worker import sampling_params

    plain = Request("q", (1, 2), SamplingSettings(edt_scale=None), seed=7)
    longer = replace(plain, prefix_ids=(5, 6), step_ids=(19, 3))
    flights = [(number, Flight(one.id, one.context_ids, one)) for number, one in enumerate((plain, longer))]
    (message,) = wire_messages(flights, lambda request: 9)
    assert message["prompts"] == [(1, 2), (1, 2, 5, 6)]
    first, second = (sampling_params(spec, frozenset({0}), by_position=by_position) for spec in message["requests"])
    assert first.seed == 7
    assert (second.seed == 7) is by_position
    assert (first.stop_token_ids, second.stop_token_ids) == ([0], [0, 3, 19])
