"""The data module of reward models: responses with a target at every step, streamed from a store."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "collate": ["RewardCollator"],
        "datamodule": ["RewardDataModule"],
    },
)
