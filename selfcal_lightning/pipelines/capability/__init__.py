"""The verbs about capability: fit a probe, score questions, judge the scores, and act on them."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "allocate": ["run_allocate"],
        "evaluate_capability": ["run_evaluate_capability"],
        "fit_asking_threshold": ["run_fit_asking_threshold"],
        "fit_capability_maps": ["run_fit_capability_maps"],
        "fit_probe": ["run_fit_probe"],
        "judge": ["JudgeReport", "run_judge"],
        "map_scores": ["run_map_scores"],
        "predict_pass_at_k": ["run_predict_pass_at_k"],
        "score_questions": ["run_score_questions"],
    },
)
