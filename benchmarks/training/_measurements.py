"""Keeping measurements as they are made, so that a benchmark that was stopped goes on where it was, and peak memory."""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

MIB = 2**20
MADE_WITH = "made with"


class Measurements:
    """Measured values by key, one JSON line each in ``path``; what is there already is not measured again."""

    def __init__(self, path: Path, made_with: Mapping[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._values: dict[str, Any] = {}
        for line in lines:
            try:
                key, value = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that a kill cut short
            self._values[key] = value
        if self._values and self._values.get(MADE_WITH) != made_with:
            raise SystemExit(
                f"Expected the measurements in {path} to be made with {dict(made_with)}, but they were made with "
                f"{self._values.get(MADE_WITH)}. Start anew with --fresh, or name another file with --cells."
            )
        self.once(MADE_WITH, lambda: dict(made_with))

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def once(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the value of ``key``, measured now where it is not there yet."""
        if key not in self._values:
            self._values[key] = measure()
            with self.path.open("a") as file:
                file.write(json.dumps([key, self._values[key]]) + "\n")
        return self._values[key]


def digest_of(paths: Iterable[Path]) -> str:
    """Return a short digest of some files."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def peak_memory_of(function: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of a forked process grows at most while it runs ``function``.

    The child's peak is set back before (Linux), and its heap is trimmed, so that freed memory of the parent is neither
    counted nor reused without being counted.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        function()
        sender.send(_status("VmHWM") - before)

    child = context.Process(target=run)
    child.start()
    sender.close()
    try:
        return int(receiver.recv())
    except EOFError as error:
        raise RuntimeError(f"Expected the measured process to finish, but it ended with {child.exitcode}.") from error
    finally:
        child.join()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"Expected /proc/self/status to hold {name}, but it does not: peak memory needs Linux.")
