"""Large pools: `import-pool`, `evaluate` and `fit-threshold` on synthetic responses, with time, memory and progress.

    python benchmarks/speed/pool_scale.py                     # 100,000 questions x 32 responses of 300 tokens

`import-pool` reads JSON lines, out of whose texts answers have to be read; the others read a store that is written
directly. Each command runs in a process of its own. Its peak is that of its resident memory, and its longest silence
the longest time without a line on standard error, from its start to its end. Figures go to ``pool_scale.{json,md}`` in
``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _synthetic_pools import Size, write_lines, write_store
from shared.study import RESULTS
from shared.tables import table, write_report

GIB = 2**30
NUM_RESHUFFLES = 100


@dataclass(frozen=True)
class Cost:
    command: str
    num_questions: int
    seconds: float
    processor_seconds: float
    peak_bytes: int
    silence_seconds: float
    num_lines: int


def measure(arguments: Sequence[str], *, num_questions: int, log: Path) -> Cost:
    """Run a command of ``selfcal`` and return what it cost; what it says goes to ``log``."""
    start = heard = time.monotonic()
    silence, num_lines = 0.0, 0
    with open(log, "w") as file:
        command = [sys.executable, "-m", "selfcal_lightning", *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE, text=True)
        if process.stderr is None:
            raise SystemExit(f"Expected to hear `selfcal {arguments[0]}`, but got no pipe.")
        for line in process.stderr:
            now = time.monotonic()
            silence, heard, num_lines = max(silence, now - heard), now, num_lines + 1
            file.write(f"[{now - start:8.1f} s] {line}")
            file.flush()
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"Expected `selfcal {' '.join(arguments)}` to succeed, but got:\n{log.read_text()[-2000:]}")
    end = time.monotonic()
    return Cost(
        command=" ".join(arguments),
        num_questions=num_questions,
        seconds=end - start,
        processor_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        silence_seconds=max(silence, end - heard),
        num_lines=num_lines,
    )


def import_command(folder: Path) -> list[str]:
    """Return the command that reads the JSON lines in ``folder``."""
    return ["import-pool", "--path", str(folder / "pool.jsonl"), "--store_dir", str(folder / "imported")]


def counting_commands(folder: Path, *, num_reshuffles: int) -> list[list[str]]:
    """Return the commands that count the responses of the store in ``folder``."""
    store = str(folder / "store")
    orders = [] if num_reshuffles == NUM_RESHUFFLES else ["--num_reshuffles", str(num_reshuffles)]
    fit = ["fit-threshold", "--pool", store, "--split", "test", "--output"]
    return [
        ["evaluate", "--pools", f"{{base: {store}}}", "--output_dir", str(folder / "evaluation"), *orders],
        [*fit, str(folder / "budget.json"), "--budget", "8", *orders],
        [*fit, str(folder / "risk.json"), "--risk", "0.45", "--strategy", "self_consistency"],
    ]


def report(costs: Sequence[Cost], *, size: Size, command: str) -> str:
    lines = [
        f"Synthetic pools of {size.num_samples} responses of {size.num_tokens} tokens a question; {os.cpu_count()} "
        f"cores, which other work may have shared; by `{command}`.",
        "",
    ]
    heads = ("command", "questions", "responses", "s", "s of processor", "peak GiB", "longest silence, s",
             "lines of progress")  # fmt: skip
    rows = [
        (
            f"`{cost.command}`",
            f"{cost.num_questions:,}",
            f"{cost.num_questions * size.num_samples:,}",
            f"{cost.seconds:.0f}",
            f"{cost.processor_seconds:.0f}",
            f"{cost.peak_bytes / GIB:.2f}",
            f"{cost.silence_seconds:.0f}",
            f"{cost.num_lines}",
        )
        for cost in costs
    ]
    return "\n".join([*lines, *table(heads, rows, left=len(heads))]) + "\n"


def run(folder: Path, size: Size, *, num_imported: int, num_reshuffles: int) -> list[Cost]:
    """Make the pools in ``folder``, run the commands, and return what they cost."""
    costs: list[Cost] = []

    def note(arguments: Sequence[str], num_questions: int) -> None:
        costs.append(measure(arguments, num_questions=num_questions, log=folder / f"{len(costs)}.log"))
        shown = replace(costs[-1], command=costs[-1].command.replace(f"{folder}/", ""))
        costs[-1] = shown
        print(json.dumps(asdict(shown)), flush=True)

    if num_imported:
        write_lines(folder / "pool.jsonl", replace(size, num_questions=num_imported))
        note(import_command(folder), num_imported)
        (folder / "pool.jsonl").unlink()
        shutil.rmtree(folder / "imported")
    write_store(folder / "store", size)
    for command in counting_commands(folder, num_reshuffles=num_reshuffles):
        note(command, size.num_questions)
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--imported", type=int, default=None, help="questions of the import; all by default")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="mean length of a response")
    parser.add_argument("--num_reshuffles", type=int, default=NUM_RESHUFFLES)
    parser.add_argument("--work", type=Path, default=None, help="where the pools go; a temporary folder by default")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    size = Size(options.questions, options.samples, options.tokens)
    folder = Path(tempfile.mkdtemp(prefix="pool-scale-", dir=options.work))
    try:
        num_imported = options.questions if options.imported is None else options.imported
        costs = run(folder, size, num_imported=num_imported, num_reshuffles=options.num_reshuffles)
    finally:
        shutil.rmtree(folder)
    given = " ".join(["python benchmarks/speed/pool_scale.py", *(sys.argv[1:] if arguments is None else arguments)])
    content = {"command": given, "size": asdict(size), "costs": [asdict(cost) for cost in costs]}
    text = report(costs, size=size, command=given)
    write_report(options.output, "pool_scale", content, text, indent=1)


if __name__ == "__main__":
    main()
