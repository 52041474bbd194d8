"""A pool of killable processes that decide whether two expressions are equal."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.progress import say

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("math_worker.py")
# Share of the time since the first question that undecided pairs may take.
UNDECIDED_SHARE = 0.05
# CPU time per pair when little is left for undecided ones; almost all decidable pairs take less.
HURRIED_SECONDS = 0.25


class MathWorker:
    """One process and its fork; they are killed when they are late."""

    def __init__(self, *, max_memory_bytes: int, start_seconds: float) -> None:
        command = [sys.executable, "-P", str(_WORKER), str(max_memory_bytes)]
        self.process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            line = self.read_line() if selector.select(start_seconds) else ""
        if not line or "error" in json.loads(line):
            self.kill()
            reason = json.loads(line)["error"] if line else f"no sign of life within {start_seconds} s"
            raise RunError(f"The process for checking expressions with math-verify did not start: {reason}.")

    def ask(self, answer: str, reference: str, *, cpu_seconds: float) -> None:
        """Send a request; `read_reply` returns the reply."""
        if self.process.poll() is not None or select.select([cast(IO[str], self.process.stdout)], [], [], 0.0)[0]:
            raise BrokenPipeError
        request = {"answer": answer, "reference": reference, "cpu_seconds": cpu_seconds}
        self.process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]

    def read_line(self) -> str:
        return self.process.stdout.readline()  # type: ignore[union-attr]

    def read_reply(self) -> tuple[bool | None, bool]:
        """Return (equal or None where undecided, whether the process lives on)."""
        line = self.read_line()
        return (json.loads(line)["equal"], True) if line.endswith("\n") else (None, False)

    def kill(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        # If the process was gone already, its fork ends once nobody reads its answers.
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                logger.debug("The worker's pipe was already gone.")


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A pair in progress."""

    worker: MathWorker
    pair: tuple[str, str]
    started: float


