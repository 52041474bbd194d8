"""Confidence in responses: estimators, what is fitted to them, and scoring of what was recorded."""

from __future__ import annotations

from selfcal_lightning.confidence.fitting import __all__ as fitting_names
from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "base": [
            "MissingConfidenceError",
            "SampleScorer",
            "add_scores",
            "check_confidence",
            "confidence_of",
            "how_to_get",
        ],
        "dependence": ["KnownConfidence", "check_name_tells", "recorded_confidences", "refuse_looking_ahead"],
        "fitting": fitting_names,
        "scoring.model": ["ModelSettings"],
        "scoring.running": ["PoolScoring", "ScoreReport", "StoreScoring", "score_pool", "score_store"],
    },
)
