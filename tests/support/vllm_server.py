"""vLLM's own server as a process of its own: a port for it, and when it listens."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

START_SECONDS = 480.0


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until ``url`` answers; fail with the end of the log where the server ends or never does."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5.0) as answer:  # noqa: S310
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the server was not ready: {log.read_text(errors='replace')[-3000:]}")
