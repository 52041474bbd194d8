"""Processes that wait for each other's share of a round: signs of life, disks that fail for a moment, who joins."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.fakes import fake_questions
from support.store_samples import make_store, write

from selfcal_lightning.callbacks.generation import join_shares
from selfcal_lightning.core import processes as rendezvous
from selfcal_lightning.core.processes import Rendezvous
from selfcal_lightning.data.store.sample_store import SampleStore

STALE = OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.02)


def fails_once(real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, whose second call raises an error of a disk over the network."""
    calls = 0

    def flaky(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise STALE
        return real(*arguments, **options)

    return flaky


def _work(folder: Path, *, failing: bool) -> None:
    with Rendezvous(folder, rank=1, world_size=2).working():
        if failing:
            raise SystemExit("out of memory")
        time.sleep(60)


def test_the_silence_of_a_process_that_was_alive_ends_the_waiting(tmp_path: Path) -> None:
    other = multiprocessing.get_context("fork").Process(target=_work, args=(tmp_path,), kwargs={"failing": False})
    other.start()
    deadline = time.monotonic() + 120.0

    def give_up() -> None:
        assert time.monotonic() < deadline, "waited for ever"

    mine = Rendezvous(tmp_path, rank=0, world_size=2, stall_timeout=1.0, interrupt=give_up)
    with mine.working():
        while mine._read(1).get("beat", 0) < 3:
            time.sleep(0.02)
        os.kill(other.pid, signal.SIGKILL)
        other.join()
    assert mine._read(1)["state"] == "working"
    with pytest.raises(RuntimeError, match=r"process 1 .* no sign of life"):
        mine.meet()


def test_the_failure_of_another_process_ends_the_waiting(tmp_path: Path) -> None:
    other = multiprocessing.get_context("fork").Process(target=_work, args=(tmp_path,), kwargs={"failing": True})
    other.start()
    mine = Rendezvous(tmp_path, rank=0, world_size=2)
    try:
        with mine.working():
            pass
        with pytest.raises(RuntimeError, match=r"process 1 .* failed: SystemExit: out of memory"):
            mine.meet()
    finally:
        other.kill()
        other.join()


def test_signs_of_life_outlast_a_disk_that_fails_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = Rendezvous(tmp_path, rank=0, world_size=2)
    monkeypatch.setattr(os, "replace", fails_once(os.replace))
    with mine.working():
        while mine._read(0)["beat"] < 5:  # the second of them found no disk
            time.sleep(0.02)


def test_waiting_outlasts_a_disk_that_fails_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = (Rendezvous(tmp_path, rank=rank, world_size=2) for rank in range(2))
    with mine.working():
        pass
    with other.working():
        mine.check()
        monkeypatch.setattr(Path, "read_text", fails_once(Path.read_text))
        waiting = threading.Thread(target=mine.meet)
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
    waiting.join(timeout=120)
    assert not waiting.is_alive()


def both_ranks(work: Callable[[int], None]) -> list[Exception]:
    """Run ``work(rank)`` for two ranks side by side and return what they raised."""
    raised: list[Exception] = []

    def one(rank: int) -> None:
        try:
            work(rank)
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    return raised


def meetings(folder: Path, rank: int, stall_timeout: float) -> list[Rendezvous]:
    return [Rendezvous(folder / name, rank=rank, world_size=2, stall_timeout=stall_timeout) for name in ("j", "l")]


@pytest.mark.parametrize("late", [False, True])
def test_one_process_joins_and_the_others_look_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """With ``late``, what the second process wrote comes into sight only after it has said that it is done."""
    questions = fake_questions(6)
    make_store(tmp_path / "s")
    write(SampleStore(tmp_path / "s"), questions[:3], part="rank-0-of-2")
    if not late:
        write(SampleStore(tmp_path / "s"), questions[3:], part="rank-1-of-2")
    joined: list[str] = []
    real = SampleStore.join

    def join(self: SampleStore) -> Any:
        joined.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(SampleStore, "join", join)

    def work(rank: int) -> None:
        threading.current_thread().name = f"rank {rank}"
        store = SampleStore(tmp_path / "s")
        join_shares(*meetings(tmp_path, rank, 120.0), store, {question.id for question in questions}, round=0)
        assert len(store.question_ids()) == 6

    if late:
        threading.Timer(0.3, write, (SampleStore(tmp_path / "s"), questions[3:]), {"part": "rank-1-of-2"}).start()
    assert both_ranks(work) == []
    assert set(joined) == {"rank 0"}
    assert (len(joined) > 1) == late


def test_a_shard_that_is_named_before_it_comes_into_sight_is_waited_for(tmp_path: Path) -> None:
    questions = fake_questions(6)
    make_store(tmp_path / "s")
    for rank in range(2):
        write(SampleStore(tmp_path / "s"), questions[3 * rank : 3 * rank + 3], part=f"rank-{rank}-of-2")
    shard = next((tmp_path / "s").rglob("*rank-1-of-2*/*.parquet"))
    hidden = shard.rename(tmp_path / "hidden")
    threading.Timer(0.5, hidden.rename, (shard,)).start()

    def work(rank: int) -> None:
        wanted = {question.id for question in questions}
        join_shares(*meetings(tmp_path, rank, 120.0), SampleStore(tmp_path / "s"), wanted, round=0)

    assert both_ranks(work) == []


def test_questions_that_never_come_are_an_error_everywhere(tmp_path: Path) -> None:
    make_store(tmp_path / "s")

    def work(rank: int) -> None:
        join_shares(*meetings(tmp_path, rank, 0.3), SampleStore(tmp_path / "s"), {"lost"}, round=0)

    raised = both_ranks(work)
    assert len(raised) == 2
    assert all("'lost'" in str(error) for error in raised)
