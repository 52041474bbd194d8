"""What every stored response teaches a reward model, by the name of the target."""

from __future__ import annotations

import numpy as np

from selfcal_lightning.datamodules.ssc.mixture import FloatArray
from selfcal_lightning.datamodules.ssc.tuples import question_slices
from selfcal_lightning.rewards.targets import LABEL_FREE, OF_PREFIXES, RewardTarget, response_targets
from selfcal_lightning.store.index import SampleIndex


def index_targets(index: SampleIndex, target: RewardTarget) -> tuple[FloatArray, np.ndarray]:
    """Return (target of every row or nan, the reason where there is none), both [R].

    Args:
        index: Columns of the store.
        target: Its name.
    """
    values = np.full(len(index), np.nan)
    if target == OF_PREFIXES:
        values = index.confidences.get(OF_PREFIXES, values)
        return values, np.where(np.isnan(values), "no success rate", "").astype(object)
    imported = index.confidences.get("p_true", values)
    masses = index.p_true
    confidence = np.where(np.isnan(masses), imported, masses)
    for rows in question_slices(index):
        found = response_targets(
            target,
            index.answer[rows].tolist(),
            confidences=[None if np.isnan(value) else float(value) for value in confidence[rows]],
            correct=[None if np.isnan(value) else bool(value) for value in index.correct[rows]],
        )
        values[rows] = [np.nan if value is None else value for value in found]
    unreadable = np.array([answer is None for answer in index.answer], dtype=bool)
    absent = "no confidence" if target == "ssc" else "zero confidence mass"
    reason = np.where(unreadable, "unreadable", absent if target in LABEL_FREE else "no label")
    return values, np.where(np.isnan(values), reason, "").astype(object)
