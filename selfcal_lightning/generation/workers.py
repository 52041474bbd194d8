"""Worker processes, each with GPUs of its own: each samples its share into its own part of the store.

A worker reads its settings from standard input, which then stays open as a lifeline: when the parent is gone, by
SIGKILL too, the worker commits what is complete and ends. Ctrl-C in the terminal reaches the parent only.
"""

from __future__ import annotations

import _thread
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from selfcal_lightning.errors import InputError, RunError
from selfcal_lightning.plugins import load_plugins_of_parent
from selfcal_lightning.runtime.imports import keep_bitsandbytes_quiet
from selfcal_lightning.runtime.interruptions import INTERRUPTION
from selfcal_lightning.runtime.last_resort import FAILED, explain, wants_traceback
from selfcal_lightning.runtime.progress import say

POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0


def run_workers(
    settings: Mapping[str, Any], shards: Sequence[tuple[int, int]], *, gpus: int = 1, on_tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Run one worker for each of ``shards`` to the end and return their reports.

    When a worker fails the others go on, since what they commit is kept.

    Args:
        settings: Fields of ``pipelines.shares.GenerationSettings``, plain.
        shards: (number, total) of each worker's share.
        gpus: GPUs that each worker's engine takes, where there are any.
        on_tick: Called about twice a second.

    Raises:
        RunError: Workers failed; their own messages stand above.
    """
    environments = [worker_environment(position, len(shards), gpus=gpus) for position in range(len(shards))]
    with tempfile.TemporaryDirectory(prefix="selfcal-") as folder:
        reports = [Path(folder) / f"{position}.json" for position in range(len(shards))]
        workers: list[subprocess.Popen[str]] = []
        try:
            for shard, report, environment in zip(shards, reports, environments, strict=True):
                job = {"settings": dict(settings), "shard": list(shard), "report": str(report)}
                workers.append(_start(job, environment))
            while any([worker.poll() is None for worker in workers]):  # polls all of them
                on_tick()
                time.sleep(POLL_SECONDS)
            on_tick()
        finally:
            _end(workers)
        failed = [position for position, worker in enumerate(workers) if worker.returncode != 0]
        if failed:
            raise RunError(
                f"Expected {len(workers)} workers to finish, but worker {failed[0]} ended with status "
                f"{workers[failed[0]].returncode} ({len(failed)} failed in all; their messages stand above). What was "
                "committed is kept: start the same command again to go on."
            )
        return [json.loads(report.read_text()) for report in reports]


def worker_environment(position: int, workers: int, *, gpus: int = 1) -> dict[str, str]:
    """Return the environment of a worker: its GPUs of those that this process sees, or a share of the CPU cores.

    Args:
        position: Number of the worker; it gets the GPUs from ``position * gpus`` on.
        workers: Number of workers.
        gpus: GPUs for each.

    Raises:
        InputError: There are GPUs, but fewer than the workers take.
    """
    import torch

    environment = dict(os.environ)
    count = torch.cuda.device_count()
    if count == 0:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))
        return environment
    if count < workers * gpus:
        each = "" if gpus == 1 else f", each of which takes {gpus} (`tensor_parallel_size`)"
        raise InputError(
            f"Expected `devices` to be at most {count // gpus} with {count} GPUs in sight, but got {workers}{each}."
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(device) for device in range(count)]
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[position * gpus : (position + 1) * gpus])
    return environment


def _start(job: Mapping[str, Any], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "selfcal_lightning.generation.workers"]
    worker = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, env=dict(environment), text=True, process_group=0
    )
    if worker.stdin is not None:
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
    return worker


def _end(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Cut the lifelines and wait; a worker that does not end by itself is killed."""
    for worker in workers:
        if worker.stdin is not None:
            worker.stdin.close()
    deadline = time.monotonic() + GRACE_SECONDS + 5.0
    for worker in workers:
        try:
            worker.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _watch_parent() -> None:
    """Wait for the end of standard input, then interrupt the work, then end the process whatever it does."""
    # Not through `sys.stdin`, whose lock a daemon thread must not hold when the interpreter ends.
    while os.read(0, 1024):
        pass
    _thread.interrupt_main()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def work() -> int:
    """Run the job that stands on standard input. Returns the exit status."""
    keep_bitsandbytes_quiet()
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch_parent, daemon=True).start()
    number, total = job["shard"]
    try:
        load_plugins_of_parent()
        from selfcal_lightning.generation.process_share import GenerationSettings, sample_share

        report = sample_share(GenerationSettings.from_plain(job["settings"]), shard=(number, total), progress=False)
    except KeyboardInterrupt:  # the parent, which was asked to stop, says so for all
        return INTERRUPTION.status
    except Exception as error:
        if wants_traceback():
            raise
        say(explain(error, who=f"worker {number} of {total}"))
        return FAILED
    Path(job["report"]).write_text(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(work())
