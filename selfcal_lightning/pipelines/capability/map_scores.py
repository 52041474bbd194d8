"""``selfcal map-scores``: capabilities by maps that were fitted on labelled questions."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal

import numpy as np

from selfcal_lightning.capability.fitted_maps import load_maps
from selfcal_lightning.capability.score_files import QuestionScore, check_scores_target, read_scores, write_scores


def run_map_scores(
    scores: str, maps: str, output: str, *, map: Literal["isotonic", "quantile"] = "isotonic"
) -> list[QuestionScore]:
    """Map the capabilities of questions by maps that were fitted on labelled ones.

    Args:
        scores: JSON lines of `selfcal score-questions --output`.
        maps: File of `selfcal fit-capability-maps`.
        output: JSON lines of the mapped capabilities, new or of earlier scores.
        map: "isotonic" maps each question by itself; "quantile" gives all questions together the distribution of the
            calibration questions, by their order alone.

    Returns:
        The mapped capabilities; what computed them is another origin than before.

    Raises:
        InputError: The capabilities were computed otherwise than those of the fit, or the maps were fitted on them.
    """
    check_scores_target(output)
    kept, questions = load_maps(maps), read_scores(scores)
    kept.check((one.scored_by for one in questions), (one.id for one in questions))
    known = [one for one in questions if one.capability is not None]
    values = kept.maps.apply(map, np.array([one.capability for one in known], dtype=np.float64))
    found = {one.id: float(value) for one, value in zip(known, values, strict=True)}
    mapped = [
        replace(one, capability=found.get(one.id), scored_by=one.scored_by and f"{one.scored_by} {map}")
        for one in questions
    ]
    write_scores(output, mapped)
    sys.stdout.write(f"{map}: mean capability {values.mean():.3f} of {len(known):,} questions\nWritten: {output}\n")
    return mapped
