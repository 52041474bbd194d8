"""The embedded engine, on transformers."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "engine": ["TransformersEngine"],
        "model": ["load_network"],
        "output_layer": ["exact_head"],
        "sleep": ["hold_against_module"],
    },
)
