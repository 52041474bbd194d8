"""Seconds of each verb to its first line and to its help, medians of passes on a warm disk cache."""

from __future__ import annotations

import argparse
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.study import RESULTS
from shared.tables import table, write_report

HELP_TARGET, LINE_TARGET = 1.5, 3.0
HELPS = ("fit", "generate", "evaluate", "answer", "score", "export", "fit-threshold")
LINES = {
    "fit": ["fit", "--config", "CONFIGS/demo.yaml", "--check", "true"],
    "generate": ["generate", "--model", "bundled", "--store_dir", "STORE", "--task", "word_problems", "--limit", "1"],
    "answer": ["answer", "--model", "bundled", "--question", "What is 1+1?", "--max_samples", "1"],
    "evaluate": ["evaluate", "--model", "bundled", "--output_dir", "STORE",
                 "--tests", "[{name: t, task: word_problems, split: test_id, limit: 1}]"],
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = [(f"{verb} --help", HELP_TARGET, [verb, "--help"]) for verb in HELPS]
    rows += [(f"{verb}, first line", LINE_TARGET, arguments) for verb, arguments in LINES.items()]
    found = {}
    for name, target, arguments in rows:
        seconds = [first_character(arguments) for _ in range(options.passes + 1)][1:]
        found[name] = {"seconds": statistics.median(seconds), "target": target}
        print(f"{name:<28}{found[name]['seconds']:6.2f} s (at most {target} s)", flush=True)
    command = f"python benchmarks/speed/start_up.py --passes {options.passes}"
    content = {"command": command, "rows": found}
    write_report(options.results, "start_up", content, as_markdown(command, found), indent=1)
    return 0 if all(row["seconds"] <= row["target"] for row in found.values()) else 1


def first_character(arguments: list[str]) -> float:
    configs = str(Path(__file__).resolve().parents[2] / "configs")
    with tempfile.TemporaryDirectory() as folder:
        given = [one.replace("CONFIGS", configs).replace("STORE", f"{folder}/store") for one in arguments]
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "selfcal_lightning", *given],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env={**os.environ, "COLUMNS": "100"},
        )  # fmt: skip
        with selectors.DefaultSelector() as selector:
            for stream in (process.stdout, process.stderr):
                selector.register(stream, selectors.EVENT_READ)  # type: ignore[arg-type]
            selector.select(timeout=120.0)
            seconds = time.monotonic() - started
        process.kill()
        process.communicate()
    return seconds


def as_markdown(command: str, found: dict[str, dict[str, float]]) -> str:
    rows = [[f"`{name}`", f"{row['seconds']:.2f}", str(row["target"])] for name, row in found.items()]
    return "\n".join([f"Command: `{command}` (two CPU cores).", "", *table(["", "s", "target"], rows)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
