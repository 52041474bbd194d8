"""A store of made-up sums, and selections of it."""

import random
from pathlib import Path
from typing import Any

from support.store_samples import make_store

from selfcal_lightning.adaptation.selection_files import Selection
from selfcal_lightning.commands.selection import run_select
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

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
