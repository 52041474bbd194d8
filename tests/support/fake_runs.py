from pathlib import Path
from typing import Any

from support.fakes import FakeChat, FakeEngine, FakeTask
from support.kill_worker import NUM_SAMPLES, SAMPLING, SEED

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.sampling.sampler import GenerationReport, generate_samples, store_fingerprint
from selfcal_lightning.records import Question, QuestionSamples

Groups = dict[str, QuestionSamples]


def run(path: Path, questions: list[Question], *, engine: FakeEngine | None = None, **options: Any) -> GenerationReport:
    settings = {
        "split": "train", "num_samples": NUM_SAMPLES, "sampling": SAMPLING, "seed": SEED, "tasks": FakeTask,
        "progress": False, **options,
    }  # fmt: skip
    return generate_samples(questions, path, engine=engine or FakeEngine(), chat=FakeChat(), **settings)


def open_store(path: Path, *, num_samples: int | None = NUM_SAMPLES) -> SampleStore:
    """Return a store as a run makes it, without samples."""
    fingerprint = store_fingerprint(FakeEngine(), FakeChat(), SAMPLING, SEED)
    return SampleStore.create_or_open(path, fingerprint, num_samples=num_samples, engine={})


def contents(path: Path) -> Groups:
    store = SampleStore(path)
    store.join()
    return {group.question.id: group for group in store.samples()}
