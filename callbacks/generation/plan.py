"""What ``SSCGeneration`` will draw, and settings that it refuses, known before an engine starts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.runtime.imports import check_installed
from selfcal_lightning.runtime.plan import Place, Plan
from selfcal_lightning.store.plan import plan_sampling
from selfcal_lightning.training.sampled_data import QuestionData

if TYPE_CHECKING:
    from selfcal_lightning.callbacks.generation.callback import SSCGeneration


def splits_of(verb: str, data: QuestionData) -> tuple[str, ...]:
    """Return the splits that a verb of the Trainer reads."""
    if verb == "predict":
        return (data.predict_split,)
    return {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}[verb]


def plan_generation(callback: SSCGeneration, verb: str, trainer: Trainer, data: QuestionData) -> Plan:
    """Return how many responses a verb of the Trainer needs, and what of them the store holds.

    Args:
        callback: Who draws them.
        verb: The verb.
        trainer: The trainer.
        data: The data module, which knows questions, store and number of samples.

    Raises:
        MissingPackageError: The engine is an extra that is not installed.
        InputError: ``store_dir`` is something else than a store.
    """
    if callback.engine.name == "vllm":
        check_installed("vllm", extra="vllm")
    splits = [split for split in splits_of(verb, data) if data.sources[split]]
    if not splits:
        return Plan(notes=(f"No sources of questions are configured: the samples in {data.store_dir} are used.",))
    known = data.known_questions(verb)
    limits = [source.limit for split in splits for source in data.sources[split]]
    sampling = plan_sampling(
        data.store_dir,
        None if known is None else {question.id for split in splits for question in known[split]},
        num_samples=data.num_samples,
        most_tokens=callback.sampling.max_new_tokens,
        most_questions=None if None in limits else sum(limit or 0 for limit in limits),
    )
    return Plan(sampling=(sampling,), places=(Place("samples", data.store_dir),), notes=_later_rounds(trainer, data))


def check_generation_settings(
    engine: EngineSettings,
    *,
    gpu_memory_utilization: float | None,
    questions_per_shard: int,
    stall_timeout: float,
) -> None:
    """Raise InputError where one of them is out of its range; for their meaning see ``SSCGeneration``."""
    engine.check_local()
    if engine.name == "transformers" and gpu_memory_utilization is not None:
        raise InputError("Expected `gpu_memory_utilization` to be None with the engine transformers; it is vLLM's.")
    if gpu_memory_utilization is not None and not 0.0 < gpu_memory_utilization <= 1.0:
        raise InputError(f"Expected `gpu_memory_utilization` to lie in (0, 1], but got {gpu_memory_utilization}.")
    if questions_per_shard < 1:
        raise InputError(f"Expected `questions_per_shard` to be at least 1, but got {questions_per_shard}.")
    if not stall_timeout > 0.0:
        raise InputError(f"Expected `stall_timeout` to be above 0 seconds, but got {stall_timeout}.")


def _later_rounds(trainer: Trainer, data: QuestionData) -> tuple[str, ...]:
    every, epochs = data.regenerate_every_n_epochs, trainer.max_epochs
    if every is None or epochs in (None, -1):
        return ()
    rounds = math.ceil(epochs / every) - 1
    return (f"{rounds} later rounds sample the training questions again, as many responses each.",) if rounds else ()
