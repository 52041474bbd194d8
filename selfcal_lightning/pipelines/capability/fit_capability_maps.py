"""``selfcal fit-capability-maps``: calibrated capabilities and pass@k, fitted once and kept."""

from __future__ import annotations

import sys

from selfcal_lightning.capability.calibration import calibration_questions
from selfcal_lightning.capability.fitted_maps import KeptMaps, check_maps_target, maps_of


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
