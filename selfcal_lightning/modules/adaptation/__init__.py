"""Test-time training: a policy gradient over groups of responses, whose confidence stays calibrated."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "batch": ["PolicyBatch"],
        "module": ["TestTimeTrainingModule"],
    },
)
