import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from support.command_lines import nested
from support.fakes import fake_questions
from support.processes import run_forked
from support.store_samples import make_store, write
from support.training_runs import data_module, module_of, trainer_with

from selfcal_lightning.callbacks.generation import SSCGeneration, join_shares
from selfcal_lightning.core import processes as rendezvous
from selfcal_lightning.core.processes import Rendezvous
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import weights_sha256
from selfcal_lightning.models.lora import LoraSettings, adapter_difference
from selfcal_lightning.training.rounds import adapter_folder

Meeting = Callable[..., Rendezvous]
Joining = Callable[..., list[Exception]]
COLLECTIVE_TIMEOUT, DELAY = timedelta(seconds=20.0), 30.0
SETTINGS = {"max_new_tokens": 60, "max_batch": 32, "questions_per_shard": 1}


@pytest.fixture
def meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Meeting:
    """A maker of one process's part in a quick meeting of two."""
    monkeypatch.setattr(rendezvous, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.02)
    return lambda rank, name="m", **options: Rendezvous(tmp_path / name, rank=rank, world_size=2, **options)


def fails_once(real: Callable[..., Any]) -> Callable[..., Any]:
    """``real``, whose second call raises an error of a disk over the network."""
    calls = 0

    def flaky(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments, **options)

    return flaky


def fork_that(work: Callable[[], None], mine: Rendezvous) -> BaseProcess:
    """Start the second process of a meeting, which works until it is killed or fails."""

    def run() -> None:
        with mine.working():
            work()

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def test_the_silence_of_a_process_that_was_alive_ends_the_waiting(meeting: Meeting) -> None:
    other = fork_that(lambda: time.sleep(60), meeting(1))
    deadline = time.monotonic() + 120.0

    def give_up() -> None:
        assert time.monotonic() < deadline, "waited for ever"

    mine = meeting(0, stall_timeout=1.0, interrupt=give_up)
    with mine.working():
        while mine._read(1).get("beat", 0) < 3:
            time.sleep(0.02)
        os.kill(other.pid, signal.SIGKILL)
        other.join()
    assert mine._read(1)["state"] == "working"
    with pytest.raises(RuntimeError, match=r"process 1 .* no sign of life"):
        mine.meet()


def test_the_failure_of_another_process_ends_the_waiting(meeting: Meeting) -> None:
    other, mine = fork_that(lambda: sys.exit("out of memory"), meeting(1)), meeting(0)
    with mine.working():
        pass
    with pytest.raises(RuntimeError, match=r"process 1 .* failed: SystemExit: out of memory"):
        mine.meet()
    other.join()


