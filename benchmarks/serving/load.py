"""Load on `selfcal serve`: 64 clients, 2,000 requests on the bundled model, streams, disconnects and deadlines.

    python benchmarks/serving/load.py --output benchmarks/results/serving_load.json
    python benchmarks/serving/load.py --blocks 3 --output benchmarks/results/serving_throughput.json

Nothing may be lost or answered twice, and samples of clients that left must stop costing tokens. With `--blocks` server
and library answer the same questions in turns, both with one thread: the clients need a core of their own, and two
OpenMP threads that wait for one another on a shared core take 1.7 times as long.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp
import torch
from shared.timing import cpu_seconds, timed

from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import Draws, EngineSource
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import Question, SamplingSettings

with socket.create_server(("127.0.0.1", 0)) as free:  # where another run's server listens, that one would be measured
    PORT = free.getsockname()[1]
CLIENTS, SEED = 64, 11
NOTE = "library, server and clients share the cores; serving_throughput.json takes turns with one thread each"
BUNDLED = ("--model", "bundled", "--task", "word_problems")
STRATEGY = {"strategy": "early_stopping", "threshold": 0.8, "max_samples": 4}
SAMPLING = SamplingSettings(temperature=0.8, edt_scale=None, max_new_tokens=120)
Found = list[dict[str, Any]]


class Library:
    def __init__(self) -> None:
        options = EngineOptions()
        self.chat = load_chat(options, "bundled", query=DEFAULT_QUERY)
        self.engine = open_engine(options, "bundled", chat=self.chat)
        self.prompt_tokens: dict[str, int] = {}

    def draws(self, question: Question) -> Draws:
        key = json.dumps([[m.role, m.content] for m in question.messages])
        prompt = self.chat.prompt_ids(question.messages)
        self.prompt_tokens[question.id] = len(prompt)
        return Draws(prompt, SAMPLING, SEED, key)

    def run(self, questions: list[Question]) -> tuple[float, dict[str, int]]:
        source = EngineSource(self.engine, self.chat, sampling=SAMPLING, draws=self.draws)
        strategy = make_strategy("early_stopping", threshold=0.8, max_samples=4)
        seconds, _, verdicts = timed(lambda: run_strategy(strategy, questions, source))
        return seconds, {verdict.question_id: verdict.tokens_generated or 0 for verdict in verdicts}


def call(path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", data) as answer:
        return answer.read().decode()


def metric(name: str) -> float:
    lines = call("/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


async def ask(
    session: aiohttp.ClientSession, question: Question, kind: str, rng: random.Random, prompt_tokens: int
) -> dict[str, Any]:
    """Ask a question and return what came of it; ``tokens`` counts confidence queries, as the library does."""
    deadline = {"deadline_s": rng.uniform(0.05, 1.0)} if kind == "deadline" else {}
    streams = kind == "stream" or (kind == "gone" and rng.random() < 0.5)
    body = {
        "model": "bundled", "messages": [{"role": "user", "content": question.messages[-1].content}],
        "temperature": 0.8, "max_tokens": 120, "selfcal": {**STRATEGY, "seed": SEED, **deadline},
        "stream": streams, "stream_options": {"include_usage": True},
    }  # fmt: skip
    found: dict[str, Any] = {"id": question.id, "kind": kind, "status": None}
    began = time.perf_counter()
    try:
        wait = rng.uniform(0.02, 0.6) if kind == "gone" else 600.0
        async with asyncio.timeout(wait), session.post("/v1/chat/completions", json=body) as answer:
            found["status"] = answer.status
            text = await answer.text()
    except TimeoutError:
        return found | {"gone": True}
    found["seconds"] = time.perf_counter() - began
    chunks = [json.loads(text)] if answer.status == 200 and not streams else []
    if streams:
        *events, last = (line[6:] for line in text.splitlines() if line.startswith("data: "))
        assert last == "[DONE]"
        chunks = [json.loads(event) for event in events]
    if chunks:
        found |= {"answers": sum("selfcal" in chunk for chunk in chunks), "request": chunks[0]["id"]}
        found["tokens"] = chunks[-1]["usage"]["total_tokens"] - prompt_tokens
    return found


def load(questions: list[Question], kinds: list[str], pid: int, library: Library) -> tuple[Found, float, list[float]]:
    """Ask all questions by 64 clients; return what came, seconds, and the server's memory on the way."""
    rng, found, memory = random.Random(0), [], []
    work = iter(list(zip(questions, kinds, strict=True)))

    async def client(session: aiohttp.ClientSession) -> None:
        for question, kind in work:
            found.append(await ask(session, question, kind, rng, library.prompt_tokens[question.id]))
            if len(found) % 250 == 0:
                kib = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]
                memory.append(round(int(kib) / 1024, 1))

    async def together() -> float:
        connector = aiohttp.TCPConnector(limit=CLIENTS)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{PORT}", connector=connector) as session:
            began = time.perf_counter()
            await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
            return time.perf_counter() - began

    return found, asyncio.run(together()), memory


@contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server, wait until it is ready, and end it on leaving."""
    command = [sys.executable, "-m", "selfcal_lightning", "serve", "--port", str(PORT), *arguments]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while not is_ready():
            if server.poll() is not None:
                raise RuntimeError(f"The server ended with status {server.returncode} before it was ready.")
            time.sleep(0.2)
        yield server
    finally:
        server.terminate()
        server.wait(60)


def is_ready() -> bool:
    try:
        return bool(call("/ready"))
    except OSError:
        return False


def under_load(questions: list[Question]) -> dict[str, Any]:
    library = Library()
    seconds, tokens = library.run(questions)
    print(f"library: {seconds:.1f} s, {sum(tokens.values()):,} tokens")
    with serving(*BUNDLED) as server:
        rng = random.Random(1)
        plain = [rng.choice(["whole", "stream"]) for _ in questions]
        answered, whole_seconds, memory = load(questions, plain, server.pid, library)
        before = metric("selfcal_cancelled_tokens")
        mixed = rng.choices(["whole", "stream", "gone", "deadline"], weights=[4, 4, 1, 1], k=len(questions))
        found, mixed_seconds, more_memory = load(questions, mixed, server.pid, library)
        until = time.time() + 30
        while metric("selfcal_queue") and time.time() < until:
            time.sleep(0.1)
        queue, cancelled = metric("selfcal_queue"), metric("selfcal_cancelled_tokens") - before
    every, gone = [*answered, *found], [one for one in found if one.get("gone")]
    names = [one["request"] for one in every if "request" in one]
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
                    "load": os.getloadavg(), "note": NOTE},
        "command": "python benchmarks/serving/load.py", "clients": CLIENTS, "requests": len(questions),
        "library": {"seconds": round(seconds, 1), "tokens": sum(tokens.values())},
        "all_answered": {
            "seconds": round(whole_seconds, 1), "tokens": sum(one["tokens"] for one in answered),
            "throughput_of_the_library": round(seconds / whole_seconds, 3),
            "same_tokens_as_the_library": sum(one["tokens"] == tokens[one["id"]] for one in answered),
            "median_seconds": round(sorted(one["seconds"] for one in answered)[len(answered) // 2], 3),
        },
        "mixed": {
            "seconds": round(mixed_seconds, 1), "whole_or_stream": mixed.count("whole") + mixed.count("stream"),
            "disconnected": len(gone), "deadlines": mixed.count("deadline"),
            "deadlines_504": sum(o["kind"] == "deadline" and o["status"] == 504 for o in found),
            "statuses": {str(s): sum(o["status"] == s for o in found) for s in {o["status"] for o in found}},
            "tokens_that_the_disconnected_would_have_cost": sum(tokens[one["id"]] for one in gone),
            "tokens_drawn_and_thrown_away": int(cancelled),
        },
        "lost": sum("request" not in o and not o.get("gone") and o["status"] != 504 for o in every),
        "answered_twice": len(names) - len(set(names)) + sum(o.get("answers", 1) != 1 for o in every),
        "left_in_the_queue": queue, "exit_status": server.returncode,
        "memory_mib_every_250_requests": [*memory, *more_memory],
    }  # fmt: skip


def in_turns(questions: list[Question], size: int) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"  # of the server
    torch.set_num_threads(1)
    library, rows, kinds = Library(), [], ["whole", "stream"] * size
    with serving(*BUNDLED) as server:
        for block in (questions[start : start + size] for start in range(0, len(questions), size)):
            before = cpu_seconds()
            seconds, tokens = library.run(block)
            own_cpu, before = cpu_seconds() - before, cpu_seconds(server.pid)
            found, served, _ = load(block, kinds[: len(block)], server.pid, library)
            cpu = cpu_seconds(server.pid) - before
            rows.append({
                "tokens": sum(tokens.values()), "same_tokens": sum(o["tokens"] == tokens[o["id"]] for o in found),
                "library_seconds": round(seconds, 2), "server_seconds": round(served, 2),
                "library_cpu_seconds": round(own_cpu, 2), "server_cpu_seconds": round(cpu, 2),
            })  # fmt: skip
            print(rows[-1])
    total = {name: round(sum(row[name] for row in rows), 2) for name in rows[0]}
    return {
        "command": f"python benchmarks/serving/load.py --blocks {len(rows)}", "cores": os.cpu_count(), "threads": 1,
        "load": os.getloadavg(), "clients": CLIENTS, "requests": len(questions), **total,
        "throughput_of_the_library": round(total["library_seconds"] / total["server_seconds"], 3),
        "by_cpu_seconds": round(total["library_cpu_seconds"] / total["server_cpu_seconds"], 3), "blocks": rows,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=0, help="turns of library and server")
    parser.add_argument("--block_size", type=int, default=320)
    given = parser.parse_args()
    number = given.blocks * given.block_size or given.requests
    questions = [*get_task("word_problems").load("train", limit=number)]
    result = in_turns(questions, given.block_size) if given.blocks else under_load(questions)
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
