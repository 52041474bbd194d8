"""A killable process that decides whether two expressions are equal."""

import atexit
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import IO, NamedTuple, Self, cast

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.progress import say

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("math_worker.py")
# Share of the time since the first question that undecided pairs may take.
UNDECIDED_SHARE = 0.05
# CPU time per pair when little is left for undecided ones; almost all decidable pairs take less.
HURRIED_SECONDS = 0.25
MAX_MEMORY_BYTES = 2**31
CACHE_SIZE = 100_000


class MathWorker:
    """One process and its fork; both are killed when they exceed the time limit."""

    def __init__(self, *, start_seconds: float) -> None:
        command = [sys.executable, "-P", str(_WORKER), str(MAX_MEMORY_BYTES)]
        self.process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.requests, self.replies = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        line = self.replies.readline() if self.has_written(start_seconds) else ""
        if not line or "error" in json.loads(line):
            self.kill()
            silence = f"it ended, or gave no sign of life within {start_seconds} s"
            reason = json.loads(line)["error"] if line else silence
            raise RunError(f"The process for checking expressions with math-verify did not start: {reason}.")

    def has_written(self, seconds: float) -> bool:
        """Return whether the process writes something, or ends, within this time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    def ask(self, answer: str, reference: str, *, cpu_seconds: float) -> None:
        if self.process.poll() is not None or self.has_written(0.0):
            raise BrokenPipeError
        request = {"answer": answer, "reference": reference, "cpu_seconds": cpu_seconds}
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()

    def read_reply(self) -> tuple[bool | None, bool]:
        """Return whether the pair is equal (None if undecided), and whether the process is still alive."""
        line = self.replies.readline()
        return (json.loads(line)["equal"], True) if line.endswith("\n") else (None, False)

    def kill(self) -> None:
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        # If the process was gone already, its fork ends once nobody reads its answers.
        self.process.wait()
        for stream in (self.requests, self.replies):
            try:
                stream.close()
            except BrokenPipeError:
                logger.debug("The worker's pipe was already gone.")


class MathComparer:
    """Decides whether expressions are equal, in a process with limits on CPU time, wall time and memory."""

    def __init__(
        self, *, cpu_seconds: float = 4.0, wall_seconds: float = 30.0, undecided_seconds: float = 120.0
    ) -> None:
        self.cpu_seconds, self.wall_seconds, self.undecided_seconds = cpu_seconds, wall_seconds, undecided_seconds
        self.num_undecided = self.num_untried = 0
        self._spent, self._since = 0.0, math.nan
        self._cache: OrderedDict[tuple[str, str], bool | None] = OrderedDict()
        self._worker: MathWorker | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def equal(self, answer: str, reference: str) -> bool | None:
        """Return whether two expressions are equal; None if undecided."""
        if self._owner != os.getpid():  # a fork, whose parent owns the process
            self._worker, self._owner, self._lock = None, os.getpid(), threading.Lock()
        with self._lock:
            if math.isnan(self._since):
                self._since = time.monotonic()
            pair = answer, reference
            if pair not in self._cache:
                # The time for undecided pairs grows with the time since the first question.
                left = self.undecided_seconds + UNDECIDED_SHARE * (time.monotonic() - self._since) - self._spent
                if left <= 0.0:
                    if not self.num_untried:
                        told = "Undecided pairs of expressions took %.0f s: most others will be left undecided."
                        logger.warning(told, self._spent)
                    self.num_undecided, self.num_untried = self.num_undecided + 1, self.num_untried + 1
                    return None
                self._cache[pair] = self._decide(pair, min(self.cpu_seconds, max(HURRIED_SECONDS, left / 10)))
                if len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
            return self._cache[pair]

    def close(self) -> None:
        """End the process; the next question starts another."""
        if self._owner == os.getpid() and self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _decide(self, pair: tuple[str, str], cpu_seconds: float) -> bool | None:
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                worker.ask(*pair, cpu_seconds=cpu_seconds)
            except BrokenPipeError:
                worker.kill()
                worker = None
        if worker is None:
            worker = MathWorker(start_seconds=10 * self.wall_seconds)
            worker.ask(*pair, cpu_seconds=cpu_seconds)
        started = time.monotonic()
        equal, lives = worker.read_reply() if worker.has_written(self.wall_seconds) else (None, False)
        if lives:
            self._worker = worker
        else:
            worker.kill()
        if equal is None:
            self.num_undecided += 1
            self._spent += time.monotonic() - started
            logger.warning("Could not decide in time whether %r equals %r; they count as different.", *pair)
        return equal


class Undecided(NamedTuple):
    """How many pairs of expressions the process-wide comparer left undecided, and how many of them untried."""

    pairs: int
    untried: int

    @classmethod
    def so_far(cls) -> Self:
        comparer = default_comparer()
        return cls(comparer.num_undecided, comparer.num_untried)


_default: MathComparer | None = None


def allow_undecided(seconds: float) -> None:
    """Set how long all undecided pairs together may take in the process-wide comparer."""
    if not seconds > 0.0:
        raise InputError(f"Expected `undecided_seconds` to be positive, but got {seconds}.")
    default_comparer().undecided_seconds = seconds


def default_comparer() -> MathComparer:
    global _default
    if _default is None:
        _default = MathComparer()
        atexit.register(_default.close)
    return _default


def say_undecided(before: Undecided) -> int:
    """Report the pairs of expressions that were left undecided since ``before``, and return their number."""
    pairs, untried = (now - then for now, then in zip(Undecided.so_far(), before, strict=True))
    if pairs:
        were = "pair of expressions was" if pairs == 1 else "pairs of expressions were"
        rest = f", {untried:,} of them untried for want of time" if untried else ""
        say(f"{pairs:,} {were} left undecided and count as different{rest}.")
    return pairs
