"""Ctrl-C and SIGTERM: both raise KeyboardInterrupt, and what is lost or kept on the way out is said in one line."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interruption:
    """The signals by which this process is asked to end at once.

    A library that is interrupted while it is imported, or in a callback of C code, may turn KeyboardInterrupt into an
    error of its own: ``received`` tells what really happened.

    Attributes:
        received: The first signal that came, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._process: int | None = None

    def listen(self) -> None:
        """Put the handlers in place; what the parent ignores or has decided stays as it is."""
        self._process = os.getpid()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal and raise KeyboardInterrupt; a forked child ends as it would without a handler."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.received = self.received or signal.Signals(number)
        raise KeyboardInterrupt

    def ignore(self) -> None:
        """Let nothing cut the last words short."""
        for number in NAMES:
            if signal.getsignal(number) == self.handle:
                signal.signal(number, signal.SIG_IGN)

    @property
    def name(self) -> str:
        """What stopped the process, in words."""
        return NAMES[self.received or signal.SIGINT]

    @property
    def status(self) -> int:
        """Exit status: 128 and the number of the signal, as shells have it."""
        return 128 + (self.received or signal.SIGINT)


# One a process, as the handlers of signals are.
INTERRUPTION = Interruption()


@contextmanager
def keeping(kept: Callable[[], str]) -> Iterator[None]:
    """Tell whoever interrupts the block what is kept, and how to go on, in a sentence or two.

    Args:
        kept: Returns that; asked once the block has ended. The innermost block that is interrupted has the word.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        error.add_note(kept())
        raise


def what_is_kept(error: BaseException) -> str | None:
    """Return what the innermost :func:`keeping` said, also where a library has put another error on top of it."""
    found: str | None = None
    link: BaseException | None = error
    while link is not None:
        found = next(iter(getattr(link, "__notes__", ())), found)
        link = link.__cause__ or link.__context__
    return found
