"""Calibration of two sides on one test set: figures, intervals, votes."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "comparison": ["compare_calibration"],
        "metrics": ["scored_responses", "summarise"],
        "votes": ["compare_votes"],
    },
)
