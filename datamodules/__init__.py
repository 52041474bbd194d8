"""Lightning datamodules of the project, installed as ``selfcal_lightning.datamodules``."""

from __future__ import annotations

if __name__ != "selfcal_lightning.datamodules":
    raise ImportError("Import `selfcal_lightning.datamodules`: under the bare name its classes would exist twice.")

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "probe": ["ProbeDataModule"],
        "questions": ["QuestionSource"],
        "rewards": ["RewardDataModule"],
        "ssc": ["SSCDataModule"],
    },
)
