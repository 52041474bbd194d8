"""Confidence in responses: estimators, what is fitted to them, and scoring of what was recorded."""

from __future__ import annotations

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
        "fitting.calibration_split": ["FittedOn", "check_disjoint", "check_not_fitted_on", "halve_pool", "leading_ids"],
        "fitting.features": ["ResponseTable", "required_confidences"],
        "fitting.files": ["check_fitted_target", "load_fitted", "save_fitted"],
        "fitting.fusion": ["Fusion", "FusionTarget", "fit_fusion"],
        "fitting.loading": ["FittedScorer", "load_scorers", "scorer_digests"],
        "fitting.scaling": ["Scaler", "fit_scaler"],
        "fitting.scores": ["ConfidenceScores", "score_confidence", "scores_text"],
        "fitting.weighed_pool": [
            "WeighedPool",
            "carried_confidences",
            "default_confidences",
            "fit_confidences",
            "is_probability",
            "save_scorers",
            "weigh_pool",
        ],
        "scoring.model": ["ModelSettings"],
        "scoring.running": ["PoolScoring", "ScoreReport", "StoreScoring", "score_pool", "score_store"],
    },
)
