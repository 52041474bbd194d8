"""Confidences in single responses, averaged over some of them: an estimate of the capability that they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from selfcal_lightning.capability.estimators import RESPONSE_ESTIMATORS
from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.records import QuestionSamples, Sample
from selfcal_lightning.store.annotations import annotation_names
from selfcal_lightning.store.question_annotations import question_annotation_names


def averaged_names(pool: Path, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that are confidences beside the rows of a store, to be averaged over responses."""
    if not pool.is_dir():
        return []
    taken = {*RESPONSE_ESTIMATORS, *question_annotation_names(pool)}
    beside = annotation_names(pool)
    return [name for name in names if name in beside and name not in taken]


def mean_confidence(entries: Sequence[QuestionSamples], name: str, *, stop: int) -> Floats:
    """Return the mean of a confidence over the first ``stop`` responses of each question [Q]; nan where none has it.

    A response without that confidence is left out of the mean: it has not been asked, or gave none.

    Args:
        entries: The questions.
        name: "p_true" is what was asked as the responses were drawn, unless a confidence of that name is beside them.
        stop: Responses that count.

    Raises:
        InputError: No response has it.
    """
    means = np.array([_mean([_value(sample, name) for sample in entry.samples[:stop]]) for entry in entries])
    if np.isnan(means).all():
        raise InputError(
            f"Expected responses with the confidence {name!r}, but got none in {len(entries):,} questions. `selfcal "
            "score` puts it on them."
        )
    return means


def _value(sample: Sample, name: str) -> float | None:
    found = sample.confidences.get(name)
    return sample.p_true if found is None and name == P_TRUE else found


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else math.nan
