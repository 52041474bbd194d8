"""What studies of the bundled model share: running one command of a user's, and a metric on all questions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from selfcal_lightning.evaluation.calibration.metrics import SHORT_NAMES
from selfcal_lightning.functional.base import Array
from selfcal_lightning.functional.bootstrap import bootstrap_interval


def run(log: Path, *arguments: str, threads: int = 1) -> float:
    """Run one ``selfcal`` command; its output goes to ``log``. Returns seconds of wall time.

    Args:
        log: Where the output is appended.
        arguments: Those of the command.
        threads: Threads of torch.

    Raises:
        SystemExit: The command failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    started = time.monotonic()
    with log.open("a") as file:
        command = [sys.executable, "-m", "selfcal_lightning", *arguments]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"`selfcal {' '.join(arguments)}` ended with {done.returncode}; see {log}")
    seconds = time.monotonic() - started
    print(f"{time.strftime('%H:%M:%S')}  {seconds:6.0f} s  {log.parent}: {arguments[0]}", flush=True)
    return seconds


def question_values(confidence: Array, correct: Array, questions: Array) -> dict[str, float]:
    """Return each metric on all questions, by its key."""
    estimates = bootstrap_interval(confidence, correct, questions, metrics=list(SHORT_NAMES), num_resamples=1)
    return {metric: estimates[metric].value for metric in SHORT_NAMES}
