"""Processes that wait for each other, for hours, through files on a shared disk; a collective would time out."""

import json
import logging
import os
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.files import to_json, write_atomically
from selfcal_lightning.core.progress import say
from selfcal_lightning.core.signals import INTERRUPTION, Interrupt, PreemptedError, never

logger = logging.getLogger(__name__)

BEAT_SECONDS = 5.0
POLL_SECONDS = 0.5
SHOWS = 6  # attempts to write a state
STOPPED = "stopped"


class Rendezvous:
    """A barrier for ``world_size`` processes that share a folder."""

    def __init__(
        self, folder: Path, *, rank: int, world_size: int, stall_timeout: float = 600.0, interrupt: Interrupt = never
    ) -> None:
        self.folder, self.rank, self.world_size, self.stall_timeout = folder, rank, world_size, stall_timeout
        self.interrupt = interrupt
        self._looked_at = 0.0
        self._beat = 0
        self._lock = threading.Lock()
        self._seen: dict[int, dict[str, Any]] = {}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Show the other processes that the block runs, and then whether it is done, failed or stopped."""
        if self.world_size == 1:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        stop = threading.Event()
        self._show_surely("working")

        def beat() -> None:
            while not stop.wait(BEAT_SECONDS):
                try:
                    self._show("working")
                except OSError as error:  # a full or stale disk for a moment; the others wait for `stall_timeout`
                    logger.warning("No sign of life could be written to %s: %s.", self.folder, error)

        thread = threading.Thread(target=beat, name="rendezvous", daemon=True)
        thread.start()
        state, problem = "failed", ""
        try:
            yield
            state = "done"
        except PreemptedError as error:
            state, problem = STOPPED, str(error)
            raise
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
            raise
        finally:
            stop.set()
            thread.join()
            self._show_surely(state, problem)

    @contextmanager
    def together(self) -> Iterator[Self]:
        with self.working():
            yield self
        self.meet()

    def meet(self, on_wait: Callable[[], None] = never) -> None:
        """Wait until every process is done, and call ``on_wait`` every few seconds meanwhile."""
        try:
            for rank in range(self.world_size) if self.world_size > 1 else ():
                self._wait_for(rank, on_wait)
        except PreemptedError as error:
            self._show(STOPPED, str(error))
            raise

    def check(self) -> None:
        """Raise PreemptedError if this or another working process was asked to stop. Cheap enough to call often."""
        self.interrupt()
        if self.world_size == 1 or time.monotonic() - self._looked_at < POLL_SECONDS:
            return
        self._looked_at = time.monotonic()
        for rank in range(self.world_size):
            if (state := self._read(rank)).get("state") == STOPPED:
                raise PreemptedError(f"Process {rank} stopped: {state['problem']}")

    def _wait_for(self, rank: int, on_wait: Callable[[], None]) -> None:
        seen: dict[str, Any] = {}
        since = told = time.monotonic()
        while True:
            state = self._read(rank)
            if state.get("state") == "done":
                return
            self.check()
            if state.get("state") == "failed":
                raise RunError(f"Expected process {rank} to finish its share, but it failed: {state['problem']}")
            if state != seen:
                seen, since = state, time.monotonic()
            if time.monotonic() - told > BEAT_SECONDS:
                on_wait()
                told = time.monotonic()
            silence = time.monotonic() - since
            if silence > self.stall_timeout:
                found = f"no sign of life for {silence:.0f} s"
                way_out = "The same command continues. Several machines need a shared disk."
                raise RunError(f"Expected process {rank} to finish its share, but got {found}. {way_out}")
            time.sleep(POLL_SECONDS)

    def _file(self, rank: int) -> Path:
        return self.folder / f"{rank}.json"

    def _read(self, rank: int) -> dict[str, Any]:
        """Return a process's state; its last known one while the file is missing or being replaced."""
        try:
            self._seen[rank] = json.loads(self._file(rank).read_text())
        except OSError:
            return self._seen.get(rank, {})
        return self._seen[rank]

    def _show_surely(self, state: str, problem: str = "") -> None:
        for _ in range(SHOWS - 1):
            try:
                return self._show(state, problem)
            except OSError as error:
                logger.warning("%s could not be written to %s: %s. Trying again.", state, self.folder, error)
                time.sleep(BEAT_SECONDS)
        return self._show(state, problem)

    def _show(self, state: str, problem: str = "") -> None:
        with self._lock:
            self._beat += 1
            shown = {"state": state, "beat": self._beat, "problem": problem}
            write_atomically(self._file(self.rank), to_json(shown), durable=False)


GRACE_SECONDS = 60.0


def run_step(arguments: Sequence[str]) -> int:
    with _started(arguments) as step:
        return step.wait()


@contextmanager
def run_beside(arguments: Sequence[str], log: Path) -> Iterator[None]:
    """Run a ``selfcal`` command beside the block, with its output in ``log``; its failure is told and not raised."""
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"Meanwhile, with its output in {log}: {shlex.join(['selfcal', *arguments])}")
    with log.open("w") as file, _started(arguments, stdout=file, stderr=subprocess.STDOUT) as step:
        yield
        if status := step.wait():
            say(f"`selfcal {arguments[0]}` beside it ended with status {status}; {log} says why.")


@contextmanager
def _started(arguments: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """After Ctrl-C or SIGTERM the child is still waited for, since it saves finished work before it exits."""
    command = [sys.executable, "-m", "selfcal_lightning.core.processes", *arguments]
    step = subprocess.Popen(command, stdin=subprocess.PIPE, **options)  # noqa: S603
    try:
        yield step
    except KeyboardInterrupt:
        if INTERRUPTION.received == signal.SIGTERM:  # Ctrl-C in a terminal reaches both of us
            step.terminate()
        with suppress(subprocess.TimeoutExpired):
            step.wait(timeout=GRACE_SECONDS)
        raise
    finally:
        if step.poll() is None:
            step.kill()
        if step.stdin is not None:
            step.stdin.close()


def run_shown(number: str, arguments: Sequence[str]) -> None:
    sys.stdout.write(f"\n[{number}] {shlex.join(['selfcal', *arguments])}\n")
    sys.stdout.flush()
    if status := run_step(arguments):
        ended = f"Step {number}, `selfcal {arguments[0]}`, ended with status {status}; its own message stands above."
        raise RunError(f"{ended} The same command continues from what is there.")


def watch_parent(stop: Callable[[], object], grace_seconds: float) -> None:
    """When standard input closes, ask this process to ``stop``, then kill it if it does not."""
    # Not through `sys.stdin`, whose lock a daemon thread must not hold when the interpreter ends.
    while os.read(0, 1024):
        pass
    stop()
    time.sleep(grace_seconds)
    os._exit(1)


if __name__ == "__main__":
    terminate = partial(os.kill, os.getpid(), signal.SIGTERM)
    threading.Thread(target=watch_parent, args=(terminate, GRACE_SECONDS), daemon=True).start()
    runpy.run_module("selfcal_lightning", run_name="__main__", alter_sys=True)