class MathPool:
    """Decides equality of expressions in processes with limits on CPU time, wall time and memory."""

    def __init__(
        self,
        *,
        num_workers: int = 2,
        cpu_seconds: float = 4.0,
        wall_seconds: float = 30.0,
        max_memory_bytes: int = 2**31,
        cache_size: int = 100_000,
        undecided_seconds: float = 120.0,
    ) -> None:
        self.num_workers, self.max_memory_bytes, self.cache_size = num_workers, max_memory_bytes, cache_size
        self.cpu_seconds, self.wall_seconds, self.undecided_seconds = cpu_seconds, wall_seconds, undecided_seconds
        self.num_undecided = self.num_untried = 0
        self._spent, self._since = 0.0, math.nan
        self._cache: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._idle: list[MathWorker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
        """Return for each pair (answer, reference) whether they are equal; None if undecided."""
        if self._owner != os.getpid():
            self._idle, self._owner, self._lock = [], os.getpid(), threading.Lock()
        with self._lock:
            if math.isnan(self._since):
                self._since = time.monotonic()
            decided = {pair: self._cache[pair] for pair in pairs if pair in self._cache}
            decided |= self._decide([pair for pair in dict.fromkeys(pairs) if pair not in decided])
            while len(self._cache) > self.cache_size:
                self._cache.popitem(last=False)
        return [decided[pair] for pair in pairs]

    def close(self) -> None:
        if self._owner == os.getpid():
            while self._idle:
                self._idle.pop().kill()

    def _decide(self, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], bool | None]:
        decided: dict[tuple[str, str], bool | None] = dict.fromkeys(pairs)
        waiting = deque(pairs)
        with selectors.DefaultSelector() as selector:
            while self._fill(selector, waiting):
                asked = [key.data for key in selector.get_map().values()]
                first = min(one.started for one in asked) + self.wall_seconds
                ready = selector.select(max(0.0, first - time.monotonic()))
                finished = [key.data for key, _ in ready]
                late = [
                    one for one in asked if one not in finished and one.started + self.wall_seconds <= time.monotonic()
                ]
                for one in finished + late:
                    selector.unregister(one.worker.process.stdout)  # type: ignore[arg-type]
                    decided[one.pair] = self._cache[one.pair] = self._receive(one, is_late=one in late)
        return decided

    def _fill(self, selector: selectors.BaseSelector, waiting: deque[tuple[str, str]]) -> bool:
        """Send waiting pairs to free processes. Returns whether any process is at work."""
        while waiting and len(selector.get_map()) < self.num_workers:
            pair, seconds = waiting.popleft(), self._cpu_limit()
            if seconds is None:
                self._leave_untried()
                continue
            worker = self._send(pair, seconds)
            asked = _Asked(worker, pair, time.monotonic())
            selector.register(worker.process.stdout, selectors.EVENT_READ, asked)  # type: ignore[arg-type]
        return bool(selector.get_map())

    def _cpu_limit(self) -> float | None:
        """Return the CPU time that the next pair may take; None when the time for undecided pairs is used up."""
        left = self.undecided_seconds + UNDECIDED_SHARE * (time.monotonic() - self._since) - self._spent
        return None if left <= 0.0 else min(self.cpu_seconds, max(HURRIED_SECONDS, left / 10))

    def _leave_untried(self) -> None:
        if not self.num_untried:
            logger.warning(
                "Undecided pairs of expressions took %.0f s: most others will be left undecided.", self._spent
            )
        self.num_undecided, self.num_untried = self.num_undecided + 1, self.num_untried + 1

    def _send(self, pair: tuple[str, str], cpu_seconds: float) -> MathWorker:
        while self._idle:
            worker = self._idle.pop()
            try:
                worker.ask(*pair, cpu_seconds=cpu_seconds)
            except BrokenPipeError:
                worker.kill()
            else:
                return worker
        worker = MathWorker(max_memory_bytes=self.max_memory_bytes, start_seconds=10 * self.wall_seconds)
        worker.ask(*pair, cpu_seconds=cpu_seconds)
        return worker

    def _receive(self, asked: _Asked, *, is_late: bool) -> bool | None:
        equal, lives = (None, False) if is_late else asked.worker.read_reply()
        if lives:
            self._idle.append(asked.worker)
        else:
            asked.worker.kill()
        if equal is None:
            self.num_undecided += 1
            self._spent += time.monotonic() - asked.started
            logger.warning("Could not decide in time whether %r equals %r; they count as different.", *asked.pair)
        return equal


@dataclass(frozen=True, slots=True)
class Undecided:
    """How many pairs of expressions the process-wide pool left undecided, and how many of them untried."""

    pairs: int
    untried: int

    @classmethod
    def so_far(cls) -> Undecided:
        pool = default_pool()
        return cls(pool.num_undecided, pool.num_untried)

    def __str__(self) -> str:
        pairs = "pair of expressions was" if self.pairs == 1 else "pairs of expressions were"
        untried = f", {self.untried:,} of them untried for want of time" if self.untried else ""
        return f"{self.pairs:,} {pairs} left undecided and count as different{untried}"


_default_pool: MathPool | None = None


def allow_undecided(seconds: float) -> None:
    """Set how long all undecided pairs together may take in the process-wide pool."""
    if not seconds > 0.0:
        raise InputError(f"Expected `undecided_seconds` to be positive, but got {seconds}.")
    default_pool().undecided_seconds = seconds


def default_pool() -> MathPool:
    global _default_pool
    if _default_pool is None:
        _default_pool = MathPool()
        atexit.register(_default_pool.close)
    return _default_pool


def say_undecided(before: Undecided) -> int:
    """Report the pairs of expressions that were left undecided since ``before``, and return their number."""
    now = Undecided.so_far()
    found = Undecided(now.pairs - before.pairs, now.untried - before.untried)
    if found.pairs:
        say(f"{found}.")
    return found.pairs
