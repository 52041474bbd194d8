"""Stores of made-up responses to real questions, under the name of the bundled model: what its states are read for."""

from pathlib import Path

import numpy as np

from selfcal_lightning.capability.features import PromptModel, open_features
from selfcal_lightning.capability.question_table import load_capability_pool
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.data.store.features import tokens_digest
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import load_some
from selfcal_lightning.engines.settings import EngineOptions, LevelSettings
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import resolve_model, weights_sha256
from selfcal_lightning.records import ModelIdentity, PromptIdentity, Question, QuestionSamples, Sample, SamplingSettings

SPLITS = {"train": ("train", 40), "test": ("test_id", 24), "calibration": ("calibration", 24)}
SAMPLES = 8


def chance(question: Question) -> float:
    """Return how likely a made-up response is right: the longer the question, the less."""
    return float(np.clip(1.6 - len(question.text) / 110, 0.05, 0.95))


def made_up(question: Question, split: str, *, judged: bool = True, samples: int = SAMPLES) -> QuestionSamples:
    """Return responses that are right with the question's chance; wrong ones scatter."""
    rng = np.random.default_rng(sum(question.text.encode()))
    rows = []
    for at in range(samples):
        answer = question.reference if rng.random() < chance(question) else f"wrong {rng.integers(50)}"
        correct = answer == question.reference if judged else None
        rows.append(Sample(question.id, at, 0, answer, None, "stop", answer, correct))
    return QuestionSamples(question, tuple(rows), split)


def give_states(store: Path) -> None:
    """Put made-up hidden states beside the questions of a store; a probe that reads them loads no model.

    Their first number tells how likely a response is right.
    """
    levels, pool = LevelSettings(), load_capability_pool(str(store), split=None, task=None)
    with PromptModel(ModelSettings("bundled", None, EngineOptions()), pool.fingerprint) as model:
        folder = open_features(model, levels, store=store, given=None)
        keys = [(one.id, tokens_digest(model.chat.prompt_ids(one.messages))) for one in pool.questions]
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(2, len(keys), 1, 4)).astype(np.float32)
    vectors[..., 0] += np.array([20.0 * chance(question) for question in pool.questions], dtype=np.float32)[:, None]
    folder.write(keys, dict(zip(("last_token", "token_mean"), vectors, strict=True)))


def fingerprint(model: str = "bundled", *, temperature: float = 0.8) -> StoreFingerprint:
    prompt = PromptIdentity.from_json(ChatFormat(load_tokenizer(model)).describe())
    identity = ModelIdentity(resolve_model(model), weights_sha256=weights_sha256(resolve_model(model)))
    return StoreFingerprint(identity, prompt, SamplingSettings(temperature), 0)


def capability_store(
    folder: Path, *, model: str = "bundled", temperature: float = 0.8, judged: bool = True, samples: int = SAMPLES
) -> Path:
    """Write a store with the splits of ``SPLITS`` and return its folder."""
    found = fingerprint(model, temperature=temperature)
    store = SampleStore.create_or_open(folder, found, num_samples=samples, engine={"engine": "made up"})
    with store.writer("a") as writer:
        for split, (source, size) in SPLITS.items():
            for question in load_some("word_problems", source, limit=size):
                writer.append(made_up(question, split, judged=judged, samples=samples))
    store.join()
    return folder
