"""Labelled questions of a store whose capabilities were predicted: what distributions and maps are fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfcal_lightning.capability.inputs import load_capability_pool
from selfcal_lightning.capability.origins import check_origins
from selfcal_lightning.capability.question_table import QuestionTable, question_table
from selfcal_lightning.capability.score_files import QuestionScore, origin_digest
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.records import Question
from selfcal_lightning.store.question_annotations import QuestionAnnotation, question_values
from selfcal_lightning.store.shards import question_digest


@dataclass(frozen=True)
class CalibrationQuestions:
    """Q labelled questions with predicted capabilities.

    Attributes:
        predicted: Their predicted capabilities [Q].
        table: What their responses show.
        questions: The questions.
        scored_by: Digest of what predicted the capabilities (``score_files.origin_digest``).
    """

    predicted: Floats
    table: QuestionTable
    questions: tuple[Question, ...]
    scored_by: str


def calibration_questions(
    store_dir: str, *, split: str | None, name: str, asked: Sequence[QuestionScore] = ()
) -> CalibrationQuestions:
    """Read the questions of a split that have a value of the name.

    Args:
        store_dir: Folder of a store.
        split: Split; None takes all.
        name: Name of the values, of `selfcal score-questions`.
        asked: Questions that something is to be predicted for: scored likewise, and none of them among these.

    Raises:
        InputError: There is no such value, it was computed in another way or fitted on these questions, responses were
            not judged, or a question is to be predicted.
    """
    read = load_capability_pool(store_dir, split=split, task=None)
    keys = [(question.id, question_digest(question)) for question in read.questions]
    values = question_values(store_dir, name, keys)
    check_origins(read, [name])
    scored_by = _check_scored_alike(store_dir, name, asked)
    known = np.array([value is not None for value in values])
    if not known.any():
        raise InputError(
            f"Expected questions of split {split!r} in {store_dir} to have values of {name!r}, but got none. Score "
            f"them first: `selfcal score-questions --store_dir {store_dir} --split {split}`."
        )
    table = question_table(read.pool.entries).select(known)
    table.check_judged("calibration_split", str(split))
    if shared := {one.id for one in asked}.intersection(table.question_id.tolist()):
        raise InputError(
            f"Expected calibration questions that are not predicted, but got {len(shared):,} of them, such as "
            f"{min(shared)!r}. Name another `calibration_split`."
        )
    return CalibrationQuestions(
        np.array([value for value in values if value is not None]),
        table,
        tuple(question for question, value in zip(read.questions, values, strict=True) if value is not None),
        scored_by,
    )


def _check_scored_alike(store_dir: str, name: str, asked: Sequence[QuestionScore]) -> str:
    """Return the digest of what computed the values of a store, and refuse questions that were scored otherwise."""
    record = QuestionAnnotation(store_dir, name).record
    digest = origin_digest({} if record is None else record.origin)
    if {one.scored_by for one in asked} - {None, digest}:
        raise InputError(
            f"Expected `scores` to have been computed as the values {name!r} in {store_dir}, but got those of another "
            "probe, model or query. Score both with the same one."
        )
    return digest
