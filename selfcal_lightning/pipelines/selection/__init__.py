"""The verbs that choose training data and hand it on."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "export_rl": ["run_export_rl"],
        "extract_steps": ["run_extract_steps"],
        "select": ["run_select"],
    },
)
