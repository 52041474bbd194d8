"""The fast engine: vLLM in a process of its own. Importing this needs no vLLM."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "engine": ["VLLMEngine"],
        "flights": ["MAX_SCORED_IDS"],
    },
)
