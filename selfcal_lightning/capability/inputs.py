"""Shared by the verbs of capability: the questions, the model that reads them, and the folder of its states."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcal_lightning.capability.features import FeatureFolder, PromptModel, feature_origin, read_features
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.hidden_states import LevelSettings, PromptStates
from selfcal_lightning.records import IMPORTED, Question


@dataclass(frozen=True)
class CapabilityPool:
    """Questions with recorded responses."""

    path: Path
    pool: RecordedPool
    fingerprint: StoreFingerprint | None

    @property
    def questions(self) -> list[Question]:
        """The questions, in the order of the pool."""
        return [entry.question for entry in self.pool.entries]

    @property
    def sampling(self) -> Mapping[str, Any] | None:
        """How the responses were drawn, JSON-able; None where nobody knows."""
        if self.fingerprint is None or self.fingerprint.model.model == IMPORTED:
            return None
        return self.fingerprint.as_json()["sampling"]


def load_capability_pool(
    path: str, *, split: str | None, task: str | None, confidences: Sequence[str] = ()
) -> CapabilityPool:
    """Read the questions of a pool with the counts of their responses, without texts and tokens."""
    pool = load_recorded_pool(path, split=split, task=task, texts=False, confidences=confidences)
    place = Path(path)
    return CapabilityPool(place, pool, SampleStore(place).round_manifest().fingerprint if place.is_dir() else None)


def feature_folder(
    model: PromptModel, settings: LevelSettings, *, store: Path | None, given: str | None, beside: Path | None = None
) -> FeatureFolder:
    """Return the folder of a model's states: the one named, else one inside of the store."""
    if given is not None:
        return FeatureFolder(given)
    place = store / "features" if store is not None else beside
    if place is None:
        raise InputError("Questions of a file need a `features_dir`, where their hidden states are kept, but got null.")
    origin = json.dumps(feature_origin(model, settings), sort_keys=True)
    return FeatureFolder(place / hashlib.sha256(origin.encode()).hexdigest()[:12])


def states_of(
    model: PromptModel, questions: Sequence[Question], settings: LevelSettings, folder: FeatureFolder
) -> tuple[PromptStates, dict[str, Any]]:
    """Return the hidden states of questions, and what they depend on."""
    return read_features(model, questions, folder, settings), feature_origin(model, settings)
