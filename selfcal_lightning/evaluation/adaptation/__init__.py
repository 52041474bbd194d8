"""What test-time training did to the questions adapted on and to others, beside the base model with more samples."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "comparison": ["Change", "SetComparison", "compare_set", "verdict"],
        "samples": ["SampledSet", "read_set"],
        "tables": ["adaptation_markdown"],
    },
)
