"""Python processes; and several as torchrun starts them, but forked: what is imported need not be imported again."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])


def wait_until(done: Callable[[], bool], *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def run_command(command: list[str], **options: Any) -> str:
    """Run a command, which must succeed, and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def run_python(code: str, **options: Any) -> str:
    """Run ``code`` in a process of its own, which must succeed, and return what it prints."""
    return run_command([sys.executable, "-c", code], **options)


def run_processes(work: Callable[..., Any], folder: Path, *arguments: Any, count: int = 2, limit: float = 300) -> list:
    """Return what ``work(*arguments)`` returns in each of ``count`` processes, by rank; fail when one of them does.

    Lightning finds the environment of a launcher there, so strategies start no processes of their own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_work, args=(work, folder, rank, count, port, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + limit
    # A process that failed leaves the others waiting in a collective: they are stopped.
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            time.sleep(1.0)
            break
        time.sleep(0.05)
    codes = [process.exitcode for process in processes]  # None: still at it; below 0: ended by that signal
    for process in processes:
        process.kill()
        process.join()
    errors = [file.read_text() for file in sorted(folder.glob("error-*"))]
    assert codes == [0] * count, "\n".join([f"exit codes by rank: {codes}", *errors])
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(count)]


def _work(work: Callable[..., Any], folder: Path, rank: int, count: int, port: int, arguments: tuple) -> None:
    os.environ |= {"TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    try:
        torch.save(work(*arguments), folder / f"result-{rank}.pt")
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # without the handlers of pytest that were forked along
