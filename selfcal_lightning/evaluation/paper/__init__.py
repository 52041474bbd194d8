"""The arithmetic of the published evaluation, for comparison."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "outputs": ["check_one_confidence", "run_paper"],
    },
)
