"""Signals that ask a run to stop. The handler only sets a flag; the work checks it where it can stop safely."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from selfcal_lightning.core.errors import InputError

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interruption:
    """The signals that ask this process to exit at once.

    A library that is interrupted during its import or in a C callback may turn KeyboardInterrupt into another error;
    ``received`` tells what really happened.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._process: int | None = None
        self._came_at = 0.0

    def listen(self) -> None:
        """Install the handlers, except for signals that the parent process ignores or handles."""
        self._process = os.getpid()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.handle)
        sys.unraisablehook = partial(self.ask_again, sys.unraisablehook)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal and raise KeyboardInterrupt; a second one, or one in a forked child, ends the process."""
        is_second = self.received is not None and time.monotonic() - self._came_at > ONE_REQUEST_SECONDS
        if is_second or os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received, self._came_at = signal.Signals(number), time.monotonic()
        raise KeyboardInterrupt

    def ask_again(self, otherwise: Callable[[Any], None], ignored: Any) -> None:
        """Send the signal again where Python ignored its KeyboardInterrupt, as it does in ``__del__``."""
        if self.received is None or not isinstance(ignored.exc_value, KeyboardInterrupt):
            return otherwise(ignored)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), self.received))
        timer.daemon = True
        return timer.start()

    def ignore(self) -> None:
        """Ignore further signals while the last message is written."""
        for number in NAMES:
            if signal.getsignal(number) == self.handle:
                signal.signal(number, signal.SIG_IGN)

    @property
    def name(self) -> str:
        return NAMES[self.received or signal.SIGINT]

    @property
    def status(self) -> int:
        """Exit status: 128 plus the signal number, as in shells."""
        return 128 + (self.received or signal.SIGINT)


INTERRUPTION = Interruption()


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Set what an interruption of the block says: what is kept and how to continue."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        error.add_note(kept())
        raise


def what_is_kept(error: BaseException) -> str | None:
    """Return the message of the innermost :func:`keeping`, even if a library wrapped the error in its own."""
    found: str | None = None
    link: BaseException | None = error
    while link is not None:
        found = next(iter(getattr(link, "__notes__", ())), found)
        link = link.__cause__ or link.__context__
    return found


STOPPED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not done, start the same command again
ONE_REQUEST_SECONDS = 3.0


class PreemptedError(SystemExit):
    """A signal asked the run to stop, and it stopped where it can resume: no ``Exception``, and exit status 75."""

    def __init__(self, message: str) -> None:
        super().__init__(STOPPED_STATUS)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopSignals:
    """Signal handlers that only set a flag."""

    def __init__(self, names: Sequence[str]) -> None:
        known = signal.Signals.__members__
        if unknown := [name for name in names if name not in known or name in {"SIGKILL", "SIGSTOP"}]:
            raise InputError(f'`signals` must be names such as "SIGTERM", "SIGUSR1" or "SIGUSR2", got {unknown[0]!r}.')
        self.signals = [signal.Signals[name] for name in names]
        self.received: str | None = None
        self._armed = False
        self._earlier: dict[int, Any] = {}
        self._came_at: dict[int, float] = {}

    def install(self) -> None:
        """Install the handlers, even if they were replaced since; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._armed:
            self._earlier = {number: signal.getsignal(number) for number in self.signals}
            self.forget()
            self._armed = True
        for number in self.signals:
            signal.signal(number, self._remember)

    def restore(self) -> None:
        """Restore the handlers from before ``install``, unless others have replaced ours since."""
        self._armed = False
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def forget(self) -> None:
        """Reset: the next signal counts as the first."""
        self.received, self._came_at = None, {}

    def raise_if_received(self) -> None:
        if self.received is not None:
            raise PreemptedError(f"{self.received} asked this run to stop")

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._armed or now - self._came_at.get(number, now) > ONE_REQUEST_SECONDS:
            self._pass_on(number)
        elif number not in self._came_at:
            self._came_at[number] = now
            self.received = self.received or signal.Signals(number).name
            earlier = self._earlier[number]
            # Handlers that end the process at once are what this one replaces.
            if callable(earlier) and earlier not in (signal.default_int_handler, INTERRUPTION.handle):
                earlier(number, frame)

    def _pass_on(self, number: int) -> None:
        signal.signal(number, self._earlier.get(number) or signal.SIG_DFL)
        os.kill(os.getpid(), number)


Interrupt = Callable[[], None]


def never() -> None:
    """Do nothing: the default of callbacks."""
