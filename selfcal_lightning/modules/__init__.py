"""LightningModules."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "adaptation": ["PolicyBatch", "TestTimeTrainingModule"],
        "batch": ["SSCBatch"],
        "exported": ["ExportedAdapter"],
        "probes": ["LinearProbeModule", "ProbeBatch"],
        "rewards": ["QuantileRewardModule", "RewardBatch"],
        "scored": ["ScoredRows"],
        "self_calibration": ["SelfCalibrationModule"],
    },
)
