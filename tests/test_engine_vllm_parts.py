"""The parts of the vLLM engine that need no vLLM: the wire, the blame for a crash, the child's environment."""

from __future__ import annotations

import math
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selfcal_lightning.engines import vllm
from selfcal_lightning.engines.vllm_channel import Channel
from selfcal_lightning.engines.vllm_flights import Flight, FlightBook
from selfcal_lightning.engines.vllm_process import worker_environment


def _channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left, send_timeout=5.0), Channel(right)


def test_messages_arrive_whole_however_large() -> None:
    left, right = _channels()
    messages = [{"n": i, "text": "ä" * size, "x": 0.1 + i} for i, size in enumerate([0, 1, 3_000_000, 5])]
    sender = threading.Thread(target=lambda: [left.send(message) for message in messages])
    sender.start()
    received: list[dict[str, object]] = []
    while len(received) < len(messages):
        received += right.receive(timeout=5.0)
    sender.join()
    assert received == messages
    left.send({"lowest": -math.inf})
    assert right.receive() == [{"lowest": -math.inf}]


def test_silence_and_the_end_are_told_apart() -> None:
    left, right = _channels()
    assert right.receive(timeout=0.01) == []
    left.close()
    with pytest.raises(EOFError):
        right.receive(timeout=5.0)


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


def test_dropped_flights_do_not_come_back_after_a_crash() -> None:
    book = FlightBook()
    a, b, c = book.add(Flight(name, (1,)) for name in "abc")
    book.take(2)
    assert (book.drop(a), book.drop(c), book.drop(99)) == (True, False, False)
    book.crash(max_attempts=3)
    assert book.finish(a) is None
    assert [number for number, _ in book.take(10)] == [b]
    assert len(book) == 1


def test_scores_go_before_waiting_samples() -> None:
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
    with pytest.raises(ValueError, match="below 3"):
        worker_environment(parent, on_cpu=False, devices=[3])


def test_a_missing_vllm_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcal_lightning.imports.is_installed", lambda module: False)
    monkeypatch.setattr(vllm, "is_installed", lambda module: False)
    with pytest.raises(ImportError, match=r"'\.\[vllm\]'"):
        vllm.VLLMEngine("model")


@pytest.mark.parametrize(("name", "value"), [("max_batch", 0), ("max_attempts", 0), ("max_restarts", -1)])
def test_limits_are_checked(name: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "is_installed", lambda module: True)
    with pytest.raises(ValueError, match=f"Expected `{name}` to be at least"):
        vllm.VLLMEngine("model", **{name: value})
