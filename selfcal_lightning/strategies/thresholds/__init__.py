"""Thresholds chosen on calibration questions, and those with a guarantee."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "calibration_pool": ["CalibrationPool"],
        "fitted": ["FittedThreshold"],
        "fitting": [
            "NoThresholdError",
            "fit_accuracy_threshold",
            "fit_budget_threshold",
            "fit_risk_threshold",
            "threshold_for_budget",
        ],
        "grids": ["GridOutcome", "GridSums", "as_gridded", "confidence_quantiles", "grid_of", "grid_outcome"],
    },
)
