"""Python processes; and several as torchrun starts them, but forked: what is imported need not be imported again."""

import atexit
import multiprocessing
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
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


# What the server of forks imports once; it is started with the first process that is asked for.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "selfcal_lightning.callbacks.generation", "selfcal_lightning.training.self_calibration",
        "selfcal_lightning.cli", "selfcal_lightning.commands.lightning_cli", "selfcal_lightning.commands.generate",
        "transformers.models.llama.modeling_llama",
    ]
)  # fmt: skip


def start_forked(words: Sequence[str], output: Path, *, environment: Mapping[str, str] | None = None) -> BaseProcess:
    """Start a script, or ``-m`` and a module, with its arguments, in a process that has the libraries imported.

    It is a fork of a server that has only imported them, not of the tests. ``environment`` is added to that of the
    tests; what the process prints is appended to ``output``.
    """
    process = _SERVER.Process(target=_run_script, args=(list(words), output, {**os.environ, **(environment or {})}))
    process.start()
    Finalize(process, process.kill, exitpriority=1)  # what a failed test leaves: pytest would wait for it
    return process


def run_forked(words: Sequence[str], output: Path, *, ranks: int = 1, limit: float = 300) -> int:
    """Run a script as `start_forked` does, and return its exit status; below 0: ended by that signal.

    Several ``ranks`` run in as many processes, in the environment that torchrun would give them.
    """
    port = free_port()
    given = [_rank(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{}]
    return wait_for([start_forked(words, output, environment=one) for one in given], limit=limit)


def wait_for(processes: Sequence[BaseProcess], *, limit: float = 300) -> int:
    """Wait until processes have ended, and return 0 or the status of the first to fail.

    As torchrun does, that one's failure is a SIGTERM to the others, and SIGKILL half a minute later.
    """
    status, end = 0, time.monotonic() + limit
    while any(process.is_alive() for process in processes):
        if time.monotonic() > end:
            for process in processes:
                process.kill()
            assert status, f"{processes} did not end in {limit:g} seconds"
        time.sleep(0.02)
        if status == 0 and (status := _failed(processes)):
            end = min(end, time.monotonic() + 30.0)
            for process in processes:
                process.terminate()
    return status or _failed(processes)


def _failed(processes: Sequence[BaseProcess]) -> int:
    return next((process.exitcode for process in processes if process.exitcode), 0)


def _run_script(words: list[str], output: Path, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, 1)
    os.dup2(written, 2)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # as an ordinary process does at its end, and multiprocessing's do not


def run_processes(work: Callable[..., Any], folder: Path, *arguments: Any, count: int = 2) -> list:
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
    end = time.monotonic() + 300
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


def _rank(rank: int, count: int, port: int) -> dict[str, str]:
    """Return what torchrun puts into the environment of a process."""
    return {
        "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
        "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
    }  # fmt: skip


def _work(work: Callable[..., Any], folder: Path, rank: int, count: int, port: int, arguments: tuple) -> None:
    os.environ |= _rank(rank, count, port)
    try:
        torch.save(work(*arguments), folder / f"result-{rank}.pt")
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # without the handlers of pytest that were forked along


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file grow above ``size`` bytes: what a quota does, and without a disk of its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
