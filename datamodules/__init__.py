"""Lightning datamodules of the project, installed as ``selfcal_lightning.datamodules``."""

if __name__ != "selfcal_lightning.datamodules":
    raise ImportError("Import `selfcal_lightning.datamodules`: under the bare name its classes would exist twice.")

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "probe": ["ProbeDataModule"],
        "questions": ["QuestionSource"],
        "rewards": ["RewardDataModule"],
        "ssc.datamodule": ["SSCDataModule"],
    },
)
