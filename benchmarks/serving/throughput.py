"""Throughput of `selfcal serve` and of the library, in turns, on the same samples.

python benchmarks/serving/throughput.py --output benchmarks/results/serving_throughput.json

Both compute with one thread: the clients need a core of their own, and two OpenMP threads that wait for one another on
a shared core take 1.7 times as long.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from load import BUNDLED, CLIENTS, Library, load, serving
from shared.timing import cpu_seconds

from selfcal_lightning.data.tasks.registry import get_task


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--block_size", type=int, default=320)
    given = parser.parse_args()
    questions = get_task("word_problems").load("train", limit=given.blocks * given.block_size)
    library = Library()
    rows = []
    with serving(*BUNDLED) as server:
        for start in range(0, len(questions), given.block_size):
            block = questions[start : start + given.block_size]
            before = cpu_seconds()
            seconds, tokens = library.run(block)
            own_cpu = cpu_seconds() - before
            before = cpu_seconds(server.pid)
            kinds = ["whole", "stream"] * (len(block) // 2)
            found, served, _ = asyncio.run(load(block, kinds, server.pid, library.prompt_tokens))
            cpu = cpu_seconds(server.pid) - before
            rows.append({
                "tokens": sum(tokens.values()), "same_tokens": sum(o["tokens"] == tokens[o["id"]] for o in found),
                "library_seconds": round(seconds, 2), "server_seconds": round(served, 2),
                "library_cpu_seconds": round(own_cpu, 2), "server_cpu_seconds": round(cpu, 2),
            })  # fmt: skip
            print(rows[-1])
    total = {name: round(sum(row[name] for row in rows), 2) for name in rows[0]}
    result = {
        "command": "python benchmarks/serving/throughput.py", "cores": os.cpu_count(), "threads": 1,
        "load": os.getloadavg(),
        "clients": CLIENTS, "requests": len(questions), **total,
        "throughput_of_the_library": round(total["library_seconds"] / total["server_seconds"], 3),
        "by_cpu_seconds": round(total["library_cpu_seconds"] / total["server_cpu_seconds"], 3), "blocks": rows,
    }  # fmt: skip
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
