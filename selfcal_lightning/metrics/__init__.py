"""Metrics as torchmetrics classes, with `plot`; each is imported, and torch with it, when it is first used."""

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "base": ("ExactMetric",),
        "calibration": ("BinnedCalibrationError",),
        "capability": ("CapabilityMetrics",),
        "capability_parts": ("CapabilityErrorParts",),
        "collection": ("CalibrationMetrics", "CalibrationPoints"),
        "discrimination": ("ConfidenceAUROC", "WithinQuestionAUROC"),
        "steps": ("QuantileMetrics", "StepMetrics"),
    },
)
