"""Running a user's commands for a report or a study: with a log, once each, and what they took of the processor."""

import importlib
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DONE = "commands.json"
# What every command of a report needs first; on two busy cores its start costs more than a small job.
LIBRARIES = ("selfcal_lightning.cli", "torch", "transformers.models.llama.modeling_llama", "lightning.pytorch", "peft")


def run(log: Path, *arguments: str, threads: int | None = 1) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = threads or int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "180"}
    started, used = time.monotonic(), children_seconds()
    command = [sys.executable, "-m", "selfcal_lightning", *arguments]
    with log.open("a") as messages:
        print(f"\n$ selfcal {' '.join(arguments)}", file=messages, flush=True)
        done = subprocess.run(command, stdout=messages, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"`selfcal {' '.join(arguments)}` ended with {done.returncode}; see {log}")
    report(f"{log.parent}: {arguments[0]}", time.monotonic() - started, children_seconds() - used)


def report(what: str, seconds: float, busy: float) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {seconds:6.0f} s, {busy:6.0f} s of CPU  {what}", flush=True)


def run_once(folder: Path, *arguments: str, output: Path | None = None) -> None:
    """Run one ``selfcal`` command unless it was run: what has been done is remembered in ``folder`` by its words.

    It runs in a copy of this process, which has the libraries loaded, and must have one thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words, finished = " ".join(arguments), seconds_of(folder)
    if words in finished:
        return
    for library in LIBRARIES:
        importlib.import_module(library)
    started, used = time.monotonic(), children_seconds()
    log = folder / "log.txt"
    copy = multiprocessing.get_context("fork").Process(target=_selfcal, args=(arguments, log, output or log))
    copy.start()
    copy.join()
    if copy.exitcode:
        raise SystemExit(f"`selfcal {words}` ended with {copy.exitcode}; see {log}")
    busy = children_seconds() - used
    report(f"{folder.name}: {arguments[0]}", time.monotonic() - started, busy)
    finished[words] = round(busy, 1)
    (folder / DONE).write_text(json.dumps(finished, indent=0) + "\n")


def seconds_of(folder: Path) -> dict[str, float]:
    done = folder / DONE
    return json.loads(done.read_text()) if done.exists() else {}


def _selfcal(arguments: Sequence[str], log: Path, output: Path) -> None:
    import torch

    from selfcal_lightning.cli import run as run_command

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with log.open("a") as messages, output.open("a" if output == log else "w") as printed:
        os.dup2(messages.fileno(), 2)
        os.dup2(printed.fileno(), 1)
        raise SystemExit(run_command(list(arguments)))


def replace_folder(source: Path, target: Path) -> None:
    """Put a copy of ``source`` in the place of ``target``, which is never half of it."""
    fresh = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source, fresh)
    shutil.rmtree(target, ignore_errors=True)
    fresh.rename(target)


def children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
