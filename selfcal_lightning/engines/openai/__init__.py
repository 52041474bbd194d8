"""The engine of OpenAI-compatible servers."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "address": ["check_base_url"],
        "engine": ["OpenAIEngine"],
        "reach": ["check_reachable"],
        "wire": ["check_sampling"],
    },
)
