"""Synthetic pools of any size, written by column: number questions whose confidences know a little.

Questions are of all difficulties. A response is a text of words that ends with an answer, wrong ones being spread over
five numbers; three in a hundred end without one. All carry the masses of P(True), a log-probability, a length, and a
further confidence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.parts import shard_metadata, shard_name, write_part
from selfcal_lightning.data.store.records import PartManifest, ShardEntry
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
