"""Large pools: time, memory and longest silence of `import-pool`, `evaluate` and `fit-threshold`.

python benchmarks/speed/pool_scale.py                     # 100,000 questions x 32 responses of 300 tokens
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared.study import RESULTS
from shared.tables import table, write_report

BODIES = 4096
QUESTIONS_AT_ONCE = 256
TOKEN_CHARACTERS = 4  # of English, about
WORDS = ("so", "we", "add", "the", "number", "of", "apples", "which", "is", "left", "and", "take", "three", "away")
TASK, SPLIT, REFERENCE = "local_number", "test", 7


@dataclass(frozen=True)
class Size:
    num_questions: int
    num_samples: int
    num_tokens: int


def write_lines(path: Path, size: Size, *, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    length = size.num_tokens * TOKEN_CHARACTERS
    words = np.array(WORDS)[draw.integers(len(WORDS), size=(BODIES, length // 3))]
    bodies = [" ".join(row)[:length] for row in words.tolist()]
    with open(path, "w") as file:
        for start in range(0, size.num_questions, QUESTIONS_AT_ONCE):
            numbers = range(start, min(start + QUESTIONS_AT_ONCE, size.num_questions))
            shape = len(numbers), size.num_samples
            is_right = draw.random(shape) < draw.beta(2.0, 2.0, size=(len(numbers), 1))
            columns = (
                draw.integers(BODIES, size=shape),
                np.where(is_right, REFERENCE, draw.integers(8, 13, size=shape)),
                draw.random(shape) < 0.97,
                draw.normal(np.where(is_right, 0.6, 0.4), 0.2).clip(0.0, 1.0).round(6),
                -draw.gamma(4.0, 5.0, size=shape).round(4),
                draw.integers(size.num_tokens // 2, size.num_tokens * 3 // 2 + 1, size=shape),
            )
            for place, number in enumerate(numbers):
                rows = zip(*(column[place].tolist() for column in columns), strict=True)
                question = f"Question {number}: {bodies[number % BODIES][:200]}?"
                head = {"id": f"q{number:07d}", "task": TASK, "split": SPLIT, "question": question}
                line = {**head, "reference": str(REFERENCE), "responses": [response(bodies, *row) for row in rows]}
                file.write(json.dumps(line) + "\n")


def response(
    bodies: list[str], body: int, answer: int, is_read: bool, p: float, logprob: float, tokens: int
) -> dict[str, Any]:
    text = f"{bodies[body]}\nAnswer: {answer}" if is_read else bodies[body]
    confidence = {"yes_mass": 0.9 * p, "no_mass": 0.9 * (1.0 - p), "logprob": logprob, "judge": p * p}
    return {"text": text, "tokens": tokens, "finish": "stop", "confidence": confidence}


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


def counting_commands(folder: Path, *, num_reshuffles: int) -> list[list[str]]:
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


def run(folder: Path, size: Size, *, num_reshuffles: int) -> list[Cost]:
    costs: list[Cost] = []

    def note(arguments: Sequence[str]) -> None:
        costs.append(measure(arguments, num_questions=size.num_questions, log=folder / f"{len(costs)}.log"))
        shown = replace(costs[-1], command=costs[-1].command.replace(f"{folder}/", ""))
        costs[-1] = shown
        print(json.dumps(asdict(shown)), flush=True)

    write_lines(folder / "pool.jsonl", size)
    note(["import-pool", "--path", str(folder / "pool.jsonl"), "--store_dir", str(folder / "store")])
    (folder / "pool.jsonl").unlink()
    for command in counting_commands(folder, num_reshuffles=num_reshuffles):
        note(command)
    return costs


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100_000)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="mean length of a response")
    parser.add_argument("--num_reshuffles", type=int, default=NUM_RESHUFFLES)
    parser.add_argument("--work", type=Path, default=None, help="where the pools go; a temporary folder by default")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    size = Size(options.questions, options.samples, options.tokens)
    folder = Path(tempfile.mkdtemp(prefix="pool-scale-", dir=options.work))
    try:
        costs = run(folder, size, num_reshuffles=options.num_reshuffles)
    finally:
        shutil.rmtree(folder)
    given = " ".join(["python benchmarks/speed/pool_scale.py", *(sys.argv[1:] if arguments is None else arguments)])
    content = {"command": given, "size": asdict(size), "costs": [asdict(cost) for cost in costs]}
    text = report(costs, size=size, command=given)
    write_report(options.output, "pool_scale", content, text, indent=1)


if __name__ == "__main__":
    main()
