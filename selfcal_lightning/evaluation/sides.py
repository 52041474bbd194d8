"""The sides of an evaluation: which model, with which adapter, and whose responses it is judged on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.scoring.model import ModelSettings
from selfcal_lightning.confidence.scoring.running import StoreScoring, score_store
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.calibration.metrics import SIDES
from selfcal_lightning.model_files.fingerprints import weights_sha256
from selfcal_lightning.models.adapter_files import read_invocation_ids
from selfcal_lightning.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.prompts.chat_format import DEFAULT_QUERY
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.records import Sample, SamplingSettings

MODEL_SIDE = "model"


@dataclass(frozen=True)
class SamplingOptions:
    """How the models of an evaluation are sampled, the same for all of them.

    Attributes:
        num_samples: Responses to each question.
        engine: The engine.
        sampling: How responses are drawn.
        prompt: A prompt of the user's own; None is the task's.
        query: The confidence query.
        devices: Worker processes on this machine.
        seed: Of sampling.
    """

    num_samples: int = 8
    engine: EngineSettings = field(default_factory=EngineSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    prompt: Prompt | None = None
    query: str = DEFAULT_QUERY
    devices: int = 1
    seed: int = 0


@dataclass(frozen=True)
class ModelSide:
    """A model as an evaluation sees it.

    Attributes:
        model: Folder or hub name.
        adapter: Folder of a LoRA adapter on it.
        responses_of: The side whose responses it is judged on; None samples its own.
    """

    model: str
    adapter: str | None = None
    responses_of: str | None = None


def model_sides(before: str | None, after: str | None, model: str | None, adapter: str | None) -> dict[str, ModelSide]:
    """Return the sides that the options of ``selfcal evaluate`` name.

    Raises:
        ValueError: They name no model, or too many.
    """
    if model is not None and before is None and after is None:
        return {MODEL_SIDE: ModelSide(model, adapter)}
    if model is None and before is not None and (after is None) != (adapter is None):
        first, second = SIDES
        if after is not None:
            return {first: ModelSide(before), second: ModelSide(after)}
        activated = adapter is not None and read_invocation_ids(adapter) is not None
        return {first: ModelSide(before), second: ModelSide(before, adapter, first if activated else None)}
    raise InputError(
        "Expected two models (`before` and `after`, or `before` and an `adapter` on it), one (`model`, perhaps with an "
        f"`adapter`) or recorded `pools`, but got before={before!r}, after={after!r}, model={model!r}, "
        f"adapter={adapter!r}."
    )


def score_again(
    side: ModelSide, store: Path, split: str, options: SamplingOptions, *, texts: bool = False
) -> RecordedPool:
    """Return recorded responses with the P(True) of ``side`` in the place of their own.

    The scores stay beside the rows as an annotation, so that a second run finds them.

    Args:
        side: Whose P(True).
        store: The sampled responses.
        split: Split of the store.
        options: Those of the evaluation, of which scoring takes its own.
        texts: Whether the responses' texts are wanted.
    """
    name = f"{P_TRUE}_{weights_sha256(str(side.adapter))[:12]}"
    model = ModelSettings(
        side.model, options.query, options.engine.of(adapter=None if side.adapter is None else str(side.adapter))
    )
    score_store(StoreScoring(str(store), (P_TRUE,), model, name=name, split=split))
    pool = load_recorded_pool(store, split=split, confidences=[name], texts=texts)
    entries = tuple(
        replace(entry, samples=tuple(_with_p_true(sample, name) for sample in entry.samples)) for entry in pool.entries
    )
    return replace(pool, entries=entries)


def _with_p_true(sample: Sample, name: str) -> Sample:
    """Return the sample with its confidence ``name`` as its P(True), and no other one."""
    others = {known: value for known, value in sample.confidences.items() if known not in (name, P_TRUE)}
    value = sample.confidences.get(name)
    own = {} if value is None else {P_TRUE: value}
    return replace(sample, yes_mass=None, no_mass=None, confidences={**others, **own})
