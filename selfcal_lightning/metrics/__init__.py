"""Metrics as torchmetrics classes, with `plot`; each is imported, and torch with it, when it is first used."""

from selfcal_lightning.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "base": ("ExactMetric",),
        "calibration": ("BinnedCalibrationError",),
        "capability": ("CapabilityMetrics",),
        "collection": ("CalibrationMetrics", "CalibrationPoints"),
        "discrimination": ("ConfidenceAUROC", "WithinQuestionAUROC"),
        "steps": ("QuantileMetrics", "StepMetrics"),
    },
)
