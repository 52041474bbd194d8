"""Capability: the chance that a sampled response to a question is right, before there is one."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "calibration": ["CalibrationQuestions", "calibration_questions"],
        "estimators": ["PROMPT_ESTIMATORS", "RESPONSE_ESTIMATORS", "ResponseEstimator", "p_true_before"],
        "feature_folder": ["FeatureFolder", "prompt_digest"],
        "fitted_maps": ["CapabilityMaps", "KeptMaps", "fit_capability_maps", "load_maps", "maps_of"],
        "inputs": ["CapabilityPool", "feature_folder", "load_capability_pool", "states_of"],
        "label_free": ["LABEL_FREE_PROBE", "label_free_confidences", "with_question_confidence"],
        "probe": ["CapabilityProbe", "Pooling", "ProbeBasis", "ProbeHead", "design", "load_probe"],
        "probe_fitting": ["fit_probe"],
        "prompt_features": ["feature_origin", "read_features"],
        "prompt_model": ["PromptModel"],
        "score_files": ["QuestionScore", "read_scores", "write_scores"],
        "scoring": ["QuestionScoring", "keep_in_store", "levels_of", "score_questions"],
        "question_table": ["QuestionTable", "Target", "question_table"],
    },
)
