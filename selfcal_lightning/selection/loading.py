"""What a selection reads of a store, and what it remembers of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from selfcal_lightning.confidence.dependence import pool_dependent, recorded_confidences
from selfcal_lightning.confidence.estimators.standardised import WEIGHTS
from selfcal_lightning.confidence.fitting.features import required_confidences
from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.recorded import annotation_estimators
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.runtime.progress import Progress
from selfcal_lightning.selection.settings import FUSED, FUSED_FEATURES, PICK, SelectionSettings
from selfcal_lightning.store.annotations import Annotation, annotation_names
from selfcal_lightning.store.columns import counted_samples
from selfcal_lightning.store.sample_store import SampleStore


@dataclass(frozen=True)
class Source:
    """Questions of a round of a store, and what says later that it is the same one.

    Attributes:
        entries: The questions with their responses, without texts.
        shards: Of each question by id: the hash of the file in which its responses were written first.
        store: Where the store lies, what its samples are, and digests of the files that were read.
        scores: Of each annotation that was read: what computed it and the digests of its files.
    """

    entries: tuple[QuestionSamples, ...]
    shards: dict[str, str]
    store: dict[str, Any]
    scores: dict[str, Any]


def read_source(
    store_dir: str, settings: SelectionSettings, *, split: str | None, task: str | None, round: int
) -> Source:
    """Read what a selection needs of a store.

    Raises:
        InputError: It holds no such questions.
    """
    store = SampleStore(store_dir)
    record = store.round_manifest(round)
    names = _annotations(store_dir, settings)
    index = store.index(split=split, round=round, confidences=names)
    index = index if task is None else index.select(index.task == task)
    if not len(index):
        raise InputError(
            f"Expected {store_dir} to hold joined samples of split {split!r}, round {round} and task {task!r}, but got "
            "none. Check the names, or finish `selfcal generate` first."
        )
    with Progress(len(index), label=f"Reading {store.path.name}", only_if_slow=True) as progress:
        entries = tuple(counted_samples(store, index, round=round, on_rows=progress.update))
    origins = {entry.file: entry.origin for entry in store.manifest.shards}
    firsts = np.flatnonzero(np.diff(index.question_index, prepend=-1))
    shards = {index.question_id[at]: origins[index.files[index.shard[at]]] for at in firsts.tolist()}
    described = {
        "path": str(store_dir),
        "fingerprint": record.digest,
        "model": record.fingerprint.as_json()["model"],
        "round": round,
        "split": split,
        "task": task,
        "shards": sorted(set(shards.values())),
    }
    return Source(entries, shards, described, {name: _origin(store_dir, name) for name in names})


def _annotations(store_dir: str, settings: SelectionSettings) -> list[str]:
    """Return the annotations that are read: of those that are there, what is named or may enter the fusion.

    Raises:
        InputError: One of the fusion's features depends on the other responses: it would learn the votes from votes. Or
            questions are kept by a score that compares the responses to one.
    """
    features = () if settings.pick != FUSED else FUSED_FEATURES if settings.features is None else settings.features
    required = required_confidences(features)
    there = annotation_names(store_dir)
    wanted = [name for name in dict.fromkeys([*settings.names, *required]) if name in there]
    estimators = annotation_estimators(store_dir, wanted)
    across = settings.pick if settings.keep == PICK else settings.keep
    if estimators.get(across) in {weight.name for weight in WEIGHTS}:
        raise InputError(
            f"Expected `keep` to compare questions, but got {across!r}, whose values compare the responses to one "
            "question: nobody is sure or unsure by them. Name it as `pick`, and keep by another score, such as share."
        )
    known = recorded_confidences(estimators)
    if of_votes := pool_dependent(required, known):
        raise InputError(
            f"Expected `features` to belong to one response, but got {', '.join(of_votes)}, which are votes themselves."
        )
    return wanted


def _origin(store_dir: str, name: str) -> dict[str, Any]:
    record = Annotation(store_dir, name).record
    if record is None:
        raise InputError(f"Expected {name!r} to be an annotation of {store_dir}, but got none of that name.")
    return {"origin": dict(record.origin), "sha256": digest_of([part.sha256 for part in record.parts])}


def digest_of(content: Sequence[str] | dict[str, Any]) -> str:
    """Return a sha256 of plain JSON types.

    Example:
        >>> digest_of({"a": 1}) == digest_of({"a": 1}), digest_of(["a"]) == digest_of(["b"])
        (True, False)
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
