"""Fitted confidences from their JSON files, whatever their kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from selfcal_lightning.confidence.base import STORED
from selfcal_lightning.confidence.dependence import KnownConfidence
from selfcal_lightning.confidence.fitting.earlier_files import load_confidence
from selfcal_lightning.confidence.fitting.fusion import KIND, Fusion
from selfcal_lightning.confidence.fitting.scaling import SCALER_KINDS, Scaler
from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.store.annotations import annotation_names

FittedScorer = Scaler | Fusion


def load_scorer(path: str | Path, *, known: Sequence[KnownConfidence] = ()) -> FittedScorer:
    """Read a scaler or a fusion from the JSON file that its ``save`` wrote, or that of the version before did.

    Args:
        path: The file.
        known: Scorers that add what it may read; only of a file of the version before these are asked.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It is no such file, of another version or kind, or damaged.
    """
    kind, content = load_confidence(path, (*SCALER_KINDS, KIND), known=known)
    try:
        return Fusion.from_json(content) if kind == KIND else Scaler.from_json(kind, content)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"Expected {path} to hold a whole {kind}, but got {reason}. Fit it again.") from error


def load_scorers(paths: Sequence[str | Path]) -> list[FittedScorer]:
    """Read several; each may read what the ones before it add, so that the order is that of the computation.

    Raises:
        InputError: Two have one name, or one reads what a later one adds.
    """
    scorers: list[FittedScorer] = []
    for path in paths:
        scorers.append(load_scorer(path, known=scorers))
    names = [scorer.name for scorer in scorers]
    if len(set(names)) < len(names):
        raise InputError(f"Expected fitted confidences of different names, but got {names}.")
    for position, scorer in enumerate(scorers):
        late = [name for name in scorer.requires if name in names[position:]]
        if late:
            raise InputError(f"Expected {late[0]!r} before {scorer.name!r}, which reads it, but got it after.")
    return scorers


def scorer_digests(confidence: str | None, scorers: Sequence[FittedScorer]) -> dict[str, str]:
    """Return the sha256 of each scorer that a confidence is computed by, directly or through one another, by name.

    Args:
        confidence: What is read; None reads nothing.
        scorers: Scorers at hand, in the order of computation.
    """
    wanted = {confidence}
    found = {}
    for scorer in reversed(scorers):
        if scorer.name in wanted:
            wanted.update(scorer.requires)
            found[scorer.name] = _digest(scorer)
    return dict(sorted(found.items()))


def _digest(scorer: FittedScorer) -> str:
    kind = KIND if isinstance(scorer, Fusion) else scorer.map.kind
    content = json.dumps({"kind": kind, **scorer.as_json()}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def load_for_fitting(
    pool: str,
    split: str | None,
    task: str | None,
    needed: Sequence[str],
    scorers: Sequence[FittedScorer],
    *,
    texts: bool = False,
) -> RecordedPool:
    """Return the questions of a calibration split, with the annotations of a store that fitting needs merged in.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        split: The split; None takes all questions.
        task: Task to read; of a file, the task of all its questions.
        needed: Names of the confidences that are fitted on.
        scorers: Fitted confidences that are put on the samples first.
        texts: Whether texts are read too.
    """
    names = {*needed, *(name for scorer in scorers for name in scorer.requires)}
    names -= {*STORED, *(scorer.name for scorer in scorers)}
    annotations = sorted(names & set(annotation_names(pool))) if Path(pool).is_dir() else []
    return load_recorded_pool(pool, split=split, task=task, confidences=annotations, texts=texts)
