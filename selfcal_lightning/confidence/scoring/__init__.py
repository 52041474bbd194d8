"""Recorded responses that get further confidences, in a store or in a JSON-lines pool."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "model": ["ModelSettings"],
        "running": ["PoolScoring", "ScoreReport", "StoreScoring", "score_pool", "score_store"],
    },
)
