"""A pool of killable processes that decide whether two expressions are equal."""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("math_worker.py")
HURRIED_SECONDS = 2.0


class MathWorker:
    """One process; it is killed when it is late, and never reused after that."""

    def __init__(self, *, max_memory_bytes: int, cpu_seconds: float, start_seconds: float) -> None:
        command = [sys.executable, "-P", str(_WORKER), str(max_memory_bytes), str(cpu_seconds)]
        self.process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            line = self.read_line() if selector.select(start_seconds) else ""
        if not line or "error" in json.loads(line):
            self.kill()
            reason = json.loads(line)["error"] if line else f"no sign of life within {start_seconds} s"
            raise RuntimeError(f"The process for checking expressions with math-verify did not start: {reason}.")

    def ask(self, answer: str, reference: str) -> None:
        """Send a request; the reply is read with `read_reply`."""
        self.process.stdin.write(json.dumps({"answer": answer, "reference": reference}) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def read_line(self) -> str:
        """Return the next line, or "" when the process has ended."""
        return self.process.stdout.readline()  # type: ignore[union-attr]

    def read_reply(self) -> tuple[bool | None, bool]:
        """Return (equal or None where undecided, whether the process lives on)."""
        line = self.read_line()
        return (json.loads(line)["equal"], True) if line.endswith("\n") else (None, False)

    def kill(self) -> None:
        """End the process and close its pipes."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                logger.debug("The worker's pipe was already gone.")


class MathPool:
    """Decides equality of expressions in processes with limits on CPU time, wall time and memory.

    A pair that exceeds a limit is undecided (None); its process is killed and another started at the next need.
    Decisions are remembered. Processes start at the first question, not in the constructor, and belong to the process
    that asked: a forked child starts its own.

    Args:
        num_workers: Most processes at a time.
        cpu_seconds: CPU time that a pair may take; independent of the load of the machine.
        wall_seconds: Wall time after which a pair is given up at the latest.
        max_memory_bytes: Address space of each process.
        cache_size: Decisions that are remembered.
        patience_seconds: Wall time that undecided pairs may take in all; the pairs after that have
            ``HURRIED_SECONDS`` each, so that a file full of bombs does not take days.
    """

    def __init__(
        self,
        *,
        num_workers: int = 2,
        cpu_seconds: float = 4.0,
        wall_seconds: float = 30.0,
        max_memory_bytes: int = 2**31,
        cache_size: int = 100_000,
        patience_seconds: float = 120.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"Expected `num_workers` to be a positive integer, but got {num_workers}.")
        if min(cpu_seconds, wall_seconds) <= 0.0:
            raise ValueError(f"Expected the time limits to be positive, but got {cpu_seconds} and {wall_seconds}.")
        self.num_workers = num_workers
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self.max_memory_bytes = max_memory_bytes
        self.cache_size = cache_size
        self.patience_seconds = patience_seconds
        self.num_undecided = 0
        self._spent = 0.0  # wall time on undecided pairs
        self._cache: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._idle: list[MathWorker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Return, for each pair (answer, reference), whether they are equal, or None where it was not decided."""
        if self._owner != os.getpid():
            self._idle, self._owner, self._lock = [], os.getpid(), threading.Lock()
        with self._lock:
            decided = {pair: self._cache[pair] for pair in pairs if pair in self._cache}
            decided |= self._decide([pair for pair in dict.fromkeys(pairs) if pair not in decided])
            self._cache |= decided
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return [decided[pair] for pair in pairs]

    def close(self) -> None:
        """End the processes; the pool starts new ones when it is asked again."""
        if self._owner == os.getpid():
            while self._idle:
                self._idle.pop().kill()

    def _decide(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], bool | None]:
        decided: dict[tuple[str, str], bool | None] = {}
        waiting = deque(pairs)
        with selectors.DefaultSelector() as selector:
            while waiting or selector.get_map():
                while waiting and len(selector.get_map()) < self.num_workers:
                    worker = self._send(waiting[0])
                    deadline = time.monotonic() + self._limit()
                    task = (worker, waiting.popleft(), deadline, time.monotonic())
                    selector.register(worker.process.stdout, selectors.EVENT_READ, task)  # type: ignore[arg-type]
                tasks = [key.data for key in selector.get_map().values()]
                ready = selector.select(max(0.0, min(task[2] for task in tasks) - time.monotonic()))
                finished = [key.data for key, _ in ready]
                late = [task for task in tasks if task not in finished and task[2] <= time.monotonic()]
                for task in finished + late:
                    worker, pair, _, started = task
                    selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
                    seconds = time.monotonic() - started
                    decided[pair] = self._receive(worker, pair, is_late=task in late, seconds=seconds)
        return decided

    def _send(self, pair: tuple[str, str]) -> MathWorker:
        while self._idle:
            worker = self._idle.pop()
            try:
                worker.ask(*pair)
            except BrokenPipeError:
                worker.kill()
            else:
                return worker
        worker = MathWorker(
            max_memory_bytes=self.max_memory_bytes, cpu_seconds=self.cpu_seconds, start_seconds=10 * self.wall_seconds
        )
        worker.ask(*pair)
        return worker

    def _limit(self) -> float:
        """Return the wall time of the next pair."""
        return self.wall_seconds if self._spent < self.patience_seconds else min(HURRIED_SECONDS, self.wall_seconds)

    def _lose_patience(self, seconds: float) -> None:
        """Count the time of an undecided pair, and say when from here on pairs have less."""
        was_patient = self._spent < self.patience_seconds
        self._spent += seconds
        if was_patient and self._spent >= self.patience_seconds:
            logger.warning(
                "%d pairs could not be decided, and took %.0f s in all: from here on each pair has %g s.",
                self.num_undecided, self._spent, HURRIED_SECONDS,
            )  # fmt: skip

    def _receive(self, worker: MathWorker, pair: tuple[str, str], *, is_late: bool, seconds: float) -> bool | None:
        equal, lives = (None, False) if is_late else worker.read_reply()
        if lives:
            self._idle.append(worker)
        else:
            worker.kill()
        if equal is None:
            self.num_undecided += 1
            logger.warning("Could not decide within the limits whether %r equals %r; it counts as different.", *pair)
            self._lose_patience(seconds)
        return equal


_default_pool: MathPool | None = None


def default_pool() -> MathPool:
    """Return the process-wide pool; it is ended when the interpreter exits."""
    global _default_pool
    if _default_pool is None:
        _default_pool = MathPool()
        atexit.register(_default_pool.close)
    return _default_pool
