"""Runs of the sampler over the fake engine, and what they leave in a store."""

from __future__ import annotations

from pathlib import Path

from support.fakes import FakeChat, FakeEngine, FakeTask
from support.kill_worker import NUM_SAMPLES, SAMPLING, SEED

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.sampling.sampler import GenerationReport, generate_samples, store_fingerprint
from selfcal_lightning.records import Question, QuestionSamples


def open_store(
    path: Path, engine: FakeEngine, *, num_samples: int = NUM_SAMPLES, split: str = "train", extend: bool = False
) -> SampleStore:
    fingerprint = store_fingerprint(engine, FakeChat(), SAMPLING, SEED)
    return SampleStore.create_or_open(
        path, fingerprint, num_samples=num_samples, engine=engine.describe(), splits=(split,), extend=extend
    )


def run(
    path: Path,
    questions: list[Question],
    *,
    engine: FakeEngine | None = None,
    num_samples: int = NUM_SAMPLES,
    extend: bool = False,
    **options: object,
) -> GenerationReport:
    engine = engine or FakeEngine()
    arguments = {"split": "train", "tasks": FakeTask, "progress": False} | options
    store = open_store(path, engine, num_samples=num_samples, split=str(arguments["split"]), extend=extend)
    return generate_samples(
        questions, engine=engine, chat=FakeChat(), store=store, num_samples=num_samples, **arguments
    )


def contents(path: Path) -> dict[str, QuestionSamples]:
    store = SampleStore(path)
    store.join()
    return {group.question.id: group for group in store.samples()}
