"""Signals that ask a run to stop: the handler only remembers them, and the work asks at places where it can stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.interruptions import INTERRUPTION

STOPPED_STATUS = 75  # EX_TEMPFAIL of sysexits.h: not done, start the same command again
ONE_REQUEST_SECONDS = 3.0


class PreemptedError(SystemExit):
    """A signal asked the run to stop, and it did at a place from which it can go on.

    The process ends with status 75 unless somebody catches it. Not an ``Exception``, like ``KeyboardInterrupt``: what
    is complete is kept on the way out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(STOPPED_STATUS)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopSignals:
    """Handlers of signals that set a flag, and nothing else.

    A signal that comes again acts as it would have without the handlers. Launchers and schedulers may deliver one
    request twice within moments, so what follows in three seconds is the same one. A handler that was there before, in
    Python, is called too.

    Args:
        names: Names of the signals, such as "SIGTERM".

    Attributes:
        received: Name of the first signal that came, or None.
    """

    def __init__(self, names: Sequence[str]) -> None:
        known = signal.Signals.__members__
        if unknown := [name for name in names if name not in known or name in {"SIGKILL", "SIGSTOP"}]:
            raise InputError(
                f"Expected `signals` to be names of signals that can be handled, but got {unknown[0]!r}. "
                'Take "SIGTERM", "SIGUSR1" or "SIGUSR2", for example.'
            )
        self.signals = [signal.Signals[name] for name in names]
        self.received: str | None = None
        self._armed = False
        self._earlier: dict[int, Any] = {}
        self._came_at: dict[int, float] = {}

    def install(self) -> None:
        """Put the handlers in place, also where somebody has replaced them since; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._armed:
            self._earlier = {number: signal.getsignal(number) for number in self.signals}
            self.forget()
            self._armed = True
        for number in self.signals:
            signal.signal(number, self._remember)

    def restore(self) -> None:
        """Put back the handlers that were there before ``install``. Where others came on top, those stay."""
        self._armed = False
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def forget(self) -> None:
        """Begin anew: the next signal is a first one."""
        self.received, self._came_at = None, {}

    def raise_if_received(self) -> None:
        """Raise PreemptedError when a signal came."""
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
            # Those that end the process at once are what this one is in the place of.
            if callable(earlier) and earlier not in (signal.default_int_handler, INTERRUPTION.handle):
                earlier(number, frame)

    def _pass_on(self, number: int) -> None:
        """Send the signal once more, to the handler that was there before."""
        signal.signal(number, self._earlier.get(number) or signal.SIG_DFL)
        os.kill(os.getpid(), number)


Interrupt = Callable[[], None]


def never() -> None:
    """Ask nobody: the work is not interrupted."""
