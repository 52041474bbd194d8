"""What is fitted on calibration questions: scalers, fusions, and the files that keep them."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "calibration_split": ["FittedOn", "check_disjoint", "check_not_fitted_on", "halve_pool", "leading_ids"],
        "features": ["ResponseTable", "required_confidences"],
        "files": ["check_fitted_target", "load_fitted", "save_fitted"],
        "fusion": ["Fusion", "FusionTarget", "fit_fusion"],
        "loading": ["FittedScorer", "load_scorers", "scorer_digests"],
        "scaling": ["Scaler", "fit_scaler"],
        "scores": ["ConfidenceScores", "score_confidence", "scores_text"],
        "step_scaling": ["StepScaler", "open_scaled_rewards"],
        "weighed_pool": [
            "WeighedPool",
            "carried_confidences",
            "default_confidences",
            "fit_confidences",
            "is_probability",
            "save_scorers",
            "weigh_pool",
        ],
    },
)
