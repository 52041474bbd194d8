"""One step of several, as the very command that a user would type, in a process that ends when its parent does.

The parent holds the step's standard input open as a lifeline: when it is gone, by SIGKILL too, the step gets a SIGTERM,
at which it keeps what is complete and ends. Otherwise it would go on alone, and the same command would start it twice.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from selfcal_lightning.runtime.interruptions import INTERRUPTION

GRACE_SECONDS = 60.0


def run_step(arguments: Sequence[str]) -> int:
    """Run a command of ``selfcal`` in a process of its own and return its status.

    It is waited for at Ctrl-C and SIGTERM too: it writes what is complete before it ends.
    """
    command = [sys.executable, "-m", "selfcal_lightning.runtime.step_process", *arguments]
    step = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603
    try:
        return step.wait()
    except KeyboardInterrupt:
        if INTERRUPTION.received == signal.SIGTERM:  # Ctrl-C in a terminal reaches both of us
            step.terminate()
        step.wait(timeout=GRACE_SECONDS)
        raise
    finally:
        if step.poll() is None:
            step.kill()
        if step.stdin is not None:
            step.stdin.close()


def _watch_parent() -> None:
    """Wait for the end of standard input, then ask this process to end, then end it whatever it does."""
    # Not through `sys.stdin`, whose lock a daemon thread must not hold when the interpreter ends.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_watch_parent, daemon=True).start()
    runpy.run_module("selfcal_lightning", run_name="__main__", alter_sys=True)
