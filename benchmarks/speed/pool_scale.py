"""Large pools: time, memory and longest silence of `import-pool`, `evaluate` and `fit-threshold`.

python benchmarks/speed/pool_scale.py                     # 100,000 questions x 32 responses of 300 tokens
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
from shared.study import RESULTS
from shared.tables import table, write_report

from selfcal_lightning.data.store.manifest import PartManifest, ShardEntry, StoreFingerprint
from selfcal_lightning.data.store.parts import shard_metadata, shard_name, write_part
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SCHEMA, encode_shard, question_digest
from selfcal_lightning.records import IMPORTED, Message, ModelIdentity, PromptIdentity, Question

BODIES = 4096
QUESTIONS_AT_ONCE = 256
TOKEN_CHARACTERS = 4  # of English, about
WORDS = ("so", "we", "add", "the", "number", "of", "apples", "which", "is", "left", "and", "take", "three", "away")
TASK, SPLIT, REFERENCE = "local_number", "test", "7"


@dataclass(frozen=True)
class Size:
    num_questions: int
    num_samples: int
    num_tokens: int


@dataclass(frozen=True)
class Chunk:
    numbers: range
    body: np.ndarray
    answer: np.ndarray
    is_read: np.ndarray
    p_true: np.ndarray
    logprob: np.ndarray
    num_tokens: np.ndarray


def draw_chunks(size: Size, draw: np.random.Generator) -> Iterator[Chunk]:
    for start in range(0, size.num_questions, QUESTIONS_AT_ONCE):
        numbers = range(start, min(start + QUESTIONS_AT_ONCE, size.num_questions))
        shape = len(numbers), size.num_samples
        is_right = draw.random(shape) < draw.beta(2.0, 2.0, size=(len(numbers), 1))
        columns = (
            draw.integers(BODIES, size=shape),
            np.where(is_right, int(REFERENCE), draw.integers(8, 13, size=shape)),
            draw.random(shape) < 0.97,
            draw.normal(np.where(is_right, 0.6, 0.4), 0.2).clip(0.0, 1.0).round(6),
            -draw.gamma(4.0, 5.0, size=shape).round(4),
            draw.integers(size.num_tokens // 2, size.num_tokens * 3 // 2 + 1, size=shape),
        )
        yield Chunk(numbers, *(column.ravel() for column in columns))


def write_lines(path: Path, size: Size, *, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    bodies = _bodies(size, draw)
    with open(path, "w") as file:
        for chunk in draw_chunks(size, draw):
            responses = [
                f'{{"text": {json.dumps(_text(bodies[body], answer, is_read))}, "tokens": {tokens}, "finish": "stop", '
                f'"confidence": {{"yes_mass": {0.9 * p}, "no_mass": {0.9 * (1.0 - p)}, "logprob": {logprob}, '
                f'"judge": {p * p}}}}}'
                for body, answer, is_read, p, logprob, tokens in _rows(chunk)
            ]
            for place, number in enumerate(chunk.numbers):
                own = responses[place * size.num_samples : (place + 1) * size.num_samples]
                asked = _question(number, bodies)
                head = {"id": asked.id, "task": TASK, "split": SPLIT, "question": asked.text, "reference": REFERENCE}
                file.write(f'{json.dumps(head)[:-1]}, "responses": [{", ".join(own)}]}}\n')


def write_store(folder: Path, size: Size, *, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    bodies = _bodies(size, draw)
    prompt = PromptIdentity.from_json({"source_sha256": "synthetic"})
    fingerprint = StoreFingerprint(ModelIdentity(IMPORTED), prompt, sampling=None, seed=0)
    store = SampleStore.create_or_open(folder, fingerprint, num_samples=None, engine={})
    part = folder / "parts" / "synthetic"
    part.mkdir(parents=True)
    metadata = shard_metadata(store.round_manifest().digest, part)
    entries = []
    for number, chunk in enumerate(draw_chunks(size, draw)):
        data = encode_shard([_table(chunk, size.num_samples, bodies)], metadata)
        file = part / shard_name(0, number)
        file.write_bytes(data)
        questions, sha256 = len(chunk.numbers), hashlib.sha256(data).hexdigest()
        entries.append(
            ShardEntry(
                file=file.name, round=0, questions=questions, rows=len(chunk.body), splits={SPLIT: questions},
                bytes=len(data), sha256=sha256, engine={},
            )
        )  # fmt: skip
    write_part(part, PartManifest(part.name, len(entries), tuple(entries)))
    store.join()


def _table(chunk: Chunk, num_samples: int, bodies: list[str]) -> pa.Table:
    questions = [_question(number, bodies) for number in chunk.numbers]
    messages = [json.dumps([{"role": "user", "content": question.text}]) for question in questions]
    digests = [question_digest(question) for question in questions]
    repeated = {
        "question_id": [question.id for question in questions],
        "messages": messages,
        "question_text": [question.text for question in questions],
        "question_sha256": digests,
    }
    rows, nothing = len(chunk.body), [None] * len(chunk.body)
    p = chunk.p_true
    columns: dict[str, Any] = {
        **{name: [value for value in values for _ in range(num_samples)] for name, values in repeated.items()},
        **dict.fromkeys(("prompt_ids", "num_prompt_tokens", "token_ids"), nothing),
        "task": [TASK] * rows,
        "split": [SPLIT] * rows,
        "reference": [REFERENCE] * rows,
        "round": np.zeros(rows, dtype=np.int32),
        "index": np.tile(np.arange(num_samples, dtype=np.int32), len(questions)),
        "text": [_text(bodies[body], answer, is_read) for body, answer, is_read, *_ in _rows(chunk)],
        "num_tokens": chunk.num_tokens.astype(np.int32),
        "finish": ["stop"] * rows,
        "answer": [str(answer) if is_read else None for _, answer, is_read, *_ in _rows(chunk)],
        "correct": (chunk.answer == int(REFERENCE)) & chunk.is_read,
        "logprob": chunk.logprob,
        "yes_mass": 0.9 * p,
        "no_mass": 0.9 * (1.0 - p),
        "confidences": [json.dumps({"judge": value}) for value in (p * p).tolist()],
    }
    return pa.Table.from_pydict({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _rows(chunk: Chunk) -> Iterator[tuple[Any, ...]]:
    columns = chunk.body, chunk.answer, chunk.is_read, chunk.p_true, chunk.logprob, chunk.num_tokens
    return zip(*(column.tolist() for column in columns), strict=True)


def _bodies(size: Size, draw: np.random.Generator) -> list[str]:
    length = size.num_tokens * TOKEN_CHARACTERS
    words = np.array(WORDS)[draw.integers(len(WORDS), size=(BODIES, length // 3))]
    return [" ".join(row)[:length] for row in words.tolist()]


def _text(body: str, answer: int, is_read: bool) -> str:
    return f"{body}\nAnswer: {answer}" if is_read else body


def _question(number: int, bodies: list[str]) -> Question:
    text = f"Question {number}: {bodies[number % BODIES][:200]}?"
    return Question(f"q{number:07d}", TASK, (Message("user", text),), REFERENCE, text)


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
    return ["import-pool", "--path", str(folder / "pool.jsonl"), "--store_dir", str(folder / "imported")]


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


def run(folder: Path, size: Size, *, num_imported: int, num_reshuffles: int) -> list[Cost]:
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
