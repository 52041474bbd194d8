"""A small store that the bundled model sampled, and its statistics by a naive float64 forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.sampling.sampler import generate_samples
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.records import QuestionSamples, SamplingSettings

NUM_QUESTIONS, NUM_SAMPLES = 4, 3
SAMPLING = SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=60)


@dataclass(frozen=True)
class Naive:
    """What the naive pass gives for one response: the sum of log p, means over tokens, and P(True)."""

    logprob: float
    mean_logprob: float
    certainty: float
    entropy: float
    p_true: float


def sample_store(
    engine: TransformersEngine, folder: Path, *, num_questions: int = NUM_QUESTIONS, labelled: bool = True
) -> SampleStore:
    """Sample the first questions of the calibration split into a joined store."""
    questions = get_task("word_problems").load("calibration", limit=num_questions)
    questions = questions if labelled else [replace(question, reference=None) for question in questions]
    generate_samples(
        questions, folder, split="calibration", engine=engine, chat=engine.chat, sampling=SAMPLING, seed=0,
        num_samples=NUM_SAMPLES, progress=False,
    )  # fmt: skip
    store = SampleStore(folder, num_samples=NUM_SAMPLES)
    store.join()
    return store


def confidences_of(store: Path, name: str) -> list[float]:
    return SampleStore(store).index(confidences=[name]).confidences[name].tolist()


@torch.no_grad()
def naive_statistics(model: str, engine: TransformersEngine, pool: Sequence[QuestionSamples]) -> list[list[Naive]]:
    """Compute every response alone, in float64, from the probabilities themselves."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    query = engine.chat.query
    rows = []
    for entry in pool:
        row = []
        for sample in entry.samples:
            start = len(entry.prompt_ids)
            ids = [*entry.prompt_ids, *sample.token_ids]
            p = network(torch.tensor([ids])).logits[0].softmax(-1)
            logprobs, certainties, entropies = [], [], []
            for position in range(start, len(ids)):
                drawn_from = p[position - 1]
                logprobs.append(drawn_from[ids[position]].log().item())
                certainties.append(-(drawn_from * len(drawn_from)).log().mean().item())
                entropies.append(-(drawn_from * drawn_from.log()).sum().item())
            after = network(torch.tensor([[*ids, *query.suffix_ids]])).logits[0, -1].softmax(-1)
            yes, no = after[list(query.yes_ids)].sum().item(), after[list(query.no_ids)].sum().item()
            means = [sum(values) / len(values) for values in (logprobs, certainties, entropies)]
            row.append(Naive(sum(logprobs), *means, yes / (yes + no)))
        rows.append(row)
    return rows
