"""The embedded engine, on transformers."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "engine": ["TransformersEngine"],
        "model": ["exact_head", "load_network"],
        "sleep": ["hold_against_module"],
    },
)
