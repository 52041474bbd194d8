"""The data module of test-time training: groups of responses with rewards, streamed from a store."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "collate": ["PolicyCollator"],
        "datamodule": ["RolloutDataModule"],
    },
)
