"""``selfcal fit-capability-maps`` and ``map-scores``: calibrated capabilities and pass@k, fitted once and kept."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Literal

import numpy as np

from selfcal_lightning.capability.calibration import calibration_questions
from selfcal_lightning.capability.fitted_maps import KeptMaps, check_maps_target, load_maps, maps_of
from selfcal_lightning.capability.score_files import QuestionScore, check_scores_target, read_scores, write_scores


def run_fit_capability_maps(
    pool: str,
    output: str,
    *,
    split: str | None = "calibration",
    estimator: str = "probe",
    ks: list[int] | None = None,
) -> KeptMaps:
    """Fit maps of predicted capabilities on labelled questions: isotonic, quantile, per k, Beta and inflated Beta.

    `selfcal map-scores`, `predict-pass-at-k` and `allocate` read the file. A probe that is calibrated gains nothing by
    a map of its values on some hundred questions; a rank, a log-probability or the top share needs one.

    Args:
        pool: Folder of a store with labelled questions that have values of ``estimator``.
        output: JSON file of the maps, new or of earlier ones.
        split: Split of the store; null takes all.
        estimator: Name of the values, of `selfcal score-questions`.
        ks: Numbers of samples that maps to pass@k are wanted for; null takes every one up to the fewest responses of a
            question.

    Returns:
        The maps.

    Raises:
        InputError: There are no such values, or responses were not judged.
    """
    check_maps_target(output)
    kept = maps_of(calibration_questions(pool, split=split, name=estimator), estimator, ks=ks)
    kept.save(output)
    maps = kept.maps
    sys.stdout.write(
        f"Fitted on {kept.fitted_on.num_questions:,} questions: an isotonic map of {len(maps.knots):,} knots, Beta "
        f"with concentration {maps.concentration:.3g}, inflated Beta with inflation {maps.inflated.inflation:.3g} and "
        f"concentration {maps.inflated.concentration:.3g}, pass@k for {len(maps.per_k.k):,} k.\nWritten: {output}\n"
    )
    return kept


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
