"""The callback that samples the store's rounds, before training and between epochs."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "callback": ["SSCGeneration"],
    },
)
