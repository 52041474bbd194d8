"""Training of probes of hidden states."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "batch": ["ProbeBatch"],
        "linear_probe": ["LinearProbeModule"],
    },
)
