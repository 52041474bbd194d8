"""Progress of long runs: a bar on a terminal, plain lines in a log file, both on standard error."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from tqdm import tqdm

LINE_SECONDS = 30.0
SETTLED_SECONDS = 5.0  # from the first finished response on; those before it say little about the rest
QUICK_SECONDS = 1.0
LOOK_SECONDS = 1.0
Item = TypeVar("Item")
_said = time.monotonic()  # when this process last printed something, or started


class Progress:
    """Counts finished responses; shows the rate and the time left."""

    def __init__(
        self, total: int, *, label: str, unit: str = "responses", enabled: bool = True, only_if_slow: bool = False
    ) -> None:
        self.total, self.label, self.unit = total, label, unit
        self.done = self.unreadable = 0
        self._enabled, self._only_if_slow = enabled and total > 0, only_if_slow
        self._bar: tqdm | None = None
        self._started = self._written = 0.0
        self._first: tuple[float, int] | None = None  # when something was finished for the first time, and how much

    def __enter__(self) -> Self:
        self._started = self._written = time.monotonic()
        if self._enabled and sys.stderr.isatty():
            delay = QUICK_SECONDS if self._only_if_slow else 0.0
            self._bar = tqdm(total=self.total, desc=self.label, unit=f" {self.unit}", dynamic_ncols=True, delay=delay)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._enabled and (self._written > self._started or not self._only_if_slow):
            say(self.line())

    def update(self, responses: int, *, unreadable: int = 0) -> None:
        self.done += responses
        self._first = self._first or (time.monotonic(), self.done)
        self.unreadable += unreadable
        if self._bar is not None:
            self._bar.update(responses)
            if self.unreadable:
                self._bar.set_postfix_str(f"{self.unreadable / self.done:.1%} unreadable", refresh=False)
        elif self._enabled and time.monotonic() - _said >= LINE_SECONDS:
            self._written = time.monotonic()
            if self.done < self.total:  # else the end says it
                say(self.line())

    def line(self) -> str:
        rate = self.done / max(time.monotonic() - self._started, 1e-9)
        seconds = self.seconds_left()
        left = "time left unknown" if seconds is None else f"{tqdm.format_interval(seconds)} left"
        unreadable = f", {self.unreadable / self.done:.1%} unreadable" if self.unreadable else ""
        return f"{self.label}: {self.done:,} of {self.total:,} {self.unit}, {rate:.1f} a second{unreadable}, {left}"

    def seconds_left(self) -> float | None:
        """Return the estimated seconds left, from the rate since the first finished response; None while unknown."""
        if self.done >= self.total:
            return 0.0
        if self._first is None:  # an engine finishes nothing while it fills its first batch
            return None
        since, before = self._first
        elapsed, finished = time.monotonic() - since, self.done - before
        return (self.total - self.done) * elapsed / finished if finished and elapsed >= SETTLED_SECONDS else None


class Stage:
    """Reports a long step that cannot be counted, or a series of short ones, after half a minute without output."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._is_over = threading.Event()
        self._started = 0.0
        self._teller = threading.Thread(target=self._tell, name=label, daemon=True)

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._teller.join()

    def _tell(self) -> None:
        while not self._is_over.wait(min(LOOK_SECONDS, max(LINE_SECONDS, 0.01))):
            if time.monotonic() - _said >= LINE_SECONDS:
                say(f"{self.label}: {time.monotonic() - self._started:.0f} s so far")


def counted(items: Iterable[Item], progress: Progress) -> Iterator[Item]:
    for item in items:
        yield item
        progress.update(1)


def say(text: str) -> None:
    """Write a line to standard error without breaking a progress bar."""
    global _said
    _said = time.monotonic()
    tqdm.write(text, file=sys.stderr)


def tell(text: str, *written: str) -> None:
    """Print the result of a verb to standard output, with the files that hold it."""
    sys.stdout.write(f"{text}\nWritten: {', '.join(written)}\n")