def test_signs_of_life_outlast_a_disk_that_fails_for_a_moment(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = meeting(0)
    monkeypatch.setattr(os, "replace", fails_once(os.replace))
    with mine.working():
        while mine._read(0)["beat"] < 5:  # the second of them found no disk
            time.sleep(0.02)


def test_waiting_outlasts_a_disk_that_fails_for_a_moment(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = meeting(0), meeting(1)
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


@pytest.fixture
def both_join(meeting: Meeting, tmp_path: Path) -> Joining:
    """A function that lets two ranks join their shares of a store and returns what they raised."""
    make_store(tmp_path / "s")

    def join(wanted: set[str], *, stall_timeout: float = 120.0) -> list[Exception]:
        raised: list[Exception] = []

        def one(rank: int) -> None:
            meetings = [meeting(rank, name, stall_timeout=stall_timeout) for name in ("j", "l")]
            store = SampleStore(tmp_path / "s")
            try:
                join_shares(*meetings, store, wanted, round=0)
                assert store.question_ids() == wanted
            except Exception as error:
                raised.append(error)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=300)
            assert not thread.is_alive()
        return raised

    return join


SIX = fake_questions(6)
WANTED = {question.id for question in SIX}


@pytest.mark.parametrize("late", [False, True])
def test_one_process_joins_and_the_others_look_on(
    both_join: Joining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """With ``late``, what the second process wrote comes into sight only after it has said that it is done."""
    write(SampleStore(tmp_path / "s"), SIX[:3], part="rank-0-of-2")
    joined: list[str] = []
    real = SampleStore.join

    def join(self: SampleStore) -> Any:
        joined.append(threading.current_thread().name)
        return real(self)

    monkeypatch.setattr(SampleStore, "join", join)
    second = SampleStore(tmp_path / "s"), SIX[3:]
    if late:
        threading.Timer(0.3, write, second, {"part": "rank-1-of-2"}).start()
    else:
        write(*second, part="rank-1-of-2")
    assert both_join(WANTED) == []
    assert set(joined) == {"rank 0"}
    assert (len(joined) > 1) == late


def test_a_shard_that_is_named_before_it_comes_into_sight_is_waited_for(both_join: Joining, tmp_path: Path) -> None:
    for rank in range(2):
        write(SampleStore(tmp_path / "s"), SIX[3 * rank : 3 * rank + 3], part=f"rank-{rank}-of-2")
    shard = next((tmp_path / "s").rglob("*rank-1-of-2*/*.parquet"))
    hidden = shard.rename(tmp_path / "hidden")
    threading.Timer(0.5, hidden.rename, (shard,)).start()
    assert both_join(WANTED) == []


def test_questions_that_never_come_are_an_error_everywhere(both_join: Joining) -> None:
    raised = both_join({"lost"}, stall_timeout=0.3)
    assert len(raised) == 2
    assert all("'lost'" in str(error) for error in raised)


class Late(SSCGeneration):
    """The second process comes to the later rounds only after a collective would have given up."""

    def _start(self, trainer: Trainer, module: Any, chat: Any, adapter: str | None) -> Any:
        if adapter is not None and trainer.global_rank == 1:
            time.sleep(DELAY)
        return super()._start(trainer, module, chat, adapter)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_processes_wait_for_a_late_one_longer_than_collectives(tiny_model: str, tmp_path: Path, engine: str) -> None:
    store = tmp_path / "store"
    lora = LoraSettings(r=4, dropout=0.0, activated=False)
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    settings = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    started = time.monotonic()
    trainer_with(Late(**nested(engine=engine, **SETTINGS)), devices=2, strategy=strategy, **settings).fit(
        module_of(tiny_model, lora=lora, lr=5e-4),
        datamodule=data_module(tiny_model, store, regenerate_every_n_epochs=1, batch_size=2),
    )
    assert time.monotonic() - started > DELAY
    manifest = SampleStore(store).manifest
    shards = [(shard.file.split("/")[1], shard.round) for shard in manifest.shards]
    assert {("rank-0-of-2", 1), ("rank-1-of-2", 1)} <= set(shards)
    assert len(SampleStore(store).question_ids(split="train", round=1)) == 8
    assert manifest.rounds[1].engine["engine"] == engine
    adapter = adapter_folder(store, 1)
    assert manifest.rounds[1].fingerprint.model.adapter_sha256 == weights_sha256(str(adapter))
    assert not list((store / "meetings").glob("*"))

    if engine == "transformers":  # one process with twice the rows comes to the same adapter, and reads the same round
        differences: list[float] = []

        class Watch(Callback):
            def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
                differences.append(adapter_difference(pl_module.model, adapter))

        trainer_with(SSCGeneration(**nested(**SETTINGS)), Watch(), **settings).fit(
            module_of(tiny_model, lora=lora, lr=5e-4),
            datamodule=data_module(tiny_model, store, regenerate_every_n_epochs=1, batch_size=4),
        )
        assert differences[0] > 1e-3 > 1e-5 > differences[1]
        assert SampleStore(store).manifest.shards == manifest.shards


def _train(model: str, folder: Path, *arguments: str, ranks: int = 1) -> int:
    """Run the worker script; with one rank and two devices, Lightning starts the second process."""
    script = Path(__file__).resolve().parents[1] / "support" / "rounds_worker.py"
    return run_forked([str(script), model, str(folder), *arguments], folder.with_suffix(".log"), ranks=ranks)


def _hash(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["adapter"]


def _texts(folder: Path) -> list[tuple[str, list[str]]]:
    groups = list(SampleStore(folder / "store").samples(round=1))
    assert len(groups) == 8
    return [(group.question.id, [sample.text for sample in group.samples]) for group in groups]


@pytest.mark.slow
def test_a_run_killed_while_it_samples_a_round_ends_as_an_unbroken_one(tiny_model: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert _train(tiny_model, whole) == 0
    # After the second of the eight questions of round 1 was committed.
    assert _train(tiny_model, killed, "--kill_after", "2") == -signal.SIGKILL
    store = SampleStore(killed / "store")
    assert len(store.stored_questions(round=1, include_parts=True)) == 2
    kept = weights_sha256(str(adapter_folder(killed / "store", 1)))
    # Of the round itself, and the last one that the user's own callback wrote, from the middle of the epoch before.
    checkpoints = {file.name: str(file) for file in (killed / "checkpoints").glob("*.ckpt")}
    assert checkpoints.keys() == {"last-round.ckpt", "step=2.ckpt"}
    for place, name in {**checkpoints, "from_scratch": None}.items():
        again = tmp_path / place
        shutil.copytree(killed, again, symlinks=True)
        assert _train(tiny_model, again, *(["--resume", name] if name else [])) == 0
        assert _hash(again) == _hash(whole)
        assert weights_sha256(str(adapter_folder(again / "store", 1))) == kept
        assert _texts(again) == _texts(whole)


@pytest.mark.slow
def test_two_processes_of_which_one_is_killed_end_as_unbroken_ones(tiny_model: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    two = ["--devices", "2"]
    assert _train(tiny_model, whole, *two, ranks=2) == 0
    # The first process does not wait for ever; it fails, or Lightning ends it.
    assert _train(tiny_model, killed, *two, "--kill_after", "2") != 0
    assert not (killed / "result.json").exists()
    store = SampleStore(killed / "store")
    assert store.committed_questions(parts=["rank-1-of-2"], round=1) == 2
    assert 2 <= store.committed_questions(parts=["rank-0-of-2", "rank-1-of-2"], round=1) < 8
    kept = weights_sha256(str(adapter_folder(killed / "store", 1)))
    assert _train(tiny_model, killed, *two, "--resume", "last", ranks=2) == 0
    assert _hash(killed) == _hash(whole)
    assert weights_sha256(str(adapter_folder(killed / "store", 1))) == kept
    assert _texts(killed) == _texts(whole)
