"""Signals in the worker processes of a data loader: only the process that trains decides when they end."""

from __future__ import annotations

import os
import signal
import threading

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def outlive_signals(worker_id: int) -> None:
    """Let this worker of a data loader outlive a signal that a launcher sends to the whole process group.

    torchrun sends SIGTERM to a rank's whole group. A worker that dies of it would end its trainer with an error, before
    the trainer has written its checkpoint. The parent's own SIGTERM, by which a loader ends a worker that hangs, still
    ends it, and so does the parent's end.

    Args:
        worker_id: Number of the worker, unused.
    """
    # Blocked in this thread, and so in all that it starts, the signals wait for the one that asks who sent them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    parent = os.getppid()

    def listen() -> None:
        while True:
            received = signal.sigwaitinfo(STOP_SIGNALS)
            if received.si_signo == signal.SIGTERM and received.si_pid == parent:
                os._exit(0)

    threading.Thread(target=listen, name="signals", daemon=True).start()
