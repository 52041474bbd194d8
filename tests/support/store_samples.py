"""Made-up samples and the ways in which the tests of the store write them."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfcal_lightning.adaptation.selection_files import Selection
from selfcal_lightning.commands.selection import run_select
from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.records import (
    Message,
    ModelIdentity,
    PromptIdentity,
    Question,
    QuestionSamples,
    Sample,
    SamplingSettings,
)

MODEL = ModelIdentity("m", weights_sha256="w")
PROMPT = PromptIdentity(query="Right?", suffix_ids=(1, 2))
FINGERPRINT = StoreFingerprint(MODEL, PROMPT, SamplingSettings(0.8, edt_scale=None), seed=0)
NUM_SAMPLES = 4


def make_store(path: Path, *, num_samples: int | None = NUM_SAMPLES, round: int = 0) -> SampleStore:
    return SampleStore.create_or_open(
        path, FINGERPRINT, num_samples=num_samples, engine={"engine": "fake"}, round=round
    )


def make_group(
    question: Question, *, num_samples: int = NUM_SAMPLES, split: str = "train", round: int = 0, mark: str = ""
) -> QuestionSamples:
    samples = []
    for index in range(num_samples):
        finish, masses = "length" if index % 2 else "stop", (None, None) if index == 2 else (0.3, 0.1 * index)
        answer, correct = None if index == 1 else str(index % 3), [True, None, False][index % 3]
        text, confidences = f"{mark}{question.id} é {index}\n", {"length": index / 8} if index else {}
        given = (text, tuple(range(index)), finish, answer, correct, -1.5 * index, *masses)
        samples.append(Sample(question.id, index, round, *given, confidences=confidences))
    return QuestionSamples(question, tuple(samples), split, tuple(range(7)))


def write(
    store: SampleStore, questions: list[Question], *, part: str = "a", per_shard: int = 3, round: int = 0, **more: str
) -> None:
    with store.writer(part, round=round, questions_per_shard=per_shard) as writer:
        for question in questions:
            writer.append(make_group(question, round=round, **more))


def annotate(path: Path, name: str, values: Any, *, index: SampleIndex | None = None, **origin: str) -> None:
    """Keep one value for each row of a store, or of its rows in another order, as an annotation of an origin."""
    store, annotation = SampleStore(path), Annotation(path, name)
    index = store.index() if index is None else index
    annotation.write_part("run", "part", index, np.zeros(len(index)) + values, store.manifest.shards)
    annotation.publish("run", ["part"], origin=origin, details={})


def shards(store: SampleStore, part: str = "a") -> list[Path]:
    return sorted((store.path / "parts" / part).glob("*.parquet"))


def leftovers(store: SampleStore) -> list[Path]:
    return list(store.path.rglob("*.tmp"))


def stored_groups(path: str | Path) -> dict[str, QuestionSamples]:
    """Return what readers of a store see, by question."""
    return {group.question.id: group for group in SampleStore(path).samples()}


def write_lines(path: Path, *rows: Any) -> Path:
    """Write one JSON value a line; a text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_number_pool(path: Path, responses: Mapping[str, Sequence[Mapping[str, Any]]], **fields: Any) -> Path:
    """Write questions with their responses, by id. The reference is "1"; ``fields`` are those of every line."""
    shared = {"task": "local_number", "reference": "1", **fields}
    return write_lines(
        path, *({"id": name, "question": f"{name}?", **shared, "responses": given} for name, given in responses.items())
    )


def write_pool(path: Path, *, questions: int = 4, samples: int = 4, confidence: str = "p_true") -> str:
    """Write questions whose answer is 7, and responses that say 7 or 8, with a confidence and a log-probability."""
    responses = {}
    for number in range(questions):
        responses[f"q{number}"] = [
            {"text": f"The answer is {7 if (number + k) % 3 else 8}.", "tokens": 5,
             "confidence": {confidence: 0.2 + 0.25 * ((number + k) % 4), "logprob": -1.0 - k}}
            for k in range(samples)
        ]  # fmt: skip
    return str(write_number_pool(path, responses, task="gsm8k", reference="7", split="calibration"))


NUM_QUESTIONS, NUM_SAMPLES = 12, 4


def sums_entry(number: int, *, right: int = 3, num_samples: int = NUM_SAMPLES) -> QuestionSamples:
    """Return a question with ``right`` right responses, then wrong ones, the last of which cannot be read.

    Right responses are likelier than wrong ones, the later the more.
    """
    name, gold = f"q{number:03d}", str(number + 7)
    draw = random.Random(number)
    samples = []
    for index in range(num_samples):
        is_right, is_readable = index < right, index < max(right, num_samples - 1)
        answer = gold if is_right else str(number + 8 + index) if is_readable else None
        text = "I do not know." if answer is None else f"{number}+7={answer}. So the answer is {answer}."
        logprob = -len(text) * (0.1 - 0.01 * index if is_right else 0.5 + draw.random())
        masses = (0.8, 0.2) if is_right else (0.3, 0.7)
        samples.append(Sample(name, index, 0, text, tuple(text.encode()), "stop", answer, is_right, logprob, *masses))
    chat = (Message("system", "Add."), Message("user", f"What is {number}+7?"))
    question = Question(name, "local_number", chat, gold, f"What is {number}+7?")
    return QuestionSamples(question, tuple(samples), "train", (1, 2, 3))


def sums_store(path: Path, *, num_questions: int = NUM_QUESTIONS) -> SampleStore:
    """Write questions of 0 to 4 right responses in turn; that without any has nothing readable but wrong answers."""
    store = make_store(path)
    with store.writer("a") as writer:
        for number in range(num_questions):
            writer.append(sums_entry(number, right=number % (NUM_SAMPLES + 1)))
    store.join()
    return store


def select(store: Path, output: Path, **options: Any) -> Selection:
    """Select with the likelihood alone, which these stores have."""
    return run_select(str(store), str(output), **{"pick": "mean_logprob", **options})
