"""Load on `selfcal serve`: 64 clients, 2,000 requests on the bundled model, streams, disconnects and deadlines.

    python benchmarks/serving/load.py --output benchmarks/results/serving_load.json

Nothing may be lost or answered twice, and samples of clients that left must stop costing tokens.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import Draws, EngineSource
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import Question, SamplingSettings

PORT, CLIENTS, SEED = 8765, 64, 11
NOTE = "library, server and clients share the cores; serving_throughput.json takes turns with one thread each"
STRATEGY = {"strategy": "early_stopping", "threshold": 0.8, "max_samples": 4}
SAMPLING = SamplingSettings(temperature=0.8, edt_scale=None, max_new_tokens=120)


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
        began = time.perf_counter()
        verdicts = run_strategy(strategy, questions, source)
        return time.perf_counter() - began, {verdict.question_id: verdict.tokens_generated or 0 for verdict in verdicts}


def memory_mib(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


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
    options: dict[str, Any] = {**STRATEGY, "seed": SEED}
    if kind == "deadline":
        options["deadline_s"] = rng.uniform(0.05, 1.0)
    body = {
        "model": "bundled", "messages": [{"role": "user", "content": question.messages[-1].content}],
        "temperature": 0.8, "max_tokens": 120, "selfcal": options,
        "stream": kind == "stream" or (kind == "gone" and rng.random() < 0.5),
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    found: dict[str, Any] = {"id": question.id, "kind": kind, "status": None}
    began = time.perf_counter()
    try:
        wait = rng.uniform(0.02, 0.6) if kind == "gone" else 600.0
        async with asyncio.timeout(wait), session.post("/v1/chat/completions", json=body) as answer:
            found["status"] = answer.status
            text = await answer.text()
        found["seconds"] = time.perf_counter() - began
        if body["stream"]:
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            assert events[-1] == "[DONE]"
            chunks = [json.loads(event) for event in events[:-1]]
            found |= {"answers": sum("selfcal" in chunk for chunk in chunks), "request": chunks[0]["id"]}
            found["tokens"] = chunks[-1]["usage"]["total_tokens"] - prompt_tokens
        elif answer.status == 200:
            content = json.loads(text)
            found |= {"answers": 1, "request": content["id"]}
            found["tokens"] = content["usage"]["total_tokens"] - prompt_tokens
    except TimeoutError:
        found["gone"] = True
    return found


async def load(
    questions: list[Question], kinds: list[str], pid: int, prompt_tokens: dict[str, int]
) -> tuple[list[dict[str, Any]], float, list[float]]:
    """Ask all questions by 64 clients; return what came, seconds, and the server's memory on the way."""
    rng, found, memory = random.Random(0), [], []
    work = iter(list(zip(questions, kinds, strict=True)))
    connector = aiohttp.TCPConnector(limit=CLIENTS)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{PORT}", connector=connector) as session:

        async def client() -> None:
            for question, kind in work:
                found.append(await ask(session, question, kind, rng, prompt_tokens[question.id]))
                if len(found) % 250 == 0:
                    memory.append(round(memory_mib(pid), 1))

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return found, time.perf_counter() - began, memory


BUNDLED = ("--model", "bundled", "--task", "word_problems")


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=2000)
    given = parser.parse_args()
    task = get_task("word_problems")
    questions = [*task.load("train", limit=given.requests)]
    library = Library()
    seconds, tokens = library.run(questions)
    print(f"library: {seconds:.1f} s, {sum(tokens.values()):,} tokens")
    with serving(*BUNDLED) as server:
        rng = random.Random(1)
        plain = [rng.choice(["whole", "stream"]) for _ in questions]
        answered, whole_seconds, memory = asyncio.run(load(questions, plain, server.pid, library.prompt_tokens))
        before = metric("selfcal_cancelled_tokens")
        mixed = rng.choices(["whole", "stream", "gone", "deadline"], weights=[4, 4, 1, 1], k=len(questions))
        found, mixed_seconds, more_memory = asyncio.run(load(questions, mixed, server.pid, library.prompt_tokens))
        until = time.time() + 30
        while metric("selfcal_queue") and time.time() < until:
            time.sleep(0.1)
        queue, cancelled = metric("selfcal_queue"), metric("selfcal_cancelled_tokens") - before
    gone = [one for one in found if one.get("gone")]
    names = [one["request"] for one in [*answered, *found] if "request" in one]
    late = [one for one in found if one["kind"] == "deadline"]
    result = {
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
            "seconds": round(mixed_seconds, 1), "whole_or_stream": sum(o["kind"] in ("whole", "stream") for o in found),
            "disconnected": len(gone), "deadlines": len(late), "deadlines_504": sum(o["status"] == 504 for o in late),
            "statuses": {str(s): sum(o["status"] == s for o in found) for s in {o["status"] for o in found}},
            "tokens_that_the_disconnected_would_have_cost": sum(tokens[one["id"]] for one in gone),
            "tokens_drawn_and_thrown_away": int(cancelled),
        },
        "lost": sum("request" not in o and not o.get("gone") and o["status"] != 504 for o in [*answered, *found]),
        "answered_twice": len(names) - len(set(names)) + sum(o.get("answers", 1) != 1 for o in [*answered, *found]),
        "left_in_the_queue": queue, "exit_status": server.returncode,
        "memory_mib_every_250_requests": [*memory, *more_memory],
        "client_memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }  # fmt: skip
    given.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
