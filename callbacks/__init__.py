"""Lightning callbacks of the project, installed as ``selfcal_lightning.callbacks``."""

if __name__ != "selfcal_lightning.callbacks":
    raise ImportError("Import `selfcal_lightning.callbacks`: under the bare name its classes would exist twice.")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adaptation_guard": ["AdaptationGuard"],
        "adapter_export": ["AdapterExport"],
        "calibration_curve": ["CalibrationCurve", "CapabilityCurve"],
        "confidence_writer": ["ConfidenceWriter"],
        "generation": ["SSCGeneration"],
        "preemption": ["PreemptionCheckpoint"],
    },
)
